"""The cache of the server that extracts, on a memory node that has less than it asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm  # the worker imports vLLM's

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "free", "taken"), [(8, 40, 8), (8, 10, 7.5), (8, 4, 3), (None, 4, None)]
)
def test_the_cache_is_as_asked_or_what_the_memory_node_has(
    asked: float | None, free: float, taken: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.serving import states_worker

    monkeypatch.setattr(
        states_worker,
        "get_memory_node_info",
        lambda _: SimpleNamespace(available_memory=free * GIB),
    )
    monkeypatch.setattr(
        states_worker.CPUWorker,
        "determine_available_memory",
        lambda worker: worker.cache_config.kv_cache_memory_bytes,
    )
    worker = object.__new__(states_worker.StatesWorker)
    worker.cache_config = SimpleNamespace(
        kv_cache_memory_bytes=None if asked is None else asked * GIB
    )
    assert worker.determine_available_memory() == (None if taken is None else taken * GIB)
