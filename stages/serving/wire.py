"""What a published object holds, shared by the connector (in vLLM) and the receiver.

A request asks with kv_transfer_params {"states_key": KEY}; KEY is the receiver's, new for every
attempt, so it can remove the object even when the response never came. The response carries
kv_transfer_params {"states_key", "num_tokens", "num_planes", "hidden_size", "encoding"}. The object
is the states of T prompt tokens (P planes, H hidden size, see encoding.py), then their sha256: vLLM
fixes the response's parameters before a worker can report, so the checksum travels with the bytes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.contracts import BFLOAT16, token_bytes

STATES_KEY = "states_key"
DIGEST_BYTES = 32


class BadStates(ValueError):
    """Published states that must not be used; `reason` is a short name for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class StatesShape:
    """T tokens, P planes, H hidden size."""

    num_tokens: int
    num_planes: int
    hidden_size: int
    encoding: str = BFLOAT16

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.num_planes, self.hidden_size, self.encoding)

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.token_bytes

    @property
    def object_bytes(self) -> int:
        return self.num_bytes + DIGEST_BYTES


def new_key(prefix: str) -> str:
    """A key for one attempt at one sample; the prefix is the run's, to find what it left behind."""
    return f"{prefix}-{uuid.uuid4().hex}"


def reply(key: str, shape: StatesShape) -> dict[str, Any]:
    """The kv_transfer_params of a response whose states were published."""
    return {
        STATES_KEY: key,
        "num_tokens": shape.num_tokens,
        "num_planes": shape.num_planes,
        "hidden_size": shape.hidden_size,
        "encoding": shape.encoding,
    }


def check_reply(answer: Mapping[str, Any] | None, *, key: str, shape: StatesShape) -> None:
    """Raises BadStates where a response does not announce exactly `shape` under `key`."""
    expected = reply(key, shape)
    if answer is None:
        raise BadStates(
            "not_published",
            "the server announced no states; it must run stages.serving.connector",
        )
    found = {name: answer.get(name) for name in expected}
    if found != expected:
        raise BadStates("wrong_shape", f"expected {expected}, the server announced {found}")


def seal(states: npt.NDArray[np.uint8]) -> bytes:
    """The digest that follows the states' bytes."""
    return hashlib.sha256(states.data).digest()


def check_object(received: npt.NDArray[np.uint8], *, length: int, shape: StatesShape) -> str:
    """Checks an object of `length` bytes at the start of `received`; returns its sha256 (hex).

    Raises BadStates: wrong_length or bad_checksum.
    """
    if length != shape.object_bytes:
        raise BadStates(
            "wrong_length",
            f"expected {shape.object_bytes} bytes ({shape.num_tokens} tokens), received {length}",
        )
    states = received[: shape.num_bytes]
    digest = seal(states)
    sent = received[shape.num_bytes : shape.object_bytes].tobytes()
    if digest != sent:
        raise BadStates("bad_checksum", f"expected sha256 {sent.hex()}, received {digest.hex()}")
    return digest.hex()
