"""One run per checkout: DVC's lock is not held while a stage runs, so overlapping runs would race.

The kernel releases the lock however its holder dies.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path("run/retrain.lock")


@contextmanager
def held(holder: str, *, say: Callable[[str], None], lock: Path = LOCK) -> Iterator[None]:
    """Holds the checkout for the block; waits for the run that holds it, and says which that is."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    # Not "w": opening must not wipe what the holder wrote.
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"waiting: this checkout is held by {_describe(file.read())}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        json.dump({"holder": holder, "pid": os.getpid()}, file)
        file.flush()
        try:
            yield
        finally:
            file.seek(0)
            file.truncate()


def is_held(lock: Path = LOCK) -> bool:
    """True while a run holds the checkout."""
    if not lock.is_file():
        return False
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _describe(record: str) -> str:
    try:
        entry = json.loads(record)
    except ValueError:
        return "another run"
    return f"{entry['holder']} (process {entry['pid']})"
