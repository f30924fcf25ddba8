"""Places in the ring never overlap, never exceed it, and are given in order."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.states.arena import Arena, Place

CAPACITY = 100


def disjoint(places: list[Place]) -> bool:
    spans = sorted((place.offset, place.offset + place.size) for place in places)
    inside = all(start >= 0 and end <= CAPACITY for start, end in spans)
    return inside and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(
    sizes=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40),
    choices=st.lists(st.integers(0, 10), min_size=40, max_size=40),
)
def test_everything_asked_for_gets_a_place_once_others_are_freed(
    sizes: list[int], choices: list[int]
) -> None:
    async def run() -> None:
        arena = Arena(CAPACITY)
        live: list[Place] = []
        for size, choice in zip(sizes, choices, strict=False):
            asked = asyncio.create_task(arena.allocate(size))
            await asyncio.sleep(0)
            while not asked.done():
                assert live, "an empty arena has room"
                await arena.free(live.pop(choice % len(live)))
                for _ in range(3):  # the waiting task is woken, takes the lock and looks
                    await asyncio.sleep(0)
            live.append(asked.result())
            assert disjoint(live)
            assert sum(place.size for place in live) <= arena.most <= CAPACITY
        for place in live:
            await arena.free(place)
        assert arena.empty

    asyncio.run(run())


def test_a_sample_larger_than_the_arena_is_refused() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match=r"raise extract\.in_flight_mib"):
            await Arena(CAPACITY).allocate(CAPACITY + 1)

    asyncio.run(run())
