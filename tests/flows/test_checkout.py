from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from flows import checkout


def _hold(lock: Path, held: Any, release: Any) -> None:
    with checkout.held("the first run", say=print, lock=lock):
        held.set()
        release.wait()


def _wait(lock: Path, said: Any) -> None:
    with checkout.held("the second run", say=said.put, lock=lock):
        said.put("held")


def start(target: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def test_a_second_run_waits_and_says_for_which(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release, said = context.Event(), context.Event(), context.Queue()
    first = start(_hold, tmp_path / "lock", held, release)
    assert held.wait(60)
    second = start(_wait, tmp_path / "lock", said)
    message = said.get(timeout=60)
    assert "the first run" in message
    assert str(first.pid) in message
    release.set()
    assert said.get(timeout=60) == "held"
    first.join()
    second.join()


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    first = start(_hold, tmp_path / "lock", held, release)
    assert held.wait(60)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    said: list[str] = []
    with checkout.held("the second run", say=said.append, lock=tmp_path / "lock"):
        assert not said
