"""Records retrainings in MLflow (the only import of mlflow).

The store is sqlite:///mlflow.db with files under mlruns/, unless MLFLOW_TRACKING_URI names another.
Runs are addressed by id throughout: no global active run, so nothing is inherited from the
environment. A run is logged from the artifacts, so every run has the same metric names.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.nested import flatten
from stages.params import Params

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DATABASE = "mlflow.db"
ARTIFACTS = "mlruns"
EXPERIMENT = "dspark-retrain"
LOCK_TAG = "dspark.dvc_lock_sha256"
CHECKOUT_TAG = "dspark.checkout"
_BATCH = 900  # MLflow takes 1000 metrics a call
_PARAMS_BATCH = 90  # and 100 params


@dataclass(frozen=True)
class Record:
    """What is known when a run starts: where its code and data come from."""

    profile: str
    commit: str  # git commit, or "none"
    dirty: bool


class Store:
    """The MLflow store of a checkout. Opening it creates database and experiment once."""

    def __init__(self, root: Path = Path()) -> None:
        self._root = root.resolve()
        # Before the first import of mlflow, which would report its use.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        from mlflow.tracking import MlflowClient

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        given = os.environ.get("MLFLOW_TRACKING_URI")
        self._client: MlflowClient = MlflowClient(given or f"sqlite:///{self._root / DATABASE}")
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is not None:
            self._experiment_id: str = experiment.experiment_id
        else:
            folder = None if given else (self._root / ARTIFACTS).as_uri()
            self._experiment_id = self._client.create_experiment(
                EXPERIMENT, artifact_location=folder
            )

    @property
    def checkout(self) -> str:
        """Names this checkout in a store that several may share."""
        return f"{socket.gethostname()}:{self._root}"

    def close_dead_runs(self) -> list[str]:
        """Marks this checkout's unfinished runs as FAILED and returns their ids.

        Call it while holding the checkout: then every unfinished run is one that was killed.
        """
        dead = self._search(f"status = 'RUNNING' and {self._tag(CHECKOUT_TAG, self.checkout)}")
        for run_id in dead:
            self.end(run_id, failed=True)
        return dead

    def find_finished(self, lock_sha256: str) -> str | None:
        """The id of a finished run of exactly these results, or None."""
        found = self._search(f"status = 'FINISHED' and {self._tag(LOCK_TAG, lock_sha256)}")
        return found[0] if found else None

    def start(self, record: Record, params: Params) -> str:
        """Starts a run and returns its id."""
        from mlflow.entities import Param

        tags = {
            CHECKOUT_TAG: self.checkout,
            "dspark.profile": record.profile,
            "dspark.git_dirty": str(record.dirty).lower(),
            "mlflow.source.git.commit": record.commit,
            "mlflow.source.name": "flows/retrain.py",
        }
        run = self._client.create_run(self._experiment_id, tags=tags, run_name=None)
        entries = [Param(k, str(v)) for k, v in flatten(params.model_dump(mode="json"))]
        for i in range(0, len(entries), _PARAMS_BATCH):
            self._client.log_batch(run.info.run_id, params=entries[i : i + _PARAMS_BATCH])
        return run.info.run_id

    def log_results(
        self,
        run_id: str,
        *,
        lock_sha256: str,
        curves: Mapping[str, Path],
        metrics: Mapping[str, Path],
        artifacts: Sequence[Path],
        provenance: Mapping[str, Any],
    ) -> None:
        """Logs a finished DAG from its artifacts.

        curves: {prefix: CSV file with a column `step`}; metrics: {prefix: JSON file of nested
        mappings}; artifacts: files and folders, each kept under its own name. A metric is named
        prefix/column or prefix/key/key; the prefix "" adds nothing.
        """
        from mlflow.entities import Metric

        points = [
            Metric(f"{prefix}/{name}", value, 0, step)
            for prefix, path in curves.items()
            for name, value, step in read_curve(path)
        ]
        points += [
            Metric(f"{prefix}/{name}" if prefix else name, value, 0, 0)
            for prefix, path in metrics.items()
            for name, value in flatten(json.loads(path.read_text()), separator="/")
            if isinstance(value, int | float)
        ]
        for i in range(0, len(points), _BATCH):
            self._client.log_batch(run_id, metrics=points[i : i + _BATCH])
        for path in artifacts:
            if path.is_dir():
                self._client.log_artifacts(run_id, str(path), artifact_path=path.name)
            else:
                self._client.log_artifact(run_id, str(path))
        self._client.log_dict(run_id, dict(provenance), "provenance.json")
        self._client.set_tag(run_id, LOCK_TAG, lock_sha256)

    def end(self, run_id: str, *, failed: bool) -> None:
        self._client.set_terminated(run_id, status="FAILED" if failed else "FINISHED")

    def discard(self, run_id: str) -> None:
        """Deletes a run that turned out to have nothing of its own to say."""
        self._client.delete_run(run_id)

    def _search(self, condition: str) -> list[str]:
        runs = self._client.search_runs([self._experiment_id], filter_string=condition)
        return [run.info.run_id for run in runs]

    @staticmethod
    def _tag(name: str, value: str) -> str:
        escaped = value.replace("'", "")
        return f"tags.`{name}` = '{escaped}'"


def read_curve(path: Path) -> Iterator[tuple[str, float, int]]:
    """(name, value, step) of a CSV file with a column `step`; empty cells are left out."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(float(row.pop("step")))
            for name, value in row.items():
                if value not in ("", None):
                    yield name, float(value), step
