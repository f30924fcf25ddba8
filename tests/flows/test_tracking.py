"""Against a real MLflow store in a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from stages import tracking
from stages.params import DOMAINS, Params

RECORD = tracking.Record(profile="quick", commit="c0ffee", dirty=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store: making its database takes seconds."""
    folder = tmp_path_factory.mktemp("tracking")
    tracking.Store(folder)
    return folder


@pytest.fixture
def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / tracking.DATABASE}")


def results(folder: Path, *, acceptance_length: float) -> Path:
    """What a finished DAG leaves, in small."""
    folder.mkdir()
    (folder / "package").mkdir()
    (folder / "package" / "config.json").write_text("{}")
    (folder / "curve.csv").write_text(
        "step,train_loss,validation_acceptance_length,validation_acceptance_length/qa\n"
        "10,2.5,,\n20,2.0,1.25,1.5\n"
    )
    domain = {"acceptance_length": acceptance_length, "prompts": 12, "drafts": 34}
    speeds = {
        "tokens_per_s_per_user": 30.0,
        "baseline_tokens_per_s_per_user": None,
        "speedup": None,
    }
    body = {
        "macro_acceptance_length": acceptance_length,
        "macro_speedup": 0.9,
        "domains": dict.fromkeys(DOMAINS, domain | speeds),
        "lossless": {"checked": 9, "identical": 9},
        "full": {"throughput_c16": 250.0, "matched_interactivity_ratio": None},
    }
    (folder / "metrics.json").write_text(json.dumps(body))
    trained = {"best_step": 20, "domains": {"qa": {"acceptance_length": 1.25}}, "nothing": None}
    (folder / "drafter.json").write_text(json.dumps(trained))
    return folder


def log(store: tracking.Store, params: Params, folder: Path, *, lock: str) -> str:
    run_id = store.start(RECORD, params)
    store.log_results(
        run_id,
        lock_sha256=lock,
        curves={"train": folder / "curve.csv"},
        metrics={"": folder / "metrics.json", "drafter": folder / "drafter.json"},
        artifacts=[folder / "package", folder / "metrics.json"],
        provenance={"git_commit": "c0ffee"},
    )
    store.end(run_id, failed=False)
    return run_id


def test_two_runs_compare(root: Path, client: MlflowClient, params: Params, tmp_path: Path) -> None:
    """Same metric and param names in both, and the values of the artifacts in each."""
    store = tracking.Store(root)
    lengths = (1.5, 1.75)
    runs = [
        client.get_run(
            log(
                store,
                params,
                results(tmp_path / str(i), acceptance_length=length),
                lock=f"compare-{i}",
            )
        )
        for i, length in enumerate(lengths)
    ]
    assert set(runs[0].data.metrics) == set(runs[1].data.metrics)
    assert set(runs[0].data.params) == set(runs[1].data.params)
    for run, length in zip(runs, lengths, strict=True):
        assert run.info.status == "FINISHED"
        for domain in DOMAINS:
            assert run.data.metrics[f"domains/{domain}/acceptance_length"] == length
        assert run.data.metrics["macro_acceptance_length"] == length
        assert run.data.metrics["drafter/domains/qa/acceptance_length"] == 1.25
        assert "drafter/nothing" not in run.data.metrics
        assert run.data.metrics["full/throughput_c16"] == 250.0
        assert run.data.params["drafter.num_layers"] == str(params.drafter.num_layers)
        assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"


def test_the_training_curve_keeps_its_steps(
    root: Path, client: MlflowClient, params: Params, tmp_path: Path
) -> None:
    folder = results(tmp_path / "curve", acceptance_length=1.5)
    run_id = log(tracking.Store(root), params, folder, lock="curve")
    history = client.get_metric_history(run_id, "train/train_loss")
    assert [(point.step, point.value) for point in history] == [(10, 2.5), (20, 2.0)]
    lengths = client.get_metric_history(run_id, "train/validation_acceptance_length")
    assert [(point.step, point.value) for point in lengths] == [(20, 1.25)]
    of_domain = client.get_metric_history(run_id, "train/validation_acceptance_length/qa")
    assert [(point.step, point.value) for point in of_domain] == [(20, 1.5)]


def test_the_package_is_an_artifact(
    root: Path, client: MlflowClient, params: Params, tmp_path: Path
) -> None:
    folder = results(tmp_path / "package", acceptance_length=1.5)
    run_id = log(tracking.Store(root), params, folder, lock="package")
    assert {entry.path for entry in client.list_artifacts(run_id)} == {
        *("package", "metrics.json", "provenance.json")
    }
    assert [entry.path for entry in client.list_artifacts(run_id, "package")] == [
        "package/config.json"
    ]
    assert (root / tracking.ARTIFACTS).is_dir()


def test_a_killed_run_is_closed_as_failed_by_its_own_checkout_alone(
    root: Path,
    client: MlflowClient,
    params: Params,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tracking.Store(root)
    killed = store.start(RECORD, params)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / tracking.DATABASE}")
    assert tracking.Store(tmp_path).close_dead_runs() == []
    assert client.get_run(killed).info.status == "RUNNING"
    assert store.close_dead_runs() == [killed]
    assert client.get_run(killed).info.status == "FAILED"
    assert store.close_dead_runs() == []


def test_finished_results_are_found_by_their_lock(
    root: Path, params: Params, tmp_path: Path
) -> None:
    store = tracking.Store(root)
    assert store.find_finished("by-lock") is None
    folder = results(tmp_path / "lock", acceptance_length=1.5)
    run_id = log(store, params, folder, lock="by-lock")
    assert store.find_finished("by-lock") == run_id
    store.discard(run_id)
    assert store.find_finished("by-lock") is None


def test_the_experiment_is_made_once(root: Path, client: MlflowClient) -> None:
    tracking.Store(root)
    tracking.Store(root)
    names = [experiment.name for experiment in client.search_experiments()]
    assert names.count(tracking.EXPERIMENT) == 1
