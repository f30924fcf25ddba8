"""`make serve-flows` for real: a Prefect server, both deployments, a worker, and their end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("flows", "stages", "profiles", "params.yaml", "services.yaml", "dvc.yaml")
SETTINGS = ("prefect.yaml", "prefect.toml", ".dvc/config")
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def environment(port: int) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")},
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*NAMES, *SETTINGS):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    return tmp_path


@pytest.fixture
def served(checkout: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.serve"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "deployment run" in line:
            return
    pytest.fail("serve ended: " + "".join(lines))


@pytest.mark.timeout(300)
def test_deployments_run_and_nothing_outlives_the_command(
    served: subprocess.Popen[str], checkout: Path, environment: dict[str, str], port: int
) -> None:
    wait_until_ready(served)

    def prefect(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    listed = prefect("deployment", "ls").stdout
    assert "retrain/on-demand" in listed
    assert "retrain/nightly" in listed
    # A run that the flow itself refuses: server, worker, checkout and parameters all took part.
    done = prefect(*("deployment", "run", "retrain/on-demand", "-p", "profile=quik", "--watch"))
    assert done.returncode != 0
    log = (checkout / "run" / "logs" / "prefect-worker.log").read_text()
    assert "found 'quik'" in log

    served.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while answers(port):
        assert time.monotonic() < deadline, "the server outlived the command"
        time.sleep(0.2)
