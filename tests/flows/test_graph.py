from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import graph

ROOT = Path(__file__).resolve().parents[2]


def journal(folder: Path) -> list[str]:
    path = folder / "journal.txt"
    return path.read_text().split() if path.is_file() else []


def run_all() -> dict[str, str]:
    return {stage: graph.reproduce(stage, environment={}) for stage in graph.stages_in_order()}


def test_the_order_is_that_of_dvc_repro(small_checkout: Path) -> None:
    order = graph.stages_in_order()
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q"],
        check=True,
        env={**os.environ, **graph._with_this_python()},
    )
    assert order == journal(small_checkout) == ["first", "second", "third"]


def test_this_projects_stages_run_from_target_to_evaluation() -> None:
    assert graph.stages_in_order(ROOT) == [
        *("target", "prepare", "generate", "extract", "train", "package", "evaluate")
    ]


def test_unchanged_stages_are_skipped_and_a_change_reruns_what_depends_on_it(
    small_checkout: Path,
) -> None:
    assert set(run_all().values()) == {"ran"}
    assert graph.up_to_date()
    assert set(run_all().values()) == {"unchanged"}
    (small_checkout / "params.yaml").write_text("a: 1\nb: 2\nc: 1\n")
    assert not graph.up_to_date()
    assert run_all() == {"first": "unchanged", "second": "ran", "third": "ran"}
    assert journal(small_checkout) == ["first", "second", "third", "second", "third"]


def test_going_back_restores_earlier_results_without_running(small_checkout: Path) -> None:
    run_all()
    lock = (small_checkout / "dvc.lock").read_text()
    (small_checkout / "params.yaml").write_text("a: 1\nb: 2\nc: 1\n")
    run_all()
    ran = len(journal(small_checkout))
    (small_checkout / "params.yaml").write_text("a: 1\nb: 1\nc: 1\n")
    assert run_all() == {"first": "unchanged", "second": "restored", "third": "restored"}
    assert len(journal(small_checkout)) == ran
    assert (small_checkout / "dvc.lock").read_text() == lock


def test_outputs_become_links_into_the_cache(small_checkout: Path) -> None:
    run_all()
    graph.link_outputs()
    for path in (small_checkout / "out").rglob("manifest.json"):
        assert path.is_symlink() or path.stat().st_nlink > 1


def test_a_failing_stage_is_named_and_the_earlier_ones_stay(small_checkout: Path) -> None:
    (small_checkout / "fail").touch()
    graph.reproduce("first", environment={})
    with pytest.raises(graph.StageError, match="second failed"):
        graph.reproduce("second", environment={})
    (small_checkout / "fail").unlink()
    assert run_all() == {"first": "unchanged", "second": "ran", "third": "ran"}


def test_dvcs_logging_is_as_before_afterwards(small_checkout: Path) -> None:
    loggers = [logging.getLogger("dvc"), logging.getLogger("dvc.stage.run")]
    before = [(it.level, it.propagate, list(it.handlers)) for it in loggers]
    graph.up_to_date()
    assert [(it.level, it.propagate, list(it.handlers)) for it in loggers] == before
