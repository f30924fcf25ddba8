"""Training on a small artifact made here: it learns, resumes exactly and refuses what is wrong."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from stages import contracts
from stages.dspark.config import DrafterConfig
from stages.params import load_params, load_services
from stages.train import stage
from stages.train.batches import plan_epoch
from stages.train.checkpoint import LATEST
from stages.train.schedule import PROBE_STEPS

ROOT = Path(__file__).parents[2]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    tokens=st.integers(10, 200),
    seed=st.integers(0, 9),
)
def test_an_epoch_holds_every_document_once_and_batches_fit(lengths, tokens, seed):
    plan = plan_epoch(lengths, batch_tokens=tokens, seed=seed)
    assert sorted(i for batch in plan for i in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens
    assert plan == plan_epoch(lengths, batch_tokens=tokens, seed=seed)


def _command(project, out):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = ["--target", "data/target", "--hidden-states", "data/hidden_states", "--out", out]
    return subprocess.Popen(
        [sys.executable, "-m", "stages.train", *arguments],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _change_train(project, **changes):
    path = project / "params.yaml"
    params = yaml.safe_load(path.read_text())
    params["train"] |= changes
    path.write_text(yaml.safe_dump(params))


def test_a_budget_run_killed_anywhere_ends_with_the_bits_of_a_whole_run_of_its_steps(project):
    _change_train(project, budget_s=3.0, checkpoint_interval_s=0.02)
    kills = 0
    while True:
        attempt = _command(project, "killed")
        seen = _step_of(project)
        while attempt.poll() is None and (kills >= 2 or _step_of(project) <= seen):
            time.sleep(0.01)
        if attempt.poll() is None:
            attempt.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = attempt.communicate()
        if attempt.returncode != -signal.SIGKILL:
            break
    assert kills == 2
    assert attempt.returncode == 0, errors
    steps = contracts.read_manifest(project / "killed", "train").counts["steps"]
    assert steps >= PROBE_STEPS
    whole = {"budget_s": None, "max_steps": steps, "warmup_fraction": PROBE_STEPS / steps}
    assert _run(project, train=whole | {"checkpoint_interval_s": 60})["steps"] == steps
    expected, found = (
        load_file(project / "data/drafter/model.safetensors"),
        load_file(project / "killed/model.safetensors"),
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def _step_of(project):
    """The step of the resume point, or -1; a reader may meet the moment of the rename."""
    from stages.train.checkpoint import Progress, _read

    for path in project.glob(f"run/train-*/{LATEST}"):
        try:
            return Progress(**json.loads(_read(path)[1]["progress"])).step
        except (OSError, FileNotFoundError):
            return -1
    return -1


def _run(project, **changes):
    params = load_params(project / "params.yaml")
    stage.run(
        drafter=params.drafter.model_copy(update=changes.pop("drafter", {})),
        train=params.train.model_copy(update=changes.pop("train", {})),
        services=load_services(project / "services.yaml"),
        target=project / "data/target",
        hidden_states=project / "data/hidden_states",
        out=project / "data/drafter",
    )
    return json.loads((project / "data/drafter/metrics.json").read_text())


def test_a_learnable_language_is_learnt_and_the_artifact_is_whole(project):
    metrics = _run(project, train={"num_epochs": 150})
    assert metrics["validation_greedy_acceptance_length"] > 3
    assert metrics["train_acceptance_length"] > 3
    assert metrics["domains"]["qa"]["validation_out_of_vocabulary"] == pytest.approx(
        1 - metrics["draft_vocab_coverage"]
    )
    with (project / "data/drafter/curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["validation_acceptance_length/qa"]) > 3
    assert rows[-1]["validation_acceptance_length/rag"] == ""
    assert (project / "data/drafter/plots/curves.png").stat().st_size > 1000
    plots = yaml.safe_load((ROOT / "dvc.yaml").read_text())["plots"]
    of_files = [plot["y"] for entry in plots for plot in entry.values() if "step" in plot.values()]
    assert of_files, "dvc.yaml plots the curve"
    for columns in of_files:
        assert set(columns["data/drafter/curve.csv"]) <= rows[0].keys()
    manifest = contracts.read_manifest(project / "data/drafter", "train")
    assert manifest.counts["train"] == 20
    assert manifest.counts["validation"] == 4
    tensors = load_file(project / "data/drafter/model.safetensors")
    target_ids = tensors["d2t"] + torch.arange(60)
    assert torch.equal(target_ids, tensors["t2d"].nonzero().flatten())
    assert not list(project.glob("run/train-*"))


def test_a_diverging_run_says_so_and_keeps_the_last_good_resume_point(project):
    with pytest.raises(ValueError, match=r"the loss is nan at step .* train.learning_rate"):
        _run(project, train={"learning_rate": 1e30, "max_grad_norm": 1e30})
    changes = {"learning_rate": 30.0, "checkpoint_interval_s": 0.0, "divergence_steps": 3}
    with pytest.raises(ValueError, match=r"times its median .* 3 steps .* until a run with other"):
        _run(project, train=changes | {"max_steps": 500, "warmup_fraction": 0.3})
    (latest,) = project.glob(f"run/train-*/{LATEST}")
    assert all(bool(value.isfinite().all()) for value in load_file(latest).values())


def test_a_run_without_gains_stops_early_and_stays_stopped(project):
    changes = {"early_stop_patience": 2, "early_stop_min_gain": 10.0, "validations": 10}
    metrics = _run(project, train=changes)
    curve = (project / "data/drafter/curve.csv").read_text().splitlines()
    assert len(curve) == 1 + 3  # the first validation is a gain, two are not
    assert metrics["steps"] == 36  # of 120


def test_a_draft_vocabulary_larger_than_the_targets_is_the_targets(project):
    metrics = _run(project, drafter={"draft_vocab_size": 10_000}, train={"num_epochs": 1})
    assert metrics["draft_vocab_coverage"] == 1.0
    assert "d2t" not in load_file(project / "data/drafter/model.safetensors")


@pytest.mark.parametrize("head", ["gated", "rnn", "none"])
def test_every_head_trains_as_an_experiment_and_is_refused_otherwise(project, head):
    changes = {"markov_head": head}
    if head == "none":
        changes |= {"markov_rank": 0, "confidence_head_with_markov": False}
    with pytest.raises(ValueError, match=f"would not serve this drafter: markov_head {head}"):
        _run(project, drafter=changes)
    assert not (project / "run").exists()
    metrics = _run(project, drafter=changes | {"experiment": True})
    assert metrics["validation_greedy_acceptance_length"] > 1.5
    body = json.loads((project / "data/drafter/config.json").read_text())
    assert DrafterConfig.from_json(body).markov_head == head


def test_a_target_whose_heads_vllm_does_not_serve_is_refused_before_anything_is_made(project):
    with pytest.raises(ValueError, match="head_dim 16: vLLM"):
        _run(project, drafter={"head_dim": None})
    assert not (project / "run").exists()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("flipped", r"shard-00000.parquet: expected sha256"),
        ("truncated", r"shard-00000.parquet: expected \d+ bytes, found \d+; truncated"),
        ("gone", r"shard-00000.parquet: listed in the manifest but missing"),
        ("unfinished", r"hidden_states has no manifest.json \(unfinished\?\)"),
    ],
)
def test_damaged_states_are_refused_before_training(project, damage, told):
    shard = project / "data/hidden_states/shard-00000.parquet"
    content = bytearray(shard.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "truncated":
        shard.write_bytes(content[:-100])
    elif damage == "gone":
        shard.unlink()
    else:
        (shard.parent / "manifest.json").unlink()
    with pytest.raises(contracts.ArtifactError, match=told):
        _run(project)
