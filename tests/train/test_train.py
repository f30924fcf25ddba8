"""Training on a small artifact made here: it learns, resumes exactly and refuses what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stages import contracts
from stages.params import load_params, load_services
from stages.train import stage
from stages.train.batches import plan_epoch
from stages.train.loop import learning_rate

ROOT = Path(__file__).parents[2]
HIDDEN, VOCAB, PLANES = 32, 64, 3
LAYER_IDS = [1, 2]


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


def test_the_learning_rate_warms_up_and_ends_at_its_minimum():
    params = load_params(ROOT / "params.yaml").train
    rates = [learning_rate(step, num_steps=100, params=params) for step in range(100)]
    peak = max(range(100), key=rates.__getitem__)
    assert rates[peak] == pytest.approx(params.learning_rate)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] >= params.learning_rate * params.min_learning_rate_fraction


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder with data/target and data/hidden_states of a cyclic language: token t is
    followed by 3t+1, and the states tell the token, so a drafter can learn it."""
    g = torch.Generator().manual_seed(0)
    target, states = tmp_path / "data/target", tmp_path / "data/hidden_states"
    target.mkdir(parents=True)
    states.mkdir(parents=True)
    embedding = torch.randn(VOCAB, HIDDEN, generator=g)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (target / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": embedding.bfloat16(),
            "model.norm.weight": torch.ones(HIDDEN),
        },
        target / "model.safetensors",
    )
    info = {"mask_token_id": 0, "eos_token_ids": [1], "tokenizer_sha256": "t"}
    contracts.write_manifest(target, contracts.Manifest(kind="target", recipe={}, info=info))

    rows, samples = [], []
    for i in range(24):
        tokens = [2 + i]
        while len(tokens) < 30:
            tokens.append((3 * tokens[-1] + 1) % (VOCAB - 2) + 2)
        ids = torch.tensor(tokens)
        following = torch.tensor([*tokens[1:], 5])
        last = 4 * embedding[following]  # so that lm_head(norm(last)) peaks at the next token
        planes = torch.stack([embedding[ids], embedding[ids] * 0.5, last], 1).bfloat16()
        raw = planes.reshape(len(ids), -1).view(torch.int16).numpy().tobytes()
        mask = [False] * 6 + [True] * 24
        logits = (
            torch.nn.functional.rms_norm(planes[:, 2].float(), (HIDDEN,), eps=1e-5)
            @ embedding.bfloat16().float().T
        )
        rows.append(np.frombuffer(raw, dtype=np.uint8).reshape(len(ids), -1))
        samples.append(
            {
                "id": f"s{i}",
                "domain": "qa",
                "split": "validation" if i >= 20 else "train",
                "shard": 0,
                "row_group": i,
                "num_tokens": len(ids),
                "input_ids": tokens,
                "loss_mask": mask,
                "log_sum_exp": logits.logsumexp(-1)[torch.tensor(mask)].tolist(),
                "sha256": "",
            }
        )
    schema = contracts.states_schema(PLANES, HIDDEN)
    with pq.ParquetWriter(
        states / "shard-00000.parquet", schema, compression="none", use_dictionary=False
    ) as writer:
        for row in rows:
            column = pa.array([bytes(token) for token in row], type=schema.field(0).type)
            writer.write_table(pa.table([column], schema=schema))
    contracts.write_table(states / "samples.parquet", samples, contracts.SAMPLES)
    info = {"layer_ids": LAYER_IDS, "num_planes": PLANES, "hidden_size": HIDDEN}
    contracts.write_manifest(states, contracts.Manifest(kind="extract", recipe={}, info=info))

    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["drafter"] |= {
        "num_layers": 1,
        "block_size": 4,
        "draft_vocab_size": 60,
        "markov_rank": 8,
    }
    params["train"] |= {
        "dtype": "float32",
        "num_epochs": 40,
        "batch_tokens": 240,
        "anchors_per_sample": 8,
        "learning_rate": 0.01,
        "validations": 4,
        "validation_anchors": 8,
        "checkpoint_interval_s": 0.02,
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "services.yaml").write_text((ROOT / "services.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_a_run_killed_in_the_middle_ends_with_the_same_bits(project):
    whole = _command(project, "whole")
    _, errors = whole.communicate()
    assert whole.returncode == 0, errors
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
    expected, found = (
        load_file(project / "whole/model.safetensors"),
        load_file(project / "killed/model.safetensors"),
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def _step_of(project):
    """The step of the resume point, or -1; a reader may meet the moment of the rename."""
    from stages.train.checkpoint import LATEST, Progress, _read

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
    manifest = contracts.read_manifest(project / "data/drafter", "train")
    assert manifest.counts["train"] == 20
    assert manifest.counts["validation"] == 4
    tensors = load_file(project / "data/drafter/model.safetensors")
    target_ids = tensors["d2t"] + torch.arange(60)
    assert torch.equal(target_ids, tensors["t2d"].nonzero().flatten())
    assert not list(project.glob("run/train-*"))


def test_a_diverging_run_says_so_and_names_the_learning_rate(project):
    with pytest.raises(ValueError, match=r"the loss is nan at step .* train.learning_rate"):
        _run(project, train={"learning_rate": 1e30, "max_grad_norm": 1e30})


def test_a_draft_vocabulary_larger_than_the_targets_is_the_targets(project):
    metrics = _run(project, drafter={"draft_vocab_size": 10_000}, train={"num_epochs": 1})
    assert metrics["draft_vocab_coverage"] == 1.0
    assert "d2t" not in load_file(project / "data/drafter/model.safetensors")


def test_a_damaged_shard_is_refused_before_training(project):
    shard = project / "data/hidden_states/shard-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(contracts.ArtifactError, match=r"shard-00000.parquet: expected sha256"):
        _run(project)
