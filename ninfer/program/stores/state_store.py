"""StateImage slots: which are free and how many hold each of the others. Ids, never states.

A slot is held by the sequence that stands at its frontier or is to write it, and by checkpoints.
Slot ROOT_SLOT is the empty sequence: everybody may read it, nobody gets it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import ROOT_SLOT


class StateStore:
    """Misuse is an InvariantError."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` counts ROOT_SLOT."""
        if num_slots < 2:
            raise InvariantError(f"a state store needs a slot besides the root, not {num_slots}")
        self._num_slots = num_slots
        self._free = {slot for slot in range(num_slots) if slot != ROOT_SLOT}
        # All free slots, the lowest first, each once; and some that were taken out of turn.
        self._queue = sorted(self._free)
        self._queued = set(self._free)
        self._references: dict[int, int] = {}

    @property
    def num_slots(self) -> int:
        """Slots that can be held: all but the root."""
        return self._num_slots - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots with at least one holder; a shared slot counts once."""
        return len(self._references)

    def acquire(self, wanted: int = ROOT_SLOT) -> int | None:
        """A free slot with one holder, or None when none is free: `wanted` if it is free, else the
        lowest."""
        if not self._free:
            return None
        slot = wanted if wanted in self._free else self._pop_lowest()
        self._free.remove(slot)
        self._references[slot] = 1
        return slot

    def is_shared(self, slot: int) -> bool:
        """More than one holds it."""
        return self._references.get(slot, 0) > 1

    def share(self, slot: int) -> int:
        """One more holder of a held slot."""
        if slot not in self._references:
            raise InvariantError(f"slot {slot} is shared, but nobody holds it")
        self._references[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """One holder less; the last one frees the slot."""
        if slot not in self._references:
            raise InvariantError(f"slot {slot} is freed, but nobody holds it")
        self._references[slot] -= 1
        if self._references[slot] == 0:
            del self._references[slot]
            self._free.add(slot)
            if slot not in self._queued:
                self._queued.add(slot)
                heapq.heappush(self._queue, slot)

    def reclaimable(self, slots: Iterable[int]) -> int:
        """Slots that would be free if each of these (as often as named) had one holder less."""
        return sum(self._references[slot] == count for slot, count in Counter(slots).items())

    def check(self, holders: Iterable[int]) -> None:
        """Verify that every slot but the root is either free or held exactly as often as it is
        named in `holders`."""
        held = Counter(holders)
        if held != self._references:
            raise InvariantError(f"slots are held {dict(held)} and counted {self._references}")
        free = self._free
        expected = set(range(self._num_slots)) - {ROOT_SLOT}
        if not free <= self._queued or sorted(self._queue) != sorted(self._queued):
            raise InvariantError("a free slot is not in the queue, or one is there twice")
        if free & held.keys() or free | held.keys() != expected:
            raise InvariantError(
                f"slots are lost or doubled: {len(free)} free, {len(held)} held of {len(expected)}"
            )

    def _pop_lowest(self) -> int:
        """The lowest free slot; those before it were taken out of turn."""
        while True:
            slot = heapq.heappop(self._queue)
            self._queued.remove(slot)
            if slot in self._free:
                return slot
