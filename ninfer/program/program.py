"""ModelProgram: lanes, pages and StateImages of every open sequence, and one unit at a time.

    open_sequence -> (reserve_units -> launch_* -> complete -> commit | abort)* -> close_sequence

A unit reads a row's committed pages and its current StateImage slot; it writes pages behind the
frontier and the row's provisional slot. Commit swaps the slots and moves the frontier. Abort has
nothing to undo: what the unit wrote is readable by nobody, and the next launch writes it anew.

While a unit is pending, the mappings of its rows are frozen: they can be neither reserved for nor
closed. A unit can be settled only after it has run, so no memory is given back under it.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.program import (
    Occupancy,
    PendingBatch,
    SequenceHandle,
    SequenceSpec,
    UnitKind,
)
from ninfer.contract.units import (
    PAGE_TOKENS,
    ROOT_SLOT,
    Capacity,
    Executor,
    RowOutput,
    UnitRow,
)
from ninfer.program.sequence_record import SequenceRecord
from ninfer.program.stores.lane_store import LaneStore
from ninfer.program.stores.page_store import PageStore
from ninfer.program.stores.state_store import StateStore
from ninfer.program.unit_work import UnitWork

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Unit(Generic[T]):
    """The launched unit. `batch` is None for a scoring unit, which settles itself. `goes_on`: the
    executor may have gone on with it."""

    sequences: tuple[SequenceRecord, ...]
    rows: tuple[UnitRow, ...]
    work: UnitWork[T]
    batch: PendingBatch | None = None
    goes_on: bool = False


class ModelProgram:
    """Implements the contract's Program over any Executor. Used by one task alone."""

    def __init__(self, config: ModelConfig, executor: Executor, capacity: Capacity) -> None:
        _check_capacity(capacity)
        self._capacity = capacity
        self._vocab_size = config.vocab_size
        self._executor = executor
        self._lanes = LaneStore(capacity.max_concurrency)
        self._pages = PageStore(capacity.num_pages)
        self._states = StateStore(capacity.num_slots)
        self._sequences: dict[int, SequenceRecord] = {}
        self._unit: _Unit[Any] | None = None
        self._is_closed = False

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def open_sequence(self, spec: SequenceSpec) -> SequenceHandle:
        """Bind a free lane. InvariantError without one, and for a prompt that is empty or longer
        than max_context."""
        self._check_open()
        num_tokens = spec.prompt.num_tokens
        if not 1 <= num_tokens <= self._capacity.max_context:
            raise InvariantError(
                f"{spec.request_id}: a prompt of {num_tokens} tokens in a context of"
                f" {self._capacity.max_context}"
            )
        handle = self._lanes.acquire()
        if handle is None:
            raise InvariantError(f"{spec.request_id}: no lane is free")
        self._pages.open(handle.lane)
        max_pages = self.pages_needed(self._capacity.max_context)
        self._sequences[handle.lane] = SequenceRecord(handle, spec, max_pages)
        return handle

    def close_sequence(self, handle: SequenceHandle) -> None:
        """Return lane, pages and slots. InvariantError while a unit of it is pending."""
        self._release_sequence(self._idle_sequence(handle))

    def frontier(self, handle: SequenceHandle) -> int:
        """Tokens whose State and KV are committed."""
        return self._sequence(handle).frontier

    def pages_needed(self, num_tokens: int) -> int:
        """Pages a sequence of so many tokens occupies."""
        return -(-num_tokens // PAGE_TOKENS)

    def reserve_units(self, handle: SequenceHandle, num_tokens: int) -> bool:
        """Reserve pages and a new StateImage slot for the next `num_tokens` inputs, all or nothing.

        False when either is short. InvariantError beyond max_context.
        """
        sequence = self._extensible_sequence(handle, num_tokens)
        if sequence.provisional_slot is None and self._states.num_free == 0:
            return False
        if not self._reserve_pages(sequence, sequence.frontier + num_tokens):
            return False
        if sequence.provisional_slot is None:
            sequence.provisional_slot = self._states.acquire(handle.lane)
        return True

    def launch_prefill(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        """Start the next `num_tokens` prompt inputs; the last prompt input also samples.

        Needs a running event loop, a reservation that covers the inputs and no other pending unit.
        """
        sequence = self._launchable_prompt(handle, num_tokens)
        num_pages = self.pages_needed(sequence.frontier + num_tokens)
        row = sequence.prompt_row(num_tokens, num_pages, samples=True)
        return self._launch(UnitKind.PREFILL, (sequence,), (row,))

    def launch_decode(
        self, handles: Sequence[SequenceHandle], *, goes_on: bool = False
    ) -> PendingBatch:
        """Start one step for rows whose prompt is done, each with its newest accepted token.
        `goes_on` as the contract says."""
        if not handles or len(set(handles)) != len(handles):
            raise InvariantError(f"a decode batch of {len(handles)} rows, some of them twice")
        sequences = tuple(self._launchable_decode(handle) for handle in handles)
        rows = tuple(
            sequence.decode_row(self._pages_to_show(sequence, goes_on)) for sequence in sequences
        )
        return self._launch(UnitKind.DECODE, sequences, rows, goes_on=goes_on)

    async def complete(self, batch: PendingBatch) -> None:
        """Wait until the unit has run and fill `outputs`; idempotent until the settlement.

        Raises what the executor raised (DeviceError); the batch is still pending then. When the
        waiting task is cancelled, the cancellation is raised only after the unit has ended, so
        abort is always possible afterwards.
        """
        unit = self._unit_of(batch)
        if batch.outputs is None:
            outputs: tuple[RowOutput, ...] = await unit.work.result()
            self._check_outputs(unit, outputs)
            batch.outputs = outputs

    def commit(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        """Settle a completed batch; `accepted` as the contract says. InvariantError, with nothing
        changed, when the unit was not completed or a count is out of range."""
        unit = self._unit_of(batch)
        outputs = batch.outputs
        if outputs is None:
            raise InvariantError("a unit is committed before it was completed")
        _check_accepted(outputs, accepted)
        for sequence, row, output, count in zip(
            unit.sequences, unit.rows, outputs, accepted, strict=True
        ):
            if not output.is_finite or (row.sample is not None and count == 0):
                sequence.has_ended = True
                continue
            self._advance(sequence, row)
            if output.token is not None:
                sequence.accept(output.token.token_id)
        self._settle(unit)

    def abort(self, batch: PendingBatch) -> None:
        """Settle: everything as before the launch; reservations stay. InvariantError while the
        unit still runs (`complete` waits for it, also when it is cancelled), and for a completed
        one that was launched to go on."""
        unit = self._unit_of(batch)
        if not unit.work.is_done():
            raise InvariantError("a unit is aborted while it runs")
        if unit.goes_on and batch.outputs is not None:
            raise InvariantError("a unit that was launched to go on is aborted")
        unit.work.forget()
        self._settle(unit)

    async def score(self, handle: SequenceHandle, num_tokens: int) -> Float32Array:
        """Run and commit the next prompt inputs and return their logits [num_tokens, V] float32.

        Needs what launch_prefill needs. On any error or cancellation nothing is committed.
        """
        sequence = self._launchable_prompt(handle, num_tokens)
        num_pages = self.pages_needed(sequence.frontier + num_tokens)
        row = sequence.prompt_row(num_tokens, num_pages, samples=False)
        unit = self._start(self._executor.score(row), (sequence,), (row,))
        try:
            logits = await unit.work.result()
            if logits.shape != (num_tokens, self._vocab_size):
                raise InvariantError(
                    f"the executor's logits are {logits.shape},"
                    f" not {(num_tokens, self._vocab_size)}"
                )
            self._advance(sequence, row)
            return logits
        finally:
            self._settle(unit)

    def occupancy(self) -> Occupancy:
        """Reserved pages and slots count as used; ROOT_SLOT is in no count."""
        return Occupancy(
            lanes_used=self._lanes.num_used,
            pages_used=self._pages.num_used,
            pages_total=self._pages.num_pages,
            slots_used=self._states.num_used,
            slots_total=self._states.num_slots,
        )

    def check(self) -> None:
        """Verify all internal counts; InvariantError says which one is off."""
        self._lanes.check()
        self._pages.check()
        self._states.check()
        if self._lanes.bound != self._sequences.keys():
            raise InvariantError("bound lanes and open sequences differ")
        for sequence in self._sequences.values():
            self._check_sequence(sequence)
        used = sum(len(_slots_of(sequence)) for sequence in self._sequences.values())
        if used != self._states.num_used:
            raise InvariantError(f"{self._states.num_used} slots are owned, sequences have {used}")
        pending = {id(sequence) for sequence in self._sequences.values() if sequence.is_pending}
        members = set() if self._unit is None else {id(s) for s in self._unit.sequences}
        if pending != members:
            raise InvariantError("pending rows and the members of the pending unit differ")

    def close(self) -> None:
        """End every sequence and release the executor; idempotent. InvariantError while a unit
        runs."""
        if self._unit is not None:
            if not self._unit.work.is_done():
                raise InvariantError("the program is closed while a unit runs")
            self._unit.work.forget()
            self._settle(self._unit)
        for sequence in tuple(self._sequences.values()):
            self._release_sequence(sequence)
        self._is_closed = True
        self._executor.close()

    def _reserve_pages(self, sequence: SequenceRecord, num_tokens: int) -> bool:
        """Pages for so many tokens, or False and nothing changed."""
        lane = sequence.handle.lane
        num_before = self._pages.num_reserved(lane)
        added = self._pages.reserve(lane, self.pages_needed(num_tokens))
        if added is None:
            return False
        if added:
            sequence.page_table[num_before : num_before + len(added)] = added
        return True

    def _pages_to_show(self, sequence: SequenceRecord, goes_on: bool) -> int:
        """Pages of a decode row: those of its input and, if it goes on and they are to be had, of
        the input behind it."""
        stop = sequence.frontier + 1
        if (
            goes_on
            and stop < self._capacity.max_context
            and self._reserve_pages(sequence, stop + 1)
        ):
            stop += 1
        return self.pages_needed(stop)

    def _sequence(self, handle: SequenceHandle) -> SequenceRecord:
        self._lanes.verify(handle)
        return self._sequences[handle.lane]

    def _idle_sequence(self, handle: SequenceHandle) -> SequenceRecord:
        sequence = self._sequence(handle)
        if sequence.is_pending:
            raise InvariantError(f"{sequence.spec.request_id}: a unit of it is pending")
        return sequence

    def _extensible_sequence(self, handle: SequenceHandle, num_tokens: int) -> SequenceRecord:
        """An idle sequence that may still grow by `num_tokens`."""
        sequence = self._idle_sequence(handle)
        name = sequence.spec.request_id
        if sequence.has_ended:
            raise InvariantError(f"{name}: a unit of it was refused; it can only be closed")
        if num_tokens < 1 or sequence.frontier + num_tokens > self._capacity.max_context:
            raise InvariantError(
                f"{name}: {num_tokens} inputs after {sequence.frontier} in a context of"
                f" {self._capacity.max_context}"
            )
        return sequence

    def _launchable_sequence(self, handle: SequenceHandle, num_tokens: int) -> SequenceRecord:
        """A sequence with all the next `num_tokens` inputs need reserved."""
        self._check_open()
        if self._unit is not None:
            raise InvariantError("another unit is pending")
        sequence = self._extensible_sequence(handle, num_tokens)
        needed = self.pages_needed(sequence.frontier + num_tokens)
        if sequence.provisional_slot is None or self._pages.num_reserved(handle.lane) < needed:
            raise InvariantError(
                f"{sequence.spec.request_id}: {num_tokens} inputs after {sequence.frontier} are"
                f" not reserved"
            )
        return sequence

    def _launchable_prompt(self, handle: SequenceHandle, num_tokens: int) -> SequenceRecord:
        sequence = self._launchable_sequence(handle, num_tokens)
        limit = min(sequence.num_prompt_left, self._capacity.prefill_chunk)
        if num_tokens > limit:
            raise InvariantError(
                f"{sequence.spec.request_id}: {num_tokens} prompt inputs, at most {limit} can run"
            )
        return sequence

    def _launchable_decode(self, handle: SequenceHandle) -> SequenceRecord:
        sequence = self._launchable_sequence(handle, 1)
        if sequence.num_prompt_left > 0 or not sequence.accepted:
            raise InvariantError(f"{sequence.spec.request_id}: there is no token to decode from")
        return sequence

    def _launch(
        self,
        kind: UnitKind,
        sequences: tuple[SequenceRecord, ...],
        rows: tuple[UnitRow, ...],
        *,
        goes_on: bool = False,
    ) -> PendingBatch:
        batch = PendingBatch(
            kind=kind,
            handles=tuple(sequence.handle for sequence in sequences),
            num_inputs=tuple(row.token_ids.shape[0] for row in rows),
        )
        work = self._execute(kind, rows, goes_on)
        self._start(work, sequences, rows, batch, goes_on=goes_on)
        return batch

    async def _execute(
        self, kind: UnitKind, rows: tuple[UnitRow, ...], goes_on: bool
    ) -> tuple[RowOutput, ...]:
        if kind is UnitKind.PREFILL:
            return (await self._executor.prefill(rows[0]),)
        return await self._executor.decode(rows, goes_on=goes_on)

    def _start(
        self,
        work: Coroutine[Any, Any, T],
        sequences: tuple[SequenceRecord, ...],
        rows: tuple[UnitRow, ...],
        batch: PendingBatch | None = None,
        *,
        goes_on: bool = False,
    ) -> _Unit[T]:
        unit = _Unit(sequences, rows, UnitWork(work), batch, goes_on)
        for sequence, row in zip(sequences, rows, strict=True):
            self._pages.map(sequence.handle.lane, row.page_table.shape[0])
            sequence.is_pending = True
        self._unit = unit
        return unit

    def _unit_of(self, batch: PendingBatch) -> _Unit[Any]:
        if batch.is_settled:
            raise InvariantError("the batch was settled before")
        if self._unit is None or self._unit.batch is not batch:
            raise InvariantError("the batch is not the pending unit")
        return self._unit

    def _check_outputs(
        self, unit: _Unit[tuple[RowOutput, ...]], outputs: tuple[RowOutput, ...]
    ) -> None:
        if len(outputs) != len(unit.rows):
            raise InvariantError(f"the executor answered {len(outputs)} of {len(unit.rows)} rows")
        for row, output in zip(unit.rows, outputs, strict=True):
            is_expected = row.sample is not None and output.is_finite
            if (output.token is not None) != is_expected:
                raise InvariantError("the executor answered a row with more or less than asked")
            if output.token is not None and not 0 <= output.token.token_id < self._vocab_size:
                raise InvariantError(f"the executor chose token {output.token.token_id}")

    def _advance(self, sequence: SequenceRecord, row: UnitRow) -> None:
        """Make what the unit wrote for this row the sequence's State and KV."""
        lane = sequence.handle.lane
        frontier = row.start + row.token_ids.shape[0]
        self._pages.commit(lane, self.pages_needed(frontier))
        if sequence.slot != ROOT_SLOT:
            self._states.release(lane, sequence.slot)
        sequence.slot = row.write_slot
        sequence.provisional_slot = None
        sequence.frontier = frontier

    def _settle(self, unit: _Unit[Any]) -> None:
        for sequence in unit.sequences:
            self._pages.unmap(sequence.handle.lane)
            sequence.is_pending = False
        if unit.batch is not None:
            unit.batch.is_settled = True
        self._unit = None

    def _release_sequence(self, sequence: SequenceRecord) -> None:
        lane = sequence.handle.lane
        self._pages.close(lane)
        for slot in _slots_of(sequence):
            self._states.release(lane, slot)
        self._lanes.release(sequence.handle)
        del self._sequences[lane]

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvariantError("the program is closed")

    def _check_sequence(self, sequence: SequenceRecord) -> None:
        lane, name = sequence.handle.lane, sequence.spec.request_id
        page_ids = self._pages.page_ids(lane)
        if tuple(sequence.page_table[: len(page_ids)].tolist()) != page_ids:
            raise InvariantError(f"{name}: page table and page store differ")
        extents = self._pages.extents(lane)
        if extents.committed != self.pages_needed(sequence.frontier):
            raise InvariantError(f"{name}: committed pages do not fit {sequence.frontier} tokens")
        if extents.mapped != extents.committed and not sequence.is_pending:
            raise InvariantError(f"{name}: pages are mapped and no unit is pending")
        if self._states.slots_of(lane) != _slots_of(sequence):
            raise InvariantError(f"{name}: StateImage slots and state store differ")
        if (sequence.slot == ROOT_SLOT) != (sequence.frontier == 0):
            raise InvariantError(f"{name}: StateImage {sequence.slot} at {sequence.frontier}")
        num_fed = sequence.frontier - sequence.spec.prompt.num_tokens
        if sequence.accepted and len(sequence.accepted) != num_fed + 1:
            raise InvariantError(
                f"{name}: {len(sequence.accepted)} accepted tokens at frontier {sequence.frontier}"
            )


def _slots_of(sequence: SequenceRecord) -> frozenset[int]:
    slots = (sequence.slot, sequence.provisional_slot)
    return frozenset(slot for slot in slots if slot is not None and slot != ROOT_SLOT)


def _check_accepted(outputs: tuple[RowOutput, ...], accepted: Sequence[int]) -> None:
    if len(accepted) != len(outputs):
        raise InvariantError(f"{len(accepted)} accepted counts for {len(outputs)} rows")
    for index, (output, count) in enumerate(zip(outputs, accepted, strict=True)):
        num_produced = 0 if output.token is None else 1
        if not 0 <= count <= num_produced:
            raise InvariantError(f"row {index} accepts {count} of {num_produced} tokens")


def _check_capacity(capacity: Capacity) -> None:
    """One sequence must be able to run alone to the end of its context."""
    num_pages = -(-capacity.max_context // PAGE_TOKENS)
    if capacity.max_context < 1 or capacity.num_pages < num_pages:
        raise InvariantError(
            f"{capacity.num_pages} pages cannot hold a context of {capacity.max_context}"
        )
    if capacity.num_slots < 3 or capacity.prefill_chunk < 1:
        raise InvariantError(
            f"{capacity.num_slots} StateImage slots (at least 3) and a prefill chunk of"
            f" {capacity.prefill_chunk} (at least 1)"
        )
