"""The retraining flow: dvc.yaml's stages as Prefect tasks, then links, table and MLflow record.

    python -m flows.retrain --profile quick [--set drafter.num_layers=2 ...]

It runs the same commands, skips the same unchanged stages and writes the same dvc.lock as
`dvc repro`. Tasks pass names and paths only; DVC is the only cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from prefect import flow, runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import ParameterTypeError
from pydantic import AfterValidator, Field

from flows import api, checkout, graph, profiles
from stages import contracts, summary, tracking
from stages.params import load_params
from stages.serving import launch

CURVES = {"train": Path("data/drafter/curve.csv")}
METRICS = Path("evaluation/metrics.json")
RECORDED_METRICS = {"": METRICS, "drafter": Path("data/drafter/metrics.json")}
RECORDED = (
    Path("package"),
    Path("evaluation"),
    Path("data/drafter/plots"),
    Path("dvc.lock"),
    Path("params.yaml"),
    Path("services.yaml"),
)
SHARES_SERVER = frozenset({"generate", "extract"})
"""Stages that use extract-configured servers in turn; they are ended before any other stage. Where
extract.mode is stream or tee, train is the last of them."""


def _known_profile(name: str) -> str:
    if name not in profiles.names():
        raise ValueError(f"expected one of {profiles.names()}, found {name!r}")
    return name


Profile = Annotated[str, AfterValidator(_known_profile)]
OverrideKey = Annotated[str, Field(pattern=r"^[a-z_]+(\.[A-Za-z_]\w*)+$")]
OverrideValue = bool | int | float | str | list[bool | int | float | str] | None


@dataclass(frozen=True)
class StageResult:
    """What became of a stage, and how long it took."""

    stage: str
    outcome: graph.Outcome
    seconds: float


@task(cache_policy=NO_CACHE, retries=0, persist_result=False)
def reproduce(stage: str, environment: dict[str, str]) -> StageResult:
    """One DVC stage. No retries: a stage resumes by itself, and its faults are deterministic."""
    started = time.monotonic()
    outcome = graph.reproduce(stage, environment=environment)
    return StageResult(stage, outcome, time.monotonic() - started)


@flow(name="retrain", validate_parameters=True, persist_result=False)
def retrain(profile: Profile, overrides: dict[OverrideKey, OverrideValue] | None = None) -> str:
    """Brings target, data, drafter, package and evaluation up to date; returns the results table.

    profile: a name from profiles/. overrides: {section.key: value} of params.yaml, written into it
    after the profile. Raises ValueError (params, a stage) with a message for the user.
    """
    started = time.monotonic()
    name = f"retrain {runtime.flow_run.name}"
    with ExitStack() as stack:
        stack.enter_context(checkout.held(name, say=_say))
        for change in profiles.apply(profile, overrides=overrides or {}):
            _say(f"params.yaml: {change}")
        store = tracking.Store()
        for dead in store.close_dead_runs():
            _say(f"MLflow run {dead} was killed; it is marked as failed")
        run_id = _start_record(store, profile)
        try:
            results = _run_stages()
            table = summary.format_summary(json.loads(METRICS.read_text()))
            _say(f"\n{_times(results, time.monotonic() - started)}\n\n{table}")
            if run_id is not None:
                _finish_record(store, run_id, results)
        except BaseException:
            if run_id is not None:
                store.end(run_id, failed=True)
            raise
    create_markdown_artifact(key="retrain", markdown=f"```\n{table}\n```")
    return table


def _run_stages() -> list[StageResult]:
    params = load_params()
    results = []
    with launch.owned_services(extract=params.extract) as services:
        for stage in graph.stages_in_order():
            streams = stage == "train" and params.extract.mode != "cache"
            if stage not in SHARES_SERVER and not streams:
                services.stop()
            named = reproduce.with_options(name=stage, task_run_name=stage)
            results.append(named(stage, services.environment))
            _say(f"[{stage}] {results[-1].outcome}, {results[-1].seconds:.0f} s")
    graph.link_outputs()
    return results


def _start_record(store: tracking.Store, profile: str) -> str | None:
    """The id of a new MLflow run; None where nothing will run and the results are recorded."""
    if graph.up_to_date() and store.find_finished(_lock_sha256()) is not None:
        return None
    commit = _git("rev-parse", "HEAD") or "none"
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return store.start(tracking.Record(profile=profile, commit=commit, dirty=dirty), load_params())


def _finish_record(store: tracking.Store, run_id: str, results: list[StageResult]) -> None:
    lock_sha256 = _lock_sha256()
    earlier = store.find_finished(lock_sha256)
    if earlier is not None and all(result.outcome != "ran" for result in results):
        store.discard(run_id)
        _say(f"MLflow: these results are run {earlier}")
        return
    store.log_results(
        run_id,
        lock_sha256=lock_sha256,
        curves=CURVES,
        metrics=RECORDED_METRICS,
        artifacts=RECORDED,
        provenance={
            "git_commit": _git("rev-parse", "HEAD") or "none",
            "dvc_lock_sha256": lock_sha256,
            "stages": {result.stage: result.outcome for result in results},
            "stage_seconds": {result.stage: round(result.seconds, 1) for result in results},
        },
    )
    store.end(run_id, failed=False)
    _say(f"MLflow: run {run_id}; `make ui` shows and compares runs")


def _times(results: list[StageResult], total_s: float) -> str:
    lines = [
        f"{result.stage:<10} {result.outcome:<10} {result.seconds:7.1f} s" for result in results
    ]
    return "\n".join([*lines, f"{'total':<21} {total_s:7.1f} s"])


def _lock_sha256() -> str:
    return contracts.file_sha256(Path("dvc.lock")) if Path("dvc.lock").is_file() else "none"


def _git(*arguments: str) -> str:
    """git's answer, or "" where there is none (no commit yet)."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Exit code 1, with a message and no traceback, for what a user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.retrain", description="retrain a drafter"
    )
    parser.add_argument("--profile", required=True, help=f"one of {', '.join(profiles.names())}")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    given = parser.parse_args(arguments)
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        overrides = dict(map(profiles.parse_override, given.set))
        with api.in_process():
            retrain(profile=given.profile, overrides=overrides)
    except (ValueError, OSError, ParameterTypeError) as error:
        print(f"retrain: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("retrain: interrupted; run again to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
