"""Services that are really killed, stopped, filled up and aborted under a stream.

One private vLLM server and Mooncake master, on ports that stay: what dies is started again there.
The reader goes on where it was and gets every sample, once, equal to what it was before.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.extract.stage import unread_samples
from stages.params import EngineParams, ExtractParams, Services
from stages.serving import plans
from stages.serving.client import EndpointError
from stages.serving.launch import Endpoint
from stages.serving.store import Store, StoreFull, StoreSettings, StoreUnreachable
from stages.states import stream
from stages.states.source import Sample
from stages.states.stream import StreamedStates
from tests.conversations import random_rows
from tests.states.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STOPPED_S = 20.0
PREFIX = "dspark-faults"

Open = Callable[..., AbstractContextManager[StreamedStates]]


@pytest.fixture(scope="module")
def fault_services(small_services: Services) -> Services:
    vllm = small_services.vllm.model_copy(update={"outage_s": 90.0})
    extract = small_services.extract.model_copy(update={"in_flight_mib": 1, "concurrency": 4})
    return small_services.model_copy(update={"vllm": vllm, "extract": extract})


@pytest.fixture(scope="module")
def master(fault_services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("faults") / "master.log"
    with Server(plans.mooncake_plan(fault_services), log) as server:
        yield server


@pytest.fixture(scope="module")
def vllm(
    master: Server,
    fault_services: Services,
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    plan = plans.target_plan(
        tiny_target,
        engine=tiny_engine,
        services=fault_services,
        planes=plans.Planes.of(tiny_extract),
        master=master.address,
        seed=None,
    )
    folder = tmp_path_factory.mktemp("faults")
    with chdir(folder), Server(plan, folder / "vllm.log") as server:
        yield server


@pytest.fixture
def opened(
    vllm: Server,
    master: Server,
    fault_services: Services,
    tiny_target: Path,
    tiny_engine: EngineParams,
    tiny_extract: ExtractParams,
) -> Open:
    """opened(services) streams from the server."""

    def open_stream(services: Services = fault_services, **changes: Any) -> Any:
        name = tiny_target.resolve().name
        return stream.opened(
            [Endpoint(f"http://{vllm.address}", name, vllm.log, master.address)],
            target=tiny_target,
            engine=tiny_engine,
            extract=tiny_extract.model_copy(update={"max_rejected_fraction": 0.0, **changes}),
            services=services,
            key_prefix=PREFIX,
            greedy=False,
            num_samples=10**6,
        )

    return open_stream


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rows = [
        {
            "id": f"c{index:04d}",
            "domain": "qa",
            "split": "train",
            "input_ids": ids,
            "loss_mask": [position >= prompt for position in range(len(ids))],
            "looping": False,
        }
        for index, (ids, prompt) in enumerate(random_rows(60, seed=3))
    ]
    return unread_samples(rows, prompt_tokens=False)


def left_in_store(master: Server, services: Services) -> int:
    """How many objects of the streams there are; removes them."""
    settings = StoreSettings.of(services.mooncake, master=master.address, host="127.0.0.1")
    store = Store(settings)
    left = store.remove_prefix(PREFIX)
    store.close()
    return left


def read_through(
    source: StreamedStates, samples: list[Sample], *, fault: Callable[[], None], at: int
) -> list[torch.Tensor]:
    """The states of all samples; `fault` happens when `at` of them have been taken."""
    found = []
    with source.read(samples) as states:
        for index, loaded in enumerate(states):
            assert loaded is not None
            found.append(loaded.states.clone())
            if index + 1 == at:
                fault()
    return found


@pytest.fixture(scope="module")
def expected(samples: list[Sample]) -> dict[str, list[torch.Tensor]]:
    return {}


@pytest.fixture
def undisturbed(
    opened: Open, samples: list[Sample], expected: dict[str, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """The states without a fault, read once a module."""
    if not expected:
        with opened() as source:
            expected["all"] = read_through(source, samples, fault=lambda: None, at=-1)
    return expected["all"]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Equal but for what another batch rounds differently."""
    return len(found) == len(expected) and all(
        (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
        for a, b in zip(found, expected, strict=True)
    )


def test_vllm_killed_and_started_again(
    opened: Open,
    vllm: Server,
    master: Server,
    samples: list[Sample],
    undisturbed: list[torch.Tensor],
    fault_services: Services,
) -> None:
    def kill() -> None:
        vllm.signal(signal.SIGKILL)
        vllm.launch()  # it answers some 15 s later; the reader waits for it

    with opened() as source:
        found = read_through(source, samples, fault=kill, at=20)
        assert source.num_received == len(samples)
        assert not source.rejected
    assert same(found, undisturbed)
    assert left_in_store(master, fault_services) == 0


def test_the_master_killed_and_started_again(
    opened: Open,
    master: Server,
    samples: list[Sample],
    undisturbed: list[torch.Tensor],
    fault_services: Services,
) -> None:
    def kill() -> None:
        master.signal(signal.SIGKILL)
        time.sleep(1.0)
        master.launch()

    with opened() as source:
        found = read_through(source, samples, fault=kill, at=20)
        assert source.num_received == len(samples)
    assert same(found, undisturbed)
    assert left_in_store(master, fault_services) == 0


@pytest.mark.parametrize("which", ["master", "vllm"])
def test_a_service_stopped_for_twenty_seconds(
    which: str,
    opened: Open,
    vllm: Server,
    master: Server,
    samples: list[Sample],
    undisturbed: list[torch.Tensor],
    fault_services: Services,
) -> None:
    server = {"master": master, "vllm": vllm}[which]

    def stop() -> None:
        server.signal(signal.SIGSTOP)
        threading.Timer(STOPPED_S, server.signal, [signal.SIGCONT]).start()

    with opened() as source:
        found = read_through(source, samples, fault=stop, at=20)
        assert source.num_received == len(samples)
    assert same(found, undisturbed)
    assert left_in_store(master, fault_services) == 0


def test_a_full_store_makes_the_producer_wait(
    opened: Open,
    vllm: Server,
    master: Server,
    samples: list[Sample],
    undisturbed: list[torch.Tensor],
    fault_services: Services,
) -> None:
    """The segment is filled with other pinned objects until almost nothing fits."""
    settings = StoreSettings.of(fault_services.mooncake, master=master.address, host="127.0.0.1")
    store = Store(settings)
    block = np.zeros(64 * 1024, np.uint8)
    store.register(block.ctypes.data, block.nbytes)
    released = threading.Event()

    def release() -> None:
        time.sleep(3.0)
        store.remove_prefix("filler")
        released.set()

    def fill() -> None:
        for size in (64 * 1024, 16 * 1024, 4 * 1024, 1024):
            with suppress(StoreFull):
                for index in itertools.count():
                    store.put(f"filler-{size}-{index}", block.ctypes.data, size)
        threading.Thread(target=release).start()

    with opened() as source:
        found = read_through(source, samples, fault=fill, at=5)
        assert source.num_received == len(samples)
        assert not source.rejected
    assert released.is_set(), "the store was full, or the last ones had come before"
    assert same(found, undisturbed)
    store.close()


def test_what_is_abandoned_is_freed(
    opened: Open, master: Server, samples: list[Sample], fault_services: Services
) -> None:
    with opened() as source:
        with source.read(samples) as states:
            next(states)
        with source.read(samples) as states:
            assert sum(loaded is not None for loaded in states) == len(samples)
    assert left_in_store(master, fault_services) == 0


def test_bytes_in_flight_stay_below_the_budget(
    opened: Open, samples: list[Sample], fault_services: Services
) -> None:
    asked = samples * 5
    total = sum(sample["num_tokens"] for sample in asked) * 4 * 64 * 2
    budget = fault_services.extract.in_flight_mib * 2**20
    assert total > 4 * budget
    with opened() as source:
        with source.read(asked) as states:
            next(states)
            time.sleep(2.0)  # a slow reader: what can be asked for ahead of it has been
            most = source.most_bytes
            assert sum(loaded is not None for loaded in states) == len(asked) - 1
        assert budget / 2 < most <= source.most_bytes <= budget


def test_a_sample_too_large_for_the_budget_is_named(opened: Open, fault_services: Services) -> None:
    row = {"id": "big", "domain": "qa", "split": "train", "looping": False}
    long = {**row, "input_ids": [7] * 3000, "loss_mask": [True] * 3000}
    big = unread_samples([long], prompt_tokens=False)
    with (
        opened() as source,
        source.read(big) as states,
        pytest.raises(ValueError, match=r"raise extract\.in_flight_mib"),
    ):
        next(states)


@pytest.mark.parametrize("which", ["master", "vllm"])
def test_a_service_that_stays_away_ends_the_run_with_its_name(
    which: str,
    opened: Open,
    vllm: Server,
    master: Server,
    samples: list[Sample],
    fault_services: Services,
) -> None:
    """The last test of the module: nothing is started again after it."""
    settings = fault_services.vllm.model_copy(update={"outage_s": 3.0})
    services = fault_services.model_copy(update={"vllm": settings})
    error, text = {
        "master": (StoreUnreachable, f"the master at {master.address}"),
        "vllm": (EndpointError, rf"no vLLM server answered for \d+ s .*{vllm.address}"),
    }[which]
    server = {"master": master, "vllm": vllm}[which]

    def kill() -> None:
        server.signal(signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(error, match=text), opened(services) as source:
        read_through(source, samples, fault=kill, at=10)
    assert time.monotonic() - start < 60
    if which == "master":
        server.launch()
        server.wait()
