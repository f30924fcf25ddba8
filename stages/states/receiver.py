"""The receiving end: asks vLLM to publish a sample's states, fetches, checks and frees them.

What follows the response runs in one thread of its own, because a store and the target's head are
used by one sample at a time; the requests of other samples go on meanwhile. A fault of the sample
(bad bytes, a lost object) costs it one of its attempts; a fault of a service does not: the receiver
waits for the service up to `outage_s` and asks again.

T tokens, P planes, H hidden size, S supervised tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.contracts import Rejected
from stages.dspark.target_head import TargetHead
from stages.serving import wire
from stages.serving.client import RequestRefused
from stages.serving.encoding import decode
from stages.serving.pool import Pool
from stages.serving.store import ObjectMissing, Store, StoreFull, StoreUnreachable

MIN_AGREEMENT = 0.8  # greedy rows: share of produced tokens that the states' logits give too
_JUDGED_BEFORE_FAILING = 512  # tokens
_OBJECT_WAIT_S = 2.0  # the object exists when the response arrives; this covers a slow master
_PROBE_S = 0.5

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Received:
    """A sample's states, checked. `payload` is the caller's memory."""

    payload: Bytes  # as sent and stored
    sha256: str  # of payload
    states: Tensor  # bfloat16 [T, P, H]; where it can be, the same memory
    log_sum_exp: Tensor  # float32 [S]
    agreed: int  # produced tokens that are the states' greedy ones
    judged: int  # of so many; 0 for responses that were not greedy


@dataclass
class Agreement:
    """How often the argmax of the states' logits is the token that the target produced next."""

    agreed: int = 0
    judged: int = 0

    @property
    def share(self) -> float:
        return self.agreed / self.judged if self.judged else 1.0

    def add(self, received: Received) -> None:
        """Raises ValueError where greedy rows agree too rarely to be the target's states."""
        self.agreed += received.agreed
        self.judged += received.judged
        self.check()

    def check(self) -> None:
        if self.judged >= _JUDGED_BEFORE_FAILING and self.share < MIN_AGREEMENT:
            raise ValueError(
                f"the logits of the extracted states give {self.share:.1%} of {self.judged} greedy "
                f"tokens, expected at least {MIN_AGREEMENT:.0%}: the last plane or the target's "
                "final norm is not what it should be, or the server runs another model"
            )


@dataclass
class Receiver:
    """Fetches one sample after another. Its memory is registered with `store`."""

    store: Store
    head: TargetHead
    num_planes: int
    hidden_size: int
    encoding: str
    key_prefix: str
    max_attempts: int
    outage_s: float
    greedy: bool  # whether the responses are the target's greedy ones
    retried: Counter[str] = field(default_factory=Counter)  # attempts that failed, by reason
    _unreachable_since: float | None = None
    _gone: StoreUnreachable | None = None  # given up: every further call would wait for seconds
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="receive")
    )

    def shape(self, sample: Mapping[str, Any]) -> wire.StatesShape:
        return wire.StatesShape(
            sample["num_tokens"], self.num_planes, self.hidden_size, self.encoding
        )

    async def receive(
        self, sample: Mapping[str, Any], memory: Bytes, *, pool: Pool
    ) -> Received | Rejected:
        """Asks for a row of contracts.SAMPLES; its object goes into `memory`, which has its size.

        Raises EndpointError, StoreUnreachable, StoreTimeout: the service is gone.
        """
        rejected = Rejected("never_asked", "")
        attempts = 0
        while attempts < self.max_attempts:
            if self._gone is not None:
                raise self._gone
            key = wire.new_key(self.key_prefix)
            try:
                completion = await pool.complete(
                    sample["input_ids"],
                    max_tokens=1,
                    temperature=0.0,
                    kv_transfer_params={wire.STATES_KEY: key},
                )
            except RequestRefused as error:
                return Rejected("server_refused", str(error))
            try:
                received = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._fetch, sample, key, memory, completion.kv_transfer_params
                )
            except StoreUnreachable as error:
                self.retried["store_unreachable"] += 1
                await self._wait_for_master(error)
                continue
            except wire.BadStates as error:
                rejected = Rejected(error.reason, str(error))
            except (ObjectMissing, StoreFull) as error:
                rejected = Rejected("lost", str(error))
            else:
                self._unreachable_since = None
                return received
            attempts += 1
            self.retried[rejected.reason] += 1
        return rejected

    def close(self) -> None:
        """Frees what this run left in the store, whatever happened to it, and disconnects."""
        self._thread.shutdown()
        try:
            if self._gone is None:
                self.store.remove_prefix(self.key_prefix)
        finally:
            self.store.close()

    async def _wait_for_master(self, error: StoreUnreachable) -> None:
        """Returns when the master may be asked again. Raises `error` after outage_s without."""
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
            print(f"{error}; waiting up to {self.outage_s:.0f} s for it", flush=True)
        if now - self._unreachable_since > self.outage_s:
            self._gone = error
            raise error
        await asyncio.sleep(_PROBE_S)

    def _fetch(
        self,
        sample: Mapping[str, Any],
        key: str,
        memory: Bytes,
        announced: Mapping[str, Any] | None,
    ) -> Received:
        shape = self.shape(sample)
        if self._gone is not None:
            raise self._gone
        try:
            wire.check_reply(announced, key=key, shape=shape)
            length = self.store.get_into(
                key, memory.ctypes.data, shape.object_bytes, wait_s=_OBJECT_WAIT_S
            )
        except StoreUnreachable:
            raise  # the object went with its master
        except BaseException:
            self.store.remove(key)
            raise
        self.store.remove(key)  # hard pinned: whoever asked for it frees it, good or bad
        sha256 = wire.check_object(memory, length=length, shape=shape)
        payload = memory[: shape.num_bytes]
        states = decode(
            torch.from_numpy(payload).view(shape.num_tokens, -1),
            num_planes=self.num_planes,
            hidden_size=self.hidden_size,
            encoding=self.encoding,
        )
        if not bool(states.isfinite().all()):
            raise wire.BadStates("not_finite", "the states hold NaN or infinity")
        sums, agreed, judged = self._judge(states[:, -1], sample)
        return Received(payload, sha256, states, sums, agreed, judged)

    def _judge(self, last: Tensor, sample: Mapping[str, Any]) -> tuple[Tensor, int, int]:
        """Log-sum-exp at every supervised position, and the agreement with produced tokens."""
        own, chosen = torch.tensor(sample["loss_mask"]), torch.tensor(sample["supervised"])
        following = torch.tensor([*sample["input_ids"][1:], 0])
        with torch.inference_mode():
            sums, greedy = self.head.log_sum_exp(last[chosen], following[chosen])
        if not self.greedy:
            return sums, 0, 0
        produced = torch.tensor([*sample["loss_mask"][1:], False])[own]
        agreed = greedy[own[chosen]][produced]
        return sums, int(agreed.sum()), len(agreed)
