"""A local Prefect server, the deployments of prefect.yaml and a worker: `make serve-flows`.

Everything runs in the foreground and ends with Ctrl-C, or however else this process dies: each part
is held by a supervisor (stages/serving/supervisor.py). The server listens where prefect.toml says,
on loopback; its log is run/logs/prefect-server.log, and the worker's is also shown here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from flows import checkout
from stages.serving import supervisor

LOGS = Path("run/logs")
WORK_POOL = "local"
START_TIMEOUT_S = 120.0
_POLL_S = 0.2


class ServeError(ValueError):
    """The server or the worker did not come up, or ended."""


def serve() -> None:
    """Runs until interrupted. Raises ServeError."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME

    url = str(PREFECT_API_URL.value())
    address = urlsplit(url)
    home = PREFECT_HOME.value().resolve()
    home.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    # A flow run starts in a folder of its own: it needs absolute settings.
    os.environ |= {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    if _answers(f"{url}/health"):
        raise ServeError(f"{url} is served already; end that server, or set PREFECT_API_URL")
    with ExitStack() as stack:
        listen = ["--host", str(address.hostname), "--port", str(address.port)]
        log = LOGS / "prefect-server.log"
        server = stack.enter_context(_held(["server", "start", *listen], log=log))
        _wait_for(f"{url}/health", server=server, log=log)
        _close_dead_runs()
        _prefect("work-pool", "create", WORK_POOL, "--type", "process", "--overwrite")
        _prefect("--no-prompt", "deploy", "--all")
        log = LOGS / "prefect-worker.log"
        worker = stack.enter_context(_held(["worker", "start", "--pool", WORK_POOL], log=log))
        print(
            f"Prefect: {url.removesuffix('/api')} (Ctrl-C ends server and worker). In this "
            "checkout, for example:\n"
            "  .venv/bin/prefect deployment run 'retrain/on-demand' -p profile=quick",
            flush=True,
        )
        _show_until_one_ends(log, [server, worker])


@contextmanager
def _held(arguments: list[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A prefect command that ends with the block or with this process; `log` takes its output."""
    log.write_bytes(b"")
    command = [sys.executable, "-m", "prefect", *arguments]
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, "-", str(log), "--", *command],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches us alone, and we end the others in turn
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _close_dead_runs() -> None:
    """Marks runs that were killed as crashed: a deployment's next run would wait for them for ever.

    Nothing can be running while no worker is started and nobody holds the checkout.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.states import Crashed, StateType

    unfinished = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
    condition = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=unfinished))
    )
    if checkout.is_held():
        return
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=condition):
            client.set_flow_run_state(run.id, Crashed(message="its process was killed"))
            print(f"Prefect run {run.name} was killed; it is marked as crashed", flush=True)


def _prefect(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ServeError(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _wait_for(url: str, *, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise ServeError(f"Prefect's server did not come up at {url}; its log is {log}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _show_until_one_ends(log: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    with log.open(errors="replace") as lines:
        while all(process.poll() is None for process in processes):
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            time.sleep(_POLL_S)
    raise ServeError(f"server or worker ended; the logs are in {LOGS}/")


def main() -> int:
    try:
        serve()
    except ServeError as error:
        print(f"serve-flows: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
