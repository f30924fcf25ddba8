"""States as vLLM produces them: asked for ahead of the reader, bounded in bytes, freed after use.

An event loop in a thread of its own asks in the reader's order. Each sample has its place in memory
before it is asked for (arena.py) and keeps it until the reader takes the next, so what is in the
store, on the wire and here together never exceeds the budget; a reader that is slow makes producers
idle. Nothing is dropped: a sample arrives, or is rejected under a reason.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from stages.contracts import Rejected
from stages.params import EngineParams, ExtractParams, Services
from stages.serving.launch import Endpoint
from stages.serving.pool import Pool
from stages.serving.store import Store, StoreError, StoreSettings
from stages.states.arena import Arena, Place
from stages.states.receiver import Agreement, Bytes, Received, Receiver
from stages.states.source import Loaded, Sample
from stages.states.tee import Tee
from stages.weights import load_target_weights

LOOK_AHEAD = 256  # samples, beside the bound in bytes: those that need no place count too
ALIGNMENT = 64  # bytes

T = TypeVar("T")
Outcome = Received | Rejected | None
"""None: the tee has it."""


@dataclass(frozen=True)
class Streamed(Loaded):
    """A sample that came over the wire."""

    received: Received


@dataclass(frozen=True)
class _Entry:
    """What the reader finds next: a sample under way, or the reason why there is none."""

    sample: Sample
    found: Future[Outcome]
    place: Place | None


@dataclass(frozen=True)
class _Reading:
    """One open read: what its feeder, on the loop's thread, and its reader share."""

    samples: Iterable[Sample]
    lane: Arena
    entries: queue.Queue[_Entry | BaseException | None] = field(default_factory=queue.Queue)
    ahead: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOOK_AHEAD))
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class StreamedStates:
    """A Source over running services. Made by opened()."""

    def __init__(
        self,
        receiver: Receiver,
        pool: Pool,
        *,
        lanes: list[Arena],
        concurrency: int,
        max_rejected: int,
        tee: Tee | None,
    ) -> None:
        self.num_planes, self.hidden_size = receiver.num_planes, receiver.hidden_size
        self.rejected: dict[str, Rejected] = {}
        self.agreement = Agreement()
        self.num_received = 0
        self._receiver, self._pool, self._tee = receiver, pool, tee
        self._free_lanes, self._lanes = list(lanes), lanes
        self._asking = asyncio.Semaphore(concurrency)
        self._max_rejected = max_rejected
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stream", daemon=True)

    @property
    def most_bytes(self) -> int:
        """The most that was in flight at once."""
        return sum(lane.most for lane in self._lanes)

    @property
    def retried(self) -> dict[str, int]:
        return dict(self._receiver.retried)

    @contextmanager
    def read(self, samples: Iterable[Sample]) -> Iterator[Iterator[Loaded | None]]:
        """See Source. Raises ValueError where too many samples are rejected, or where one is larger
        than the memory; EndpointError or StoreError where a service is gone for good."""
        reading = _Reading(samples, self._free_lanes.pop())
        feeder = self._submit(self._feed(reading))
        taken = self._taken(reading)
        try:
            yield taken
        finally:
            taken.close()
            reading.started.wait()  # a task that is cancelled before does not clean up
            reading.ended.set()
            feeder.cancel()
            self._drain(reading)
            self._free_lanes.append(reading.lane)

    async def _feed(self, reading: _Reading) -> None:
        """Puts an entry a sample, then None, however it ends."""
        reading.started.set()
        entries, lane = reading.entries, reading.lane
        try:
            for sample in reading.samples:
                await reading.ahead.acquire()
                at_hand: Future[Outcome] = Future()
                if sample["id"] in self.rejected:
                    at_hand.set_result(self.rejected[sample["id"]])
                    entries.put(_Entry(sample, at_hand, None))
                elif self._tee is not None and self._tee.holds(sample):
                    at_hand.set_result(None)
                    entries.put(_Entry(sample, at_hand, None))
                else:
                    size = self._receiver.shape(sample).object_bytes
                    place = await lane.allocate(-(-size // ALIGNMENT) * ALIGNMENT)
                    memory = lane.view(place)[:size]
                    found = self._submit(self._ask(sample, memory, reading))
                    entries.put(_Entry(sample, found, place))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            entries.put(error)
        finally:
            entries.put(None)

    async def _ask(self, sample: Sample, memory: Bytes, reading: _Reading) -> Outcome:
        async with self._asking:
            if reading.ended.is_set():
                return Rejected("not_wanted", "the reader ended first")
            return await self._receiver.receive(sample, memory, pool=self._pool)

    def _taken(self, reading: _Reading) -> Generator[Loaded | None, None, None]:
        while True:
            entry = reading.entries.get()
            if entry is None:
                reading.entries.put(None)  # for _drain
                return
            if isinstance(entry, BaseException):
                raise entry
            try:
                yield self._look(entry)
            finally:
                if entry.place is not None:
                    self._submit(reading.lane.free(entry.place))
                self._loop.call_soon_threadsafe(reading.ahead.release)

    def _look(self, entry: _Entry) -> Loaded | None:
        received = entry.found.result()
        if received is None:
            assert self._tee is not None
            return self._tee.load(entry.sample)
        if isinstance(received, Rejected):
            self._reject(entry.sample, received)
            return None
        self.num_received += 1
        self.agreement.add(received)
        if self._tee is not None:
            self._tee.append(entry.sample, received)
        return Streamed(received.states, received.log_sum_exp, received)

    def _reject(self, sample: Sample, rejected: Rejected) -> None:
        self.rejected[sample["id"]] = rejected
        if len(self.rejected) > self._max_rejected:
            raise ValueError(
                f"{len(self.rejected)} samples were rejected, above extract.max_rejected_fraction; "
                f"the last one, {sample['id']}: {rejected.detail or rejected.reason}"
            )

    def _drain(self, reading: _Reading) -> None:
        """Waits for what was asked for and is not wanted any more, so nothing stays pinned."""
        while (entry := reading.entries.get()) is not None:
            if isinstance(entry, _Entry) and entry.place is not None:
                with suppress(ValueError):
                    entry.found.result()
                self._submit(reading.lane.free(entry.place)).result()

    def _submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def start(self) -> None:
        self._thread.start()
        self._submit(self._pool.__aenter__()).result()

    def stop(self) -> None:
        self._submit(self._pool.__aexit__(None, None, None)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def opened(
    endpoints: Sequence[Endpoint],
    *,
    target: Path,
    engine: EngineParams,
    extract: ExtractParams,
    services: Services,
    key_prefix: str,
    greedy: bool,
    num_samples: int,
    lanes: int = 1,
    share: int = 1,
    tee: Tee | None = None,
) -> Iterator[StreamedStates]:
    """Starts to stream from servers that publish to one store; leaves nothing of this run in it.

    `key_prefix` is this consumer's own. As many reads as there are lanes may be open; they have the
    1/share part of what may be in flight, as there are so many consumers.
    """
    in_flight_bytes = services.extract.in_flight_mib * 2**20 // share
    arenas = [Arena(in_flight_bytes // lanes // ALIGNMENT * ALIGNMENT) for _ in range(lanes)]
    master = endpoints[0].master
    assert master is not None, "an extract server has a master"
    store = Store(StoreSettings.of(services.mooncake, master=master, host=services.host))
    for arena in arenas:
        store.register(arena.address, len(arena.buffer))
    store.remove_prefix(key_prefix)  # what an interrupted run left pinned
    head = load_target_weights(target).head(
        torch.float32 if engine.dtype == "float32" else torch.bfloat16
    )
    receiver = Receiver(
        store=store,
        head=head.to(services.extract.device),
        num_planes=len(extract.layer_ids) + 1,
        hidden_size=head.hidden_size,
        encoding=extract.encoding,
        key_prefix=key_prefix,
        max_attempts=extract.max_attempts,
        outage_s=services.vllm.outage_s,
        greedy=greedy,
    )
    source = StreamedStates(
        receiver,
        Pool.of(endpoints, services.vllm),
        lanes=arenas,
        concurrency=max(1, services.extract.concurrency // share),
        max_rejected=int(extract.max_rejected_fraction * num_samples),
        tee=tee,
    )
    source.start()
    try:
        yield source
    except BaseException:
        source.stop()
        with suppress(StoreError):  # the first error is what counts
            receiver.close()
        raise
    source.stop()
    receiver.close()
