"""Memory for samples in flight: a ring over one buffer that is registered once. No torch.

What bounds the bytes in flight is that a sample is asked for only when it has its place here, and
that it keeps the place until it has been used. Places are given in the order of asking, so the
sample that a reader waits for never waits for a later one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Place:
    """`size` bytes from `offset`; a freed one is given again once those before it are freed too."""

    offset: int
    size: int
    freed: bool = False


class Arena:
    """A ring of `capacity` bytes. For one event loop: allocate() and free() run on its thread."""

    def __init__(self, capacity: int) -> None:
        self.buffer: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(capacity, np.uint8)
        self.most = 0  # bytes given at once, so far
        self._given: deque[Place] = deque()
        self._bytes = 0
        self._room = asyncio.Condition()

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data)

    @property
    def empty(self) -> bool:
        return not self._given

    def view(self, place: Place) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.buffer[place.offset : place.offset + place.size]

    async def allocate(self, size: int) -> Place:
        """A place, as soon as there is one. Raises ValueError where there never can be."""
        if size > len(self.buffer):
            raise ValueError(
                f"a sample of {size:,} bytes does not fit into the {len(self.buffer):,} that this "
                "reader may have in flight; raise extract.in_flight_mib (services.yaml)"
            )
        async with self._room:
            await self._room.wait_for(lambda: self._find(size) is not None)
            offset = self._find(size)
            assert offset is not None
            place = Place(offset, size)
            self._given.append(place)
            self._bytes += size
            self.most = max(self.most, self._bytes)
            return place

    async def free(self, place: Place) -> None:
        async with self._room:
            assert not place.freed, "a place is freed once"
            place.freed = True
            self._bytes -= place.size
            while self._given and self._given[0].freed:
                self._given.popleft()
            self._room.notify_all()

    def _find(self, size: int) -> int | None:
        """Where `size` bytes fit behind the newest place, or from the start again."""
        if not self._given:
            return 0
        oldest, newest = self._given[0].offset, self._given[-1]
        end = newest.offset + newest.size
        if newest.offset >= oldest:
            if end + size <= len(self.buffer):
                return end
            return 0 if size <= oldest else None
        return end if end + size <= oldest else None
