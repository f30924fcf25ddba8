"""The byte estimate and its refusals, and the states that must not get through."""

from __future__ import annotations

import numpy as np
import pytest

from stages import contracts
from stages.extract import estimate
from stages.serving import wire

SHAPE = wire.StatesShape(num_tokens=5, num_planes=2, hidden_size=4)


def test_bytes_of_a_token_by_encoding() -> None:
    # Qwen3-4B with five taps: about 31 kB a token.
    assert contracts.token_bytes(6, 2560) == 30_720
    assert contracts.token_bytes(6, 2560, contracts.BFLOAT16_ZSTD) == 30_720
    assert contracts.token_bytes(6, 2560, contracts.FLOAT8) == 5 * 2560 + 5 * 4 + 2560 * 2


def test_what_exceeds_the_budget_or_the_disk_is_refused() -> None:
    estimate.check_bytes(100, budget=100, written=40, free=60)
    with pytest.raises(ValueError, match=r"extract\.byte_budget=99"):
        estimate.check_bytes(100, budget=99, written=0, free=1000)
    with pytest.raises(ValueError, match="60 more bytes, the disk has 59"):
        estimate.check_bytes(100, budget=100, written=40, free=59)


def published() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A good object: bfloat16 ones and their digest."""
    states = np.full(SHAPE.num_bytes // 2, 0x3F80, np.uint16).view(np.uint8)
    return np.concatenate([states, np.frombuffer(wire.seal(states), np.uint8)])


def test_a_good_object_passes() -> None:
    good = published()
    digest = wire.check_object(good, length=good.nbytes, shape=SHAPE)
    assert digest == bytes(good[SHAPE.num_bytes :]).hex()


def test_a_flipped_bit_or_a_missing_token_is_refused() -> None:
    bad = published()
    bad[3] ^= 1
    with pytest.raises(wire.BadStates, match="bad_checksum"):
        wire.check_object(bad, length=bad.nbytes, shape=SHAPE)
    with pytest.raises(wire.BadStates, match="wrong_length"):
        wire.check_object(published(), length=SHAPE.object_bytes - 16, shape=SHAPE)


def test_an_announcement_of_another_shape_or_none_is_refused() -> None:
    good = wire.reply("k", SHAPE)
    wire.check_reply(good, key="k", shape=SHAPE)
    for bad in ({**good, "num_tokens": 4}, {**good, "states_key": "other"}, {}):
        with pytest.raises(wire.BadStates, match="wrong_shape"):
            wire.check_reply(bad, key="k", shape=SHAPE)
    with pytest.raises(wire.BadStates, match="not_published"):
        wire.check_reply(None, key="k", shape=SHAPE)
