"""StateImage slots: which are free and whose the others are. Holds ids, never states.

Slot ROOT_SLOT is the empty sequence: every owner may read it, nobody gets it.
"""

from __future__ import annotations

import heapq

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import ROOT_SLOT


class StateStore:
    """Owners are small integers chosen by the caller. Misuse is an InvariantError."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` counts ROOT_SLOT."""
        if num_slots < 2:
            raise InvariantError(f"a state store needs a slot besides the root, not {num_slots}")
        self._num_slots = num_slots
        self._free = [slot for slot in range(num_slots) if slot != ROOT_SLOT]
        self._owners: dict[int, int] = {}
        self._given_back: dict[int, int] = {}

    @property
    def num_slots(self) -> int:
        """Slots that can be owned: all but the root."""
        return self._num_slots - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._owners)

    def acquire(self, owner: int) -> int | None:
        """A free slot, or None when all are owned: the one that this owner gave back last, as long
        as nobody has it, so that a sequence alternates between two; else the lowest."""
        if not self._free:
            return None
        slot = self._given_back.pop(owner, ROOT_SLOT)
        if slot == ROOT_SLOT or slot in self._owners:
            slot = self._free[0]
        self._free.remove(slot)
        heapq.heapify(self._free)
        self._owners[slot] = owner
        return slot

    def release(self, owner: int, slot: int) -> None:
        """Give one slot back; only its owner may."""
        if slot not in self._owners:
            raise InvariantError(f"owner {owner} frees slot {slot}, which nobody owns")
        if self._owners[slot] != owner:
            raise InvariantError(f"owner {owner} frees slot {slot} of owner {self._owners[slot]}")
        del self._owners[slot]
        self._given_back[owner] = slot
        heapq.heappush(self._free, slot)

    def slots_of(self, owner: int) -> frozenset[int]:
        return frozenset(slot for slot, holder in self._owners.items() if holder == owner)

    def check(self) -> None:
        """Verify that every slot but the root is either free or owned."""
        free = set(self._free)
        expected = set(range(self._num_slots)) - {ROOT_SLOT}
        if len(free) != len(self._free):
            raise InvariantError("a slot is twice in the free list")
        if free & self._owners.keys() or free | self._owners.keys() != expected:
            raise InvariantError(
                f"slots are lost or doubled: {len(free)} free, {len(self._owners)} owned"
                f" of {len(expected)}"
            )
