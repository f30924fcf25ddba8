"""The one whole-DAG run: a user's own model, another architecture and chat template than the
packaged one, from a change of params alone; then what DVC, Prefect and MLflow keep of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows import graph
from stages import contracts
from stages.params import DOMAINS

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("target", "prepare", "generate", "extract", "train", "package", "evaluate")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

TINY = {
    "prepare.num_train_prompts": 32,
    "prepare.validation_fraction": 0.2,
    "generate.max_tokens": 24,
    "generate.looping": "keep",
    "extract.layer_ids": [1, 2, 3],
    "drafter.block_size": 3,
    "drafter.draft_vocab_size": 1024,
    "drafter.markov_rank": 8,
    "train.num_epochs": 2,
    "train.validations": 2,
    "package.gate_prompts": 1,
    "evaluate.prompts_per_domain": 1,
    "evaluate.speed_prompts": 1,
    "evaluate.max_tokens": 40,
    "evaluate.lossless_prompts": 2,
    "evaluate.lossless_tokens": 8,
}


def run(folder: Path, *command: str) -> str:
    """Runs a command of this environment in a checkout; its stdout. Fails with its output."""
    environment = {**os.environ, **graph._with_this_python(), "DVC_NO_ANALYTICS": "1"}
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def commit(folder: Path, message: str) -> None:
    run(folder, "git", "add", "-A")
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    run(folder, "git", *author, "commit", "-q", "-m", message)


def retrain(folder: Path, overrides: dict[str, object]) -> str:
    settings = [part for k, v in overrides.items() for part in ("--set", f"{k}={json.dumps(v)}")]
    return run(folder, sys.executable, "-m", "flows.retrain", "--profile", "quick", *settings)


def outcomes(output: str) -> dict[str, str]:
    """{stage: ran, restored or unchanged}, from the lines that a run prints."""
    found = {}
    for line in output.splitlines():
        if line.startswith("[") and "] " in line:
            stage, _, rest = line[1:].partition("] ")
            found[stage] = rest.split(",")[0]
    return found


@pytest.fixture(scope="module")
def overrides(tiny_target: Path) -> dict[str, object]:
    return {"target.source": str(tiny_target.parent / "source"), **TINY}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout's files, committed, with small servers."""
    folder = tmp_path_factory.mktemp("clones") / "first"
    names = run(ROOT, "git", "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    services = yaml.safe_load((folder / "services.yaml").read_text())
    services["vllm"] |= {"kv_cache_gib": 0.25, "max_num_seqs": 16}
    services["extract"] |= {"kv_cache_gib": 0.25}
    services["mooncake"] |= {"local_buffer_mib": 16}
    (folder / "services.yaml").write_text(yaml.safe_dump(services))
    (folder / "dvc.lock").unlink(missing_ok=True)
    run(folder, "git", "init", "-q")
    commit(folder, "a copy")
    return folder


@pytest.fixture(scope="module")
def first_run(checkout: Path, overrides: dict[str, object]) -> str:
    output = retrain(checkout, overrides)
    commit(checkout, "retrained")
    return output


def test_every_stage_runs_and_the_table_has_nine_domains(first_run: str) -> None:
    assert outcomes(first_run) == dict.fromkeys(STAGES, "ran")
    assert all(f"\n{domain} " in first_run for domain in DOMAINS)
    assert "macro average" in first_run


def test_package_and_evaluation_are_whole(checkout: Path, first_run: str) -> None:
    for folder, kind in (("package", "package"), ("evaluation", "evaluate")):
        contracts.read_manifest(checkout / folder, kind)
    metrics = json.loads((checkout / "evaluation" / "metrics.json").read_text())
    assert {"macro_acceptance_length", "macro_speedup", "domains", "lossless"} <= set(metrics)
    assert tuple(metrics["domains"]) == DOMAINS
    assert metrics["lossless"]["identical"] == metrics["lossless"]["checked"] == 2


def test_outputs_are_links_into_the_cache(checkout: Path, first_run: str) -> None:
    for path in (*(checkout / "package").iterdir(), *(checkout / "evaluation").glob("*.*")):
        linked = path.is_symlink() or path.stat().st_nlink > 1
        assert linked or path.stat().st_size == 0, path  # DVC never links empty files


def test_a_second_run_does_nothing_and_starts_no_server(
    checkout: Path, first_run: str, overrides: dict[str, object]
) -> None:
    logs = {path: path.stat().st_mtime_ns for path in (checkout / "run" / "logs").iterdir()}
    runs = recorded_runs(checkout)
    assert outcomes(retrain(checkout, overrides)) == dict.fromkeys(STAGES, "unchanged")
    assert {p: p.stat().st_mtime_ns for p in (checkout / "run" / "logs").iterdir()} == logs
    assert recorded_runs(checkout) == runs
    assert "up to date" in run(checkout, sys.executable, "-m", "dvc", "repro")


def test_the_drafters_shape_reruns_train_package_and_evaluate_only(
    checkout: Path, first_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dvc.repo import Repo

    monkeypatch.chdir(checkout)
    params = checkout / "params.yaml"
    before = params.read_text()
    assert "num_layers: 1" in before
    params.write_text(before.replace("num_layers: 1", "num_layers: 2"))
    try:
        with Repo() as repo:
            changed = set(repo.status())
            dag = repo.index.graph  # edges from a stage to what it depends on
            rerun = {s.name for s in dag if s.name in changed or depends_on(dag, s, changed)}
    finally:
        params.write_text(before)
    assert rerun == {"train", "package", "evaluate"}


def depends_on(dag, stage, changed: set[str]) -> bool:
    import networkx

    return any(other.name in changed for other in networkx.descendants(dag, stage))


def test_a_second_clone_pulls_package_and_evaluation(checkout: Path, first_run: str) -> None:
    dvc = [sys.executable, "-m", "dvc"]
    run(checkout, *dvc, "push", "-q")
    assert (checkout.parent / "dspark-dvc-remote").is_dir()
    second = checkout.parent / "second"
    run(checkout.parent, "git", "clone", "-q", str(checkout), str(second))
    run(second, *dvc, "pull", "-q", "package", "evaluate")  # stages, not folders
    for folder, kind in (("package", "package"), ("evaluation", "evaluate")):
        assert contracts.read_manifest(second / folder, kind) == contracts.read_manifest(
            checkout / folder, kind
        )
    assert "macro_acceptance_length" in run(second, *dvc, "metrics", "show", "--json")


def test_dvc_shows_plots_and_params(checkout: Path, first_run: str) -> None:
    dvc = [sys.executable, "-m", "dvc"]
    run(checkout, *dvc, "plots", "show")
    page = (checkout / "dvc_plots" / "index.html").read_text()
    training = ("acceptance over training", "held-out acceptance by domain over training")
    for name in ("per_domain.csv", "by_position.csv", *training):
        assert name in page
    difference = json.loads(run(checkout, *dvc, "params", "diff", "--json", "HEAD~1"))
    assert difference["params.yaml"]["drafter.block_size"]["new"] == TINY["drafter.block_size"]


def recorded_runs(checkout: Path) -> list[str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{checkout / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return sorted(run.info.run_id for run in client.search_runs(experiments))


def test_the_run_is_recorded_with_its_package(checkout: Path, first_run: str) -> None:
    from mlflow.tracking import MlflowClient

    (run_id,) = recorded_runs(checkout)
    client = MlflowClient(f"sqlite:///{checkout / 'mlflow.db'}")
    record = client.get_run(run_id)
    assert record.info.status == "FINISHED"
    assert record.data.params["drafter.block_size"] == str(TINY["drafter.block_size"])
    assert {
        f"domains/{DOMAINS[0]}/acceptance_length",
        "drafter/validation_greedy_acceptance_length",
        "train/train_acceptance_length",
        "train/validation_survival/1",
    } <= set(record.data.metrics)
    assert client.get_metric_history(run_id, "train/validation_acceptance_length")
    files = {entry.path for entry in client.list_artifacts(run_id, "package")}
    assert {"package/config.json", "package/manifest.json"} <= files
    measured = {entry.path for entry in client.list_artifacts(run_id, "evaluation")}
    assert {"evaluation/metrics.json", "evaluation/report.html"} <= measured
