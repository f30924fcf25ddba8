"""Server processes: start one under a supervisor, wait until it answers, find it again, end it.

launch.py says what to run (a Plan); this module runs it. Services of a flow are recorded in
run/services/<role>.json, so that a later stage of the same flow finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stages import contracts
from stages.serving import supervisor

_SUPERVISOR = Path(supervisor.__file__)
_LOG_TAIL_LINES = 25
_POLL_S = 0.1
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StartError(ValueError):
    """A managed server did not come up; the message quotes the end of its log."""


@dataclass(frozen=True)
class Plan:
    """A server to run. Each of `port_options` is given a free port: `--port`, or `--port=`.

    `health` is a path that answers HTTP 200 when it is up, or None: then the first port accepts
    connections. `seed_arguments` are apart: a reader that does not care takes any seed.
    """

    name: str
    command: list[str]
    port_options: list[str]
    seed_arguments: list[str]
    environment: dict[str, str]
    host: str
    health: str | None
    start_timeout_s: float

    def on_devices(self, names: str) -> Plan:
        """The same server on these CUDA devices ("0", or "2,3")."""
        return replace(self, environment={**self.environment, "CUDA_VISIBLE_DEVICES": names})

    @property
    def fingerprint(self) -> str:
        body = [self.command, self.environment]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Service:
    """A running server and the supervisor that holds it."""

    role: str
    host: str
    port: int
    log: str
    supervisor: int  # pid
    supervisor_started: str  # kernel clock ticks: tells the pid from a later process with its id
    owner: str  # the flow's FIFO, or "" for a stage's own
    fingerprint: str
    seed_arguments: list[str]


def services_folder() -> Path:
    """run/services, absolute."""
    folder = (contracts.RUN_ROOT / "services").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def held(role: str, plan: Plan, *, owner: str | None) -> Iterator[Service]:
    """The running server. Without `owner` it ends with the block; with one (a FIFO) it stays up.

    A server of the same owner, role and plan is used again; one of another plan is replaced.
    """
    if not owner:
        lifeline, writer = os.pipe()
        try:
            service, holder = _start(role, plan, lifeline=lifeline, owner="")
            try:
                yield service
            finally:
                os.close(writer)
                writer = -1
                holder.wait()
        finally:
            os.close(lifeline)
            if writer >= 0:
                os.close(writer)
        return
    record = services_folder() / f"{role}.json"
    known = _read(record)
    if known is not None and known.owner == owner and _alive(known):
        seed_fits = not plan.seed_arguments or plan.seed_arguments == known.seed_arguments
        if known.fingerprint == plan.fingerprint and seed_fits and _answers(known, plan.health):
            yield known
            return
        _end(known)
    service, _ = _start(role, plan, lifeline=None, owner=owner)
    contracts.write_json(record, asdict(service))
    yield service


def stop(owner: str, *, role: str | None = None) -> None:
    """Ends the owner's service of that role, or all of them, and waits until they are gone."""
    for record in services_folder().glob(f"{role or '*'}.json"):
        service = _read(record)
        if service is not None and service.owner == owner:
            _end(service)
            record.unlink(missing_ok=True)


def get_json(url: str, *, timeout_s: float) -> Any:
    """GETs JSON, with the key in VLLM_API_KEY where set. Raises ValueError naming the URL."""
    request = urllib.request.Request(url)
    key = os.environ.get("VLLM_API_KEY")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _NO_PROXY.open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{url} (services.yaml) does not answer: {error}; start that server, or say `managed`"
        ) from None


def _start(
    role: str, plan: Plan, *, lifeline: int | None, owner: str
) -> tuple[Service, subprocess.Popen[bytes]]:
    """Starts and waits; tries once more where a port was taken between choosing and binding."""
    if plan.host not in LOOPBACK:
        print(
            f"warning: the {role} server listens on {plan.host}: whoever reaches that address can "
            "use it (set VLLM_API_KEY for vLLM; Mooncake has no access control)",
            file=sys.stderr,
        )
    for attempt in (1, 2):
        try:
            return _start_once(role, plan, lifeline=lifeline, owner=owner)
        except StartError as error:
            if attempt == 2 or "ddress already in use" not in str(error):
                raise
    raise AssertionError("unreachable")


def _start_once(
    role: str, plan: Plan, *, lifeline: int | None, owner: str
) -> tuple[Service, subprocess.Popen[bytes]]:
    ports = free_ports(plan.host, count=len(plan.port_options))
    command = [*plan.command, *plan.seed_arguments]
    for option, port in zip(plan.port_options, ports, strict=True):
        command += [f"{option}{port}"] if option.endswith("=") else [option, str(port)]
    log = (contracts.RUN_ROOT / "logs" / f"{role}.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **plan.environment}
    # Byte code that is not cached costs a start of vLLM some 20 CPU-seconds.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    holder = subprocess.Popen(
        [sys.executable, "-S", str(_SUPERVISOR), owner or "-", str(log), "--", *command],
        stdin=subprocess.DEVNULL if lifeline is None else lifeline,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    service = Service(
        role=role,
        host="127.0.0.1" if plan.host in ("0.0.0.0", "::") else plan.host,
        port=ports[0],
        log=str(log),
        supervisor=holder.pid,
        supervisor_started=_started(holder.pid) or "",
        owner=owner,
        fingerprint=plan.fingerprint,
        seed_arguments=plan.seed_arguments,
    )
    deadline = time.monotonic() + plan.start_timeout_s
    try:
        while not _answers(service, plan.health):
            status = holder.poll()
            if status is not None:
                raise StartError(f"the {role} server ended with status {status}{_tail(log)}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"the {role} server did not answer within {plan.start_timeout_s:.0f} s "
                    f"(start_timeout_s in services.yaml){_tail(log)}"
                )
            time.sleep(_POLL_S)
    except BaseException:
        holder.send_signal(signal.SIGTERM)
        holder.wait()
        raise
    return service, holder


def free_ports(host: str, *, count: int) -> list[int]:
    """Ports that nobody holds right now; all are held while they are chosen, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]


def _answers(service: Service, health: str | None) -> bool:
    try:
        if health is None:
            socket.create_connection((service.host, service.port), timeout=2).close()
            return True
        url = f"http://{service.host}:{service.port}{health}"
        with _NO_PROXY.open(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _tail(log: Path) -> str:
    lines: Sequence[str] = ()
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return f"; the end of {log}:\n" + "\n".join(f"  {line}" for line in lines)


def _read(record: Path) -> Service | None:
    try:
        return Service(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _started(pid: int) -> str | None:
    """The start time of a live process in clock ticks; None for a dead one or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _alive(service: Service) -> bool:
    return _started(service.supervisor) == service.supervisor_started


def _end(service: Service) -> None:
    """Tells the supervisor to end its server and waits for both."""
    if not _alive(service):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(service.supervisor, signal.SIGTERM)
    deadline = time.monotonic() + 3 * supervisor.GRACE_S
    while _alive(service) and time.monotonic() < deadline:
        time.sleep(_POLL_S / 5)
