"""A prompt, its identity, and what every source of prompts yields."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stages import contracts

Message = dict[str, Any]
Reject = dict[str, str]
_T = TypeVar("_T")

EVALUATION_SHARE = 0.2  # of a fixed collection, set apart for evaluation by a hash of the row


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation that ends with a user turn, with the tools it may call.

    `source` says where it comes from, for people; identity is the content alone.
    """

    domain: str
    messages: tuple[Message, ...]
    source: str
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def content(self) -> dict[str, Any]:
        """What the target sees: the basis of ids and checksums."""
        return {"messages": list(self.messages), "tools": list(self.tools)}

    @property
    def id(self) -> str:
        """Stable under reordering, renaming and additions to its source."""
        return f"{self.domain}-{contracts.fingerprint(self.content)[:16]}"


@dataclass(kw_only=True)
class Candidates:
    """What a source offers: two disjoint streams, in the order in which they are to be taken.

    `evaluation` never depends on a setting of the training prompts. `rejects` are rows of the
    source that are no prompts, and `num_rows` counts all rows read to find that out.
    """

    domain: str
    evaluation: Iterable[Prompt] = ()
    train: Iterable[Prompt] = ()
    rejects: list[Reject] = field(default_factory=list)
    num_rows: int = 0


def user_prompt(domain: str, text: str, *, source: str) -> Prompt:
    """A conversation of one user turn."""
    return Prompt(domain=domain, messages=({"role": "user", "content": text},), source=source)


def reject(identity: str, reason: str, detail: str = "") -> Reject:
    """A line of the reject ledger."""
    return {"id": identity, "reason": reason, "detail": detail}


def unit_hash(text: str) -> int:
    """A 32-bit integer that depends on `text` alone, on every machine and in every version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def below(text: str, fraction: float) -> bool:
    """Whether `text` falls into the first `fraction` of the hash range: the one split boundary."""
    return unit_hash(text) < int(fraction * 2**32)


def hash_order(items: Iterable[_T], *, salt: str, key: Callable[[_T], str]) -> list[_T]:
    """`items` in an order that looks random, is the same everywhere, and that additions keep."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{salt}/{key(item)}".encode()).digest())


def round_robin(streams: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """One item of each stream in turn, until all have ended."""
    active = [iter(stream) for stream in streams]
    while active:
        still = []
        for stream in active:
            for item in stream:
                yield item
                still.append(stream)
                break
        active = still
