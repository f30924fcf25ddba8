"""The store's contract, against a real Mooncake master with a real producer and consumer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from stages.params import Services
from stages.serving import launch, process
from stages.serving.store import (
    ObjectMissing,
    Store,
    StoreFull,
    StoreSettings,
    StoreTimeout,
    StoreUnreachable,
)

MIB = 2**20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@pytest.fixture(scope="module")
def master(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        chdir(tmp_path_factory.mktemp("master")),
        launch.mooncake_master(services) as address,
    ):
        yield address


def connect(master: str, *, segment_mib: int = 0, call_timeout_s: float = 30.0) -> Store:
    return Store(
        StoreSettings(
            master=master,
            host="127.0.0.1",
            protocol="tcp",
            device="",
            segment_bytes=segment_mib * MIB,
            local_buffer_bytes=16 * MIB,
            call_timeout_s=call_timeout_s,
        )
    )


def buffer_for(store: Store, size: int = MIB) -> Bytes:
    buffer = np.zeros(size, np.uint8)
    store.register(buffer.ctypes.data, size)
    return buffer


@pytest.fixture(scope="module")
def producer(master: str) -> Iterator[tuple[Store, Bytes]]:
    store = connect(master, segment_mib=32)
    yield store, buffer_for(store)
    store.close()


@pytest.fixture(scope="module")
def consumer(master: str) -> Iterator[tuple[Store, Bytes]]:
    store = connect(master)
    yield store, buffer_for(store)
    store.close()


def test_bytes_arrive_as_they_were_put(
    producer: tuple[Store, Bytes], consumer: tuple[Store, Bytes]
) -> None:
    (put, source), (get, sink) = producer, consumer
    source[:] = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
    put.put("whole", source.ctypes.data, MIB - 3)
    assert get.get_into("whole", sink.ctypes.data, MIB) == MIB - 3
    np.testing.assert_array_equal(sink[: MIB - 3], source[: MIB - 3])
    assert get.exists("whole")
    assert get.remove("whole")
    assert not get.remove("whole")
    assert not get.exists("whole")


def test_a_missing_object_says_so(consumer: tuple[Store, Bytes]) -> None:
    store, sink = consumer
    with pytest.raises(ObjectMissing, match="nobody-put-this"):
        store.get_into("nobody-put-this", sink.ctypes.data, MIB, wait_s=0.1)


def test_an_object_larger_than_the_buffer_is_an_error(
    producer: tuple[Store, Bytes], consumer: tuple[Store, Bytes]
) -> None:
    (put, source), (get, sink) = producer, consumer
    put.put("long", source.ctypes.data, 2000)
    with pytest.raises(ValueError, match="long"):
        get.get_into("long", sink.ctypes.data, 1000)
    assert get.remove("long")


def test_a_full_store_refuses_and_loses_nothing(
    producer: tuple[Store, Bytes], consumer: tuple[Store, Bytes]
) -> None:
    (put, source), (get, sink) = producer, consumer
    keys: list[str] = []

    def fill() -> None:
        for index in range(100):
            source[:8] = index
            put.put(f"fill-{index}", source.ctypes.data, MIB)
            keys.append(f"fill-{index}")

    with pytest.raises(StoreFull, match="in_flight_mib"):
        fill()
    assert len(keys) > 16
    for index, key in enumerate(keys):
        assert get.get_into(key, sink.ctypes.data, MIB) == MIB
        assert sink[0] == index
    assert get.remove_prefix("fill-") == len(keys)
    assert not get.exists(keys[0])


def test_no_master_is_an_error_that_names_the_address() -> None:
    port = process.free_ports("127.0.0.1", count=1)[0]
    with pytest.raises(StoreUnreachable, match=f"127.0.0.1:{port}"):
        connect(f"127.0.0.1:{port}")


def test_a_call_that_hangs_is_given_up(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master that is stopped, not dead, would block a call for half a minute."""
    monkeypatch.chdir(tmp_path)
    with launch.mooncake_master(services) as address:
        store = connect(address, call_timeout_s=1.0)
        sink = buffer_for(store)
        pid = _listener(int(address.rpartition(":")[2]))
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreTimeout, match="call_timeout_s"):
                store.get_into("any", sink.ctypes.data, MIB)
            with pytest.raises(StoreTimeout):
                store.exists("any")
        finally:
            os.kill(pid, signal.SIGCONT)


def _listener(port: int) -> int:
    """The process whose command line names the port."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            words = command.split(b"\0")
            if words[0].endswith(b"mooncake_master") and f"--rpc_port={port}".encode() in words:
                return int(folder.name)
    raise AssertionError(f"no master on port {port}")
