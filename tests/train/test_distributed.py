"""Several gloo processes train as one does, resume each other's runs, and end together."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from stages.params import load_params, load_services
from stages.train import stage
from stages.train.checkpoint import LATEST, Progress, _read

ROOT = Path(__file__).parents[2]
BOUND_S = 120
DOCUMENT, DOCUMENTS = 30, 20  # tokens of a document of `project`, and how many it trains on


def _settings(project, *, services=None, **changes):
    for name, section in (("params.yaml", changes), ("services.yaml", services or {})):
        body = yaml.safe_load((project / name).read_text())
        body["train"] |= section
        (project / name).write_text(yaml.safe_dump(body))


def _start(project, out, **services):
    """Starts the stage as users and flows do."""
    _settings(project, services=services)
    arguments = ["--target", "data/target", "--hidden-states", "data/hidden_states", "--out", out]
    return subprocess.Popen(
        [sys.executable, "-m", "stages.train", *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run_here(project, out):
    _settings(project, services={"num_processes": 1})
    params = load_params(project / "params.yaml")
    stage.run(
        drafter=params.drafter,
        train=params.train,
        services=load_services(project / "services.yaml"),
        target=project / "data/target",
        hidden_states=project / "data/hidden_states",
        out=project / out,
    )


def _curve(project, out):
    with (project / out / "curve.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _assert_close(found, expected, *, tolerance):
    assert len(found) == len(expected) > 0
    for row, reference in zip(found, expected, strict=True):
        assert row.keys() == reference.keys()
        for name, value in reference.items():
            if name != "train_s" and "conditional" not in name:  # quotients of survivals near zero
                assert (row[name] == "") == (value == ""), name
                if value:
                    assert float(row[name]) == pytest.approx(
                        float(value), rel=tolerance, abs=tolerance
                    ), name


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_processes_equal_one_in_every_loss_and_validation_of_20_steps(project, sharding):
    """Every second batch is of one document, so the other process has none."""
    tokens = DOCUMENT * (DOCUMENTS - 1)
    _settings(project, max_steps=20, validations=20, batch_tokens=tokens)
    attempt = _start(project, "two", num_processes=2, sharding=sharding)
    output, _ = attempt.communicate(timeout=BOUND_S)
    assert attempt.returncode == 0, output
    assert output.count("train: 20 steps") == 1, output
    _run_here(project, "one")
    found, expected = _curve(project, "two"), _curve(project, "one")
    assert [row["step"] for row in found] == [str(step) for step in range(1, 21)]
    _assert_close(found, expected, tolerance=1e-5)
    metrics = [json.loads((project / out / "metrics.json").read_text()) for out in ("two", "one")]
    assert metrics[0]["domains"] == metrics[1]["domains"]


def _step_of(project):
    """The step of the resume point, or -1; a reader may meet the moment of the rename."""
    for path in project.glob(f"run/train-*/{LATEST}"):
        try:
            return int(Progress(**json.loads(_read(path)[1]["progress"])).step)
        except (OSError, FileNotFoundError):
            return -1
    return -1


def _end_after_five_steps(project, attempt, victim):
    """Kills victim(attempt's ranks) when the run has gone five steps on; all of it ends by itself,
    with an error."""
    start, deadline = max(_step_of(project), 0), time.monotonic() + BOUND_S
    while (seen := _step_of(project)) < start + 5:
        assert seen in (-1, *range(start, start + 5)), "it resumes"
        assert attempt.poll() is None, attempt.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    below = psutil.Process(attempt.pid).children(recursive=True)
    victim([p for p in below if "stages.train" in p.cmdline()[:4]]).kill()
    output, _ = attempt.communicate(timeout=BOUND_S)
    assert attempt.returncode != 0
    _, alive = psutil.wait_procs(below, timeout=BOUND_S)
    assert not alive
    return output


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_no_part_outlives_another(project):
    """One process, killed; two, one of which is killed; two, whose command is killed; one."""
    _settings(project, max_steps=60, validations=3, checkpoint_interval_s=0.0)
    _run_here(project, "whole")
    attempt = _start(project, "parts", num_processes=1)
    _end_after_five_steps(project, attempt, lambda ranks: attempt)
    attempt = _start(project, "parts", num_processes=2, sharding="fsdp2")
    output = _end_after_five_steps(project, attempt, lambda ranks: ranks[1])
    assert "train: error: one of the 2 training processes failed" in output
    attempt = _start(project, "parts", num_processes=2, sharding="ddp")
    _end_after_five_steps(project, attempt, lambda ranks: attempt)
    assert 15 <= _step_of(project) < 60
    _run_here(project, "parts")
    _assert_close(_curve(project, "parts"), _curve(project, "whole"), tolerance=1e-4)
