"""Servers never outlive their owner, however it ends. Real processes; no vLLM needed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.serving import launch, process

PROJECT = Path(__file__).resolve().parents[2]

# A server with a child of its own, as vLLM has its engine.
SERVER = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
port = int(sys.argv[1].strip("="))
handler = http.server.SimpleHTTPRequestHandler
http.server.HTTPServer(("127.0.0.1", port), handler).serve_forever()
"""

# The same with a child that ignores SIGTERM, as an engine that hangs would.
STUBBORN = SERVER.replace(
    "import time;", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
)

OWNER = """
import sys, time
from pathlib import Path
from stages.serving import launch, process
sys.path.insert(0, {tests!r})
from test_supervisor import STUBBORN, plan
mode = sys.argv[1]
if mode == "stage":
    with process.held("stubborn", plan(STUBBORN), owner=None):
        print("up", flush=True)
        time.sleep(600)
if mode == "flow":
    with launch.owned_services() as owner:
        print(owner.environment[launch.OWNER], flush=True)
        time.sleep(600)
"""


def plan(script: str = SERVER, *, start_timeout_s: float = 30.0) -> process.Plan:
    return process.Plan(
        name="stubborn",
        command=[sys.executable, "-c", script],
        port_options=["="],
        seed_arguments=[],
        environment={},
        host="127.0.0.1",
        health="/",
        start_timeout_s=start_timeout_s,
    )


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start_owner(mode: str) -> subprocess.Popen[str]:
    code = OWNER.format(tests=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", code, mode],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        start_new_session=True,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def server_pids() -> list[int]:
    return [int(pid) for pid in Path("pids").read_text().split()]


def test_the_whole_group_ends_when_the_owner_gets_sigkill() -> None:
    owner = start_owner("stage")
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    pids = server_pids()
    assert all(alive(pid) for pid in pids)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_server_ends_with_its_block() -> None:
    with process.held("stubborn", plan(), owner=None) as service:
        pids = server_pids()
    assert not any(alive(pid) for pid in [*pids, service.supervisor])


def test_a_flows_server_outlives_the_stage_and_ends_with_the_flow() -> None:
    flow = start_owner("flow")
    assert flow.stdout is not None
    fifo = flow.stdout.readline().strip()
    with process.held("stubborn", plan(), owner=fifo) as first:
        pids = server_pids()
    with process.held("stubborn", plan(), owner=fifo) as second:
        assert second == first, "the same plan finds the running server"
    assert all(alive(pid) for pid in pids)
    os.killpg(flow.pid, signal.SIGKILL)
    flow.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in [*pids, first.supervisor]))


def test_another_plan_replaces_a_flows_server() -> None:
    with launch.owned_services() as owner:
        fifo = owner.environment[launch.OWNER]
        with process.held("stubborn", plan(), owner=fifo) as first:
            pids = server_pids()
        other = plan(SERVER + "\n# another")
        with process.held("stubborn", other, owner=fifo) as second:
            assert second.port != first.port or second.supervisor != first.supervisor
        assert not any(alive(pid) for pid in pids)
        pids = server_pids()
        owner.stop("stubborn")
        assert not any(alive(pid) for pid in pids)


def test_a_killed_supervisor_takes_the_server_along() -> None:
    with process.held("stubborn", plan(), owner=None) as service:
        pids = server_pids()
        os.kill(service.supervisor, signal.SIGKILL)
        assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_server_that_fails_is_reported_with_the_end_of_its_log() -> None:
    script = "print('the model has no weights'); raise SystemExit(3)"
    with (
        pytest.raises(process.StartError, match=r"status 3(.|\n)*the model has no weights"),
        process.held("broken", plan(script), owner=None),
    ):
        pass


def test_a_server_that_never_answers_is_ended_at_the_limit() -> None:
    script = "import os, time; open('pids', 'w').write(str(os.getpid())); time.sleep(600)"
    with (
        pytest.raises(process.StartError, match="within 1 s"),
        process.held("mute", plan(script, start_timeout_s=1), owner=None),
    ):
        pass
    assert not any(alive(pid) for pid in server_pids())


def test_a_taken_port_is_tried_once_more(tmp_path: Path) -> None:
    """The first start finds its port taken, as when another process won the race for it."""
    script = (
        "import pathlib, sys\n"
        "if not pathlib.Path('tried').exists():\n"
        "    pathlib.Path('tried').touch()\n"
        "    raise OSError(98, 'Address already in use')\n"
    )
    with process.held("stubborn", plan(script + SERVER), owner=None) as service:
        socket.create_connection((service.host, service.port)).close()
    assert (tmp_path / "tried").exists()


def test_free_ports_differ() -> None:
    assert len(set(process.free_ports("127.0.0.1", count=20))) == 20
