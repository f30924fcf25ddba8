"""The small process that holds one server for its owner, so that nothing outlives the owner.

    python supervisor.py LIFELINE LOG -- COMMAND...

LIFELINE is a FIFO's path, or "-" for standard input. The owner holds its write end; the kernel
closes that however the owner dies, SIGKILL included, and the supervisor sees end of file. It then
sends SIGTERM to the server's process group, waits GRACE_S, and sends SIGKILL. SIGTERM to the
supervisor does the same; a supervisor that is killed takes the group along. It exits with the
server's status, and the server's output goes to LOG.

A script on the standard library alone: it starts in milliseconds and holds a few MiB.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
_POLL_S = 0.1


def open_lifeline(name: str) -> int:
    """The descriptor whose end of file means that the owner is gone.

    A FIFO is opened without blocking: with no writer left it reads as ended at once.
    """
    return 0 if name == "-" else os.open(name, os.O_RDONLY | os.O_NONBLOCK)


def owner_is_gone(lifeline: int, *, timeout_s: float) -> bool:
    """Waits up to `timeout_s` for end of file."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        return False
    try:
        return os.read(lifeline, 1) == b""
    except BlockingIOError:
        return False


def end_group(group: int, *, grace_s: float) -> None:
    """Ends every process of the group: SIGTERM, then SIGKILL after `grace_s`."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            # The leader is our child: reap it, or its group never looks empty.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.02)


def _guard(group: int) -> int:
    """A second process, which kills the group when this one is killed; returns its id.

    A death signal (prctl) would reach the group's leader alone, and vLLM's engine is its child.
    """
    read, write = os.pipe()
    guard = os.fork()
    if guard == 0:
        os.setsid()
        os.close(write)
        os.read(read, 1)  # ends when the supervisor does: nothing is ever written
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        os._exit(0)
    os.close(read)
    return guard


def supervise(lifeline: int, *, log: Path, command: list[str]) -> int:
    """Runs `command` in its own group until it ends or the owner is gone; its exit status."""
    told_to_stop = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal told_to_stop
        told_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    guard = _guard(server.pid)
    try:
        while server.poll() is None and not told_to_stop:
            if owner_is_gone(lifeline, timeout_s=_POLL_S):
                break
    finally:
        ended = server.poll()
        end_group(server.pid, grace_s=GRACE_S)
        os.kill(guard, signal.SIGKILL)  # before the group's id can be somebody else's
        os.waitpid(guard, 0)
    return 0 if ended is None else ended if ended >= 0 else 128 - ended


def main(arguments: list[str]) -> int:
    lifeline, log, _, *command = arguments
    return supervise(open_lifeline(lifeline), log=Path(log), command=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
