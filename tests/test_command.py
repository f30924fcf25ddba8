"""What the stages' common command line promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLEEPING_STAGE = """\
import time
from stages import command
def run(params, services, inputs, out):
    print("started", flush=True)
    time.sleep(120)
command.main("sleeping", inputs=(), run=run)
"""


@pytest.mark.timeout(60)
def test_a_stage_ends_when_the_flow_that_owns_it_is_gone(tmp_path: Path) -> None:
    """The kernel closes the FIFO's write end however the flow dies; here the test closes it."""
    fifo = tmp_path / "owner.fifo"
    os.mkfifo(fifo)
    owner = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    stage = subprocess.Popen(
        [sys.executable, "-c", SLEEPING_STAGE, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "DSPARK_OWNER": str(fifo)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert stage.stdout is not None
        assert stage.stdout.readline() == "started\n"
        assert stage.poll() is None
        os.close(owner)
        assert stage.wait(timeout=30) == 1
    finally:
        stage.kill()
        stage.wait()


def test_a_users_mistake_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stages.target", "--out", str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("target: error: params.yaml: no such file")
    assert "Traceback" not in done.stderr
