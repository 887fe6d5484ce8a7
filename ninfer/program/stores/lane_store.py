"""Lanes: the places of resident sequences, and the generations that make old handles stale."""

from __future__ import annotations

import heapq

from ninfer.contract.errors import InvariantError
from ninfer.contract.program import SequenceHandle


class LaneStore:
    """Lanes 0 .. num_lanes - 1, lowest first. Misuse is an InvariantError."""

    def __init__(self, num_lanes: int) -> None:
        if num_lanes < 1:
            raise InvariantError(f"a lane store needs at least one lane, not {num_lanes}")
        self._generations = [0] * num_lanes
        self._free = list(range(num_lanes))
        self._bound: set[int] = set()

    @property
    def num_lanes(self) -> int:
        return len(self._generations)

    @property
    def num_used(self) -> int:
        return len(self._bound)

    @property
    def bound(self) -> frozenset[int]:
        return frozenset(self._bound)

    def acquire(self) -> SequenceHandle | None:
        """Bind the lowest free lane under a new generation, or None when all are bound."""
        if not self._free:
            return None
        lane = heapq.heappop(self._free)
        self._bound.add(lane)
        self._generations[lane] += 1
        return SequenceHandle(lane, self._generations[lane])

    def release(self, handle: SequenceHandle) -> None:
        self.verify(handle)
        self._bound.remove(handle.lane)
        heapq.heappush(self._free, handle.lane)

    def verify(self, handle: SequenceHandle) -> None:
        """Raise unless the handle names what its lane holds now."""
        if handle.lane not in self._bound or self._generations[handle.lane] != handle.generation:
            raise InvariantError(
                f"stale handle: lane {handle.lane}, generation {handle.generation}"
            )

    def check(self) -> None:
        """Verify that every lane is either free or bound."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a lane is twice in the free list")
        if free & self._bound or free | self._bound != set(range(self.num_lanes)):
            raise InvariantError(
                f"lanes are lost or doubled: {len(free)} free, {len(self._bound)} bound"
                f" of {self.num_lanes}"
            )
