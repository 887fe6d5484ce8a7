"""Residents: the open sequences, each with its lane, its pages and its StateImage slots.

A sequence that starts from a checkpoint shares its pages and its slot. Reading needs nothing more;
a last page that is not full gets a copy of its own with the first reservation, unless the sequence
is its only holder by then. Only that page could be written by two: full ones never are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ninfer.contract.errors import InvariantError
from ninfer.contract.program import Amounts, SequenceHandle, SequenceSpec
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, Capacity, UnitRow
from ninfer.program.checkpoints import DeviceCopy
from ninfer.program.sequence_record import SequenceRecord
from ninfer.program.stores.lane_store import LaneStore
from ninfer.program.stores.page_store import PageStore
from ninfer.program.stores.state_store import StateStore


def pages_of(num_tokens: int) -> int:
    """Pages that so many tokens occupy."""
    return -(-num_tokens // PAGE_TOKENS)


class Residents:
    """Misuse is an InvariantError. With `has_states` False no slot is ever taken."""

    def __init__(
        self, capacity: Capacity, pages: PageStore, states: StateStore, *, has_states: bool
    ) -> None:
        self._capacity = capacity
        self._pages = pages
        self._states = states
        self._has_states = has_states
        self._lanes = LaneStore(capacity.max_concurrency)
        self._sequences: dict[int, SequenceRecord] = {}

    def __iter__(self) -> Iterator[SequenceRecord]:
        return iter(tuple(self._sequences.values()))

    @property
    def num_lanes_used(self) -> int:
        return self._lanes.num_used

    def open(
        self, spec: SequenceSpec, copy: DeviceCopy | None = None, num_tokens: int = 0
    ) -> SequenceRecord:
        """Bind a free lane at the first `num_tokens` tokens of `copy`."""
        num_prompt = spec.prompt.num_tokens
        if not 1 <= num_prompt <= self._capacity.max_context:
            raise InvariantError(
                f"{spec.request_id}: a prompt of {num_prompt} tokens in a context of"
                f" {self._capacity.max_context}"
            )
        handle = self._lanes.acquire()
        if handle is None:
            raise InvariantError(f"{spec.request_id}: no lane is free")
        sequence = SequenceRecord(handle, spec, pages_of(self._capacity.max_context))
        self._sequences[handle.lane] = sequence
        if copy is None:
            self._pages.open(handle.lane)
            return sequence
        shared = copy.pages[: pages_of(num_tokens)]
        self._pages.share(handle.lane, shared)
        sequence.page_table[: len(shared)] = shared
        sequence.num_reserved = len(shared)
        sequence.frontier = num_tokens
        sequence.owns_tail = num_tokens % PAGE_TOKENS == 0
        if copy.slot is not None:
            sequence.slot = self._states.share(copy.slot)
        return sequence

    def get(self, handle: SequenceHandle) -> SequenceRecord:
        self._lanes.verify(handle)
        return self._sequences[handle.lane]

    def idle(self, handle: SequenceHandle) -> SequenceRecord:
        """One without a pending unit."""
        sequence = self.get(handle)
        if sequence.is_pending:
            raise InvariantError(f"{sequence.spec.request_id}: a unit of it is pending")
        return sequence

    def extensible(self, handle: SequenceHandle, num_tokens: int) -> SequenceRecord:
        """An idle one that may still grow by `num_tokens`."""
        sequence = self.idle(handle)
        name = sequence.spec.request_id
        if sequence.has_ended:
            raise InvariantError(f"{name}: a unit of it was refused; it can only be closed")
        if num_tokens < 1 or sequence.frontier + num_tokens > self._capacity.max_context:
            raise InvariantError(
                f"{name}: {num_tokens} inputs after {sequence.frontier} in a context of"
                f" {self._capacity.max_context}"
            )
        return sequence

    def is_reserved(self, sequence: SequenceRecord, num_tokens: int) -> bool:
        """Whether the next `num_tokens` inputs can be launched."""
        return (
            (sequence.provisional_slot is not None or not self._has_states)
            and (sequence.owns_tail or bool(sequence.copies))
            and pages_of(sequence.frontier + num_tokens) <= sequence.num_reserved
        )

    def needs_copy(self, sequence: SequenceRecord) -> bool:
        """Whether the next reservation takes a page for a copy of the last one."""
        if sequence.owns_tail or sequence.copies:
            return False
        return self._pages.references(self._tail(sequence)) > 1

    def missing(self, sequence: SequenceRecord, num_tokens: int) -> Amounts:
        """What `reserve` lacks now."""
        pages, slots = self._shortage(sequence, num_tokens)
        return Amounts(pages=max(0, pages), slots=max(0, slots))

    def reserve(self, sequence: SequenceRecord, num_tokens: int) -> bool:
        """Pages, a slot and the copy of a shared last page, all or nothing."""
        if self.is_reserved(sequence, num_tokens):
            return True
        pages, slots = self._shortage(sequence, num_tokens)
        if pages > 0 or slots > 0:
            return False
        if not sequence.owns_tail and not sequence.copies:
            self._take_tail(sequence)
        needed = pages_of(sequence.frontier + num_tokens)
        if needed > sequence.num_reserved:
            added = self._pages.reserve(sequence.handle.lane, needed) or ()
            sequence.page_table[sequence.num_reserved : needed] = added
            sequence.num_reserved = needed
        if self._has_states and sequence.provisional_slot is None:
            sequence.provisional_slot = self._states.acquire(sequence.last_slot)
        return True

    def pages_to_show(
        self, sequence: SequenceRecord, num_inputs: int, num_proposed: int, *, goes_on: bool
    ) -> int:
        """Pages of a reserved decode row: those of its inputs; of the inputs that are proposed
        behind them, as far as they are reserved; and, if it goes on and they are to be had, of the
        input behind them."""
        stop = sequence.frontier + num_inputs
        if goes_on and stop < self._capacity.max_context and self.reserve(sequence, num_inputs + 1):
            stop += 1
        return min(pages_of(stop + num_proposed), max(pages_of(stop), sequence.num_reserved))

    def launch(self, sequence: SequenceRecord, row: UnitRow) -> None:
        """The row belongs to a unit from now on."""
        self._pages.map(sequence.handle.lane, row.page_table.shape[0])
        sequence.is_pending = True

    def settle(self, sequence: SequenceRecord) -> None:
        self._pages.unmap(sequence.handle.lane)
        sequence.is_pending = False

    def advance(self, sequence: SequenceRecord, num_inputs: int) -> None:
        """Make what the unit wrote of this row's first inputs the sequence's State and KV."""
        lane = sequence.handle.lane
        frontier = sequence.frontier + num_inputs
        self._pages.commit(lane, pages_of(frontier))
        if sequence.copies:
            self._pages.end_copy(lane)
            sequence.copies, sequence.owns_tail = (), True
        if sequence.provisional_slot is not None:
            if sequence.slot != ROOT_SLOT:
                self._states.release(sequence.slot)
            sequence.last_slot = sequence.slot
            sequence.slot, sequence.provisional_slot = sequence.provisional_slot, None
        sequence.frontier = frontier

    def device_copy(self, sequence: SequenceRecord) -> DeviceCopy:
        """What a checkpoint of its committed frontier holds."""
        pages = self._pages.committed_ids(sequence.handle.lane)
        return DeviceCopy(pages, sequence.slot if self._has_states else None)

    def release(self, sequence: SequenceRecord) -> None:
        lane = sequence.handle.lane
        self._pages.close(lane)
        for slot in _slots_of(sequence):
            self._states.release(slot)
        self._lanes.release(sequence.handle)
        del self._sequences[lane]

    def slots(self) -> Iterator[int]:
        """Of all sequences, a shared slot as often as it is held."""
        for sequence in self._sequences.values():
            yield from _slots_of(sequence)

    def check(self) -> None:
        """Verify that records, lanes and the page store agree."""
        self._lanes.check()
        if self._lanes.bound != self._sequences.keys():
            raise InvariantError("bound lanes and open sequences differ")
        for sequence in self._sequences.values():
            self._check_pages(sequence)
            self._check_frontier(sequence)

    def _shortage(self, sequence: SequenceRecord, num_tokens: int) -> tuple[int, int]:
        """Pages and slots that are needed less those that are free: enough when not positive."""
        needed = pages_of(sequence.frontier + num_tokens)
        pages = max(0, needed - sequence.num_reserved) + self.needs_copy(sequence)
        takes_slot = self._has_states and sequence.provisional_slot is None
        return pages - self._pages.num_free, takes_slot - self._states.num_free

    def _take_tail(self, sequence: SequenceRecord) -> None:
        """Make the shared last page the sequence's own: as it is for its only holder, else a copy
        that the next unit makes."""
        if not self.needs_copy(sequence):
            self._pages.renew(self._tail(sequence))
            sequence.owns_tail = True
            return
        copy = self._pages.copy_last(sequence.handle.lane)
        if copy is None:
            raise InvariantError(f"{sequence.spec.request_id}: no page for a copy")
        sequence.copies = (copy,)
        sequence.page_table[sequence.frontier // PAGE_TOKENS] = copy[1]

    def _tail(self, sequence: SequenceRecord) -> int:
        """The page that the frontier lies in."""
        return int(sequence.page_table[sequence.frontier // PAGE_TOKENS])

    def _check_pages(self, sequence: SequenceRecord) -> None:
        lane, name = sequence.handle.lane, sequence.spec.request_id
        page_ids = self._pages.page_ids(lane)
        if tuple(sequence.page_table[: sequence.num_reserved].tolist()) != page_ids:
            raise InvariantError(f"{name}: page table and page store differ")
        extents = self._pages.extents(lane)
        if extents.committed != pages_of(sequence.frontier):
            raise InvariantError(f"{name}: committed pages do not fit {sequence.frontier} tokens")
        if extents.mapped != extents.committed and not sequence.is_pending:
            raise InvariantError(f"{name}: pages are mapped and no unit is pending")
        if sequence.owns_tail and sequence.copies:
            raise InvariantError(f"{name}: its own page {sequence.copies} is copied")
        committed = self._pages.committed_ids(lane)
        if sequence.copies and committed[-1] != sequence.copies[0][0]:
            raise InvariantError(f"{name}: the copy {sequence.copies} is not of its last page")

    def _check_frontier(self, sequence: SequenceRecord) -> None:
        name, frontier = sequence.spec.request_id, sequence.frontier
        has_image = sequence.slot != ROOT_SLOT
        if has_image != (self._has_states and frontier > 0):
            raise InvariantError(f"{name}: StateImage {sequence.slot} at {frontier}")
        last = sequence.num_prompt + max(0, len(sequence.accepted) - 1)
        if frontier > last or sequence.num_replay_left < 0:
            raise InvariantError(
                f"{name}: {len(sequence.accepted)} accepted tokens at frontier {frontier}"
            )


def _slots_of(sequence: SequenceRecord) -> Iterator[int]:
    for slot in (sequence.slot, sequence.provisional_slot):
        if slot is not None and slot != ROOT_SLOT:
            yield slot
