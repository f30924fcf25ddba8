"""The receiving end: asks vLLM to publish a prompt's states, fetches, checks and frees them.

Everything after the response runs in one thread of its own, because the store, its one registered
buffer and the shard writer are used by one sample at a time; the requests of the other samples go
on meanwhile. Bytes in the store stay below concurrency times the largest sample.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stages.dspark.target_head import TargetHead
from stages.journal import Journal
from stages.serving import wire
from stages.serving.client import Client, RequestRefused
from stages.serving.store import ObjectMissing, Store, StoreFull
from stages.shards import ShardWriter

MIN_AGREEMENT = 0.8  # greedy rows: share of produced tokens that the states' logits give too
_JUDGED_BEFORE_FAILING = 512  # tokens
_OBJECT_WAIT_S = 2.0  # the object exists when the response arrives; this covers a slow master


@dataclass(frozen=True)
class Rejected:
    reason: str
    detail: str


@dataclass
class Agreement:
    """How often the argmax of the states' logits is the token that the target produced next."""

    agreed: int = 0
    judged: int = 0

    @property
    def share(self) -> float:
        return self.agreed / self.judged if self.judged else 1.0

    def check(self) -> None:
        """Raises ValueError where greedy rows agree too rarely to be the target's states."""
        if self.judged >= _JUDGED_BEFORE_FAILING and self.share < MIN_AGREEMENT:
            raise ValueError(
                f"the logits of the extracted states give {self.share:.1%} of {self.judged} greedy "
                f"tokens, expected at least {MIN_AGREEMENT:.0%}: the last plane or the target's "
                "final norm is not what it should be, or the server runs another model"
            )


@dataclass
class Receiver:
    """Fetches one sample after another into `buffer` (registered with `store`) and `writer`."""

    store: Store
    buffer: np.ndarray[Any, np.dtype[np.uint8]]
    writer: ShardWriter
    head: TargetHead
    num_planes: int
    hidden_size: int
    key_prefix: str
    max_attempts: int
    greedy: bool
    prompt_start: int | None  # the first prompt token whose log-sum-exp is kept; None: none
    agreements: Journal  # {id, agreed, judged} a sample: survives an interruption
    agreement: Agreement = field(default_factory=Agreement)
    retried: Counter[str] = field(default_factory=Counter)  # attempts that failed, by reason
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="receive")
    )

    async def receive(self, row: Mapping[str, Any], *, client: Client) -> Rejected | None:
        """Extracts one row of contracts.CONVERSATIONS; says why where it could not.

        Raises EndpointError, StoreUnreachable and StoreTimeout: the service is gone.
        """
        shape = wire.StatesShape(len(row["input_ids"]), self.num_planes, self.hidden_size)
        rejected = Rejected("never_asked", "")
        for _ in range(self.max_attempts):
            key = wire.new_key(self.key_prefix)
            try:
                completion = await client.complete(
                    row["input_ids"],
                    max_tokens=1,
                    temperature=0.0,
                    kv_transfer_params={wire.STATES_KEY: key},
                )
            except RequestRefused as error:
                return Rejected("server_refused", str(error))
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._fetch, row, key, shape, completion.kv_transfer_params
                )
            except wire.BadStates as error:
                rejected = Rejected(error.reason, str(error))
            except (ObjectMissing, StoreFull) as error:
                rejected = Rejected("lost", str(error))
            else:
                return None
            self.retried[rejected.reason] += 1
        return rejected

    def close(self) -> None:
        self._thread.shutdown()
        self.writer.close()

    def _fetch(
        self,
        row: Mapping[str, Any],
        key: str,
        shape: wire.StatesShape,
        announced: Mapping[str, Any] | None,
    ) -> None:
        try:
            wire.check_reply(announced, key=key, shape=shape)
            length = self.store.get_into(
                key, self.buffer.ctypes.data, shape.object_bytes, wait_s=_OBJECT_WAIT_S
            )
        finally:
            self.store.remove(key)  # hard pinned: whoever asked for it frees it, good or bad
        sha256 = wire.check_object(self.buffer, length=length, shape=shape)
        states = self.buffer[: shape.num_bytes]
        supervised = self._supervised(row["loss_mask"])
        self.writer.append(
            states,
            {
                "id": row["id"],
                "domain": row["domain"],
                "split": row["split"],
                "looping": row["looping"],
                "num_tokens": shape.num_tokens,
                "input_ids": row["input_ids"],
                "loss_mask": row["loss_mask"],
                "supervised": supervised,
                "log_sum_exp": self._log_sum_exp(states, row, shape, supervised),
                "sha256": sha256,
            },
        )

    def _supervised(self, loss_mask: list[bool]) -> list[bool]:
        if self.prompt_start is None:
            return loss_mask
        end = len(loss_mask) - loss_mask[::-1].index(True) if any(loss_mask) else 0
        return [own or self.prompt_start <= i < end for i, own in enumerate(loss_mask)]

    def _log_sum_exp(
        self,
        states: np.ndarray[Any, np.dtype[np.uint8]],
        row: Mapping[str, Any],
        shape: wire.StatesShape,
        supervised: list[bool],
    ) -> list[float]:
        """At every supervised position; counts the agreement with the produced tokens."""
        last = (
            torch.from_numpy(states)
            .view(torch.bfloat16)
            .view(shape.num_tokens, self.num_planes, self.hidden_size)[:, -1]
        )
        loss_mask, chosen = torch.tensor(row["loss_mask"]), torch.tensor(supervised)
        following = torch.tensor([*row["input_ids"][1:], 0])
        with torch.inference_mode():
            sums, greedy = self.head.log_sum_exp(last[chosen], following[chosen])
        if self.greedy:
            produced = torch.tensor([*row["loss_mask"][1:], False])[loss_mask]
            agreed = greedy[loss_mask[chosen]][produced]
            self.agreements.append(
                {"id": row["id"], "agreed": int(agreed.sum()), "judged": len(agreed)}
            )
            self.agreement.judged += len(agreed)
            self.agreement.agreed += int(agreed.sum())
            self.agreement.check()
        return [float(value) for value in sums]
