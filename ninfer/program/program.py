"""ModelProgram: the sequences, checkpoints and transfers of one model, and one unit at a time.

    open_sequence -> (reserve_units -> launch_* -> complete -> commit | abort)* -> close_sequence

A unit reads a row's committed pages and its current StateImage slot; it writes pages behind the
frontier and the row's provisional slot. Commit swaps the slots and moves the frontier. Abort has
nothing to undo: what the unit wrote is readable by nobody, and the next launch writes it anew.

While a unit is pending, the mappings of its rows are frozen: they can be neither reserved for nor
closed. A unit can be settled only after it has run, so no memory is given back under it.

Memory of sequences is `residents.py`, of checkpoints `checkpoints.py`, moves `transfers.py`; this
module owns the unit and ties them together.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ninfer.contract.arrays import Float32Array
from ninfer.contract.cache import CheckpointId
from ninfer.contract.drafting import DraftCosts
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.program import (
    NO_DRAFT,
    Amounts,
    CheckpointFacts,
    Draft,
    Occupancy,
    PausedSequence,
    PendingBatch,
    SequenceHandle,
    SequenceSpec,
    Source,
    Transfer,
    TransferKind,
    UnitKind,
)
from ninfer.contract.units import (
    PAGE_TOKENS,
    REPLAY_TOKENS,
    Capacity,
    Executor,
    RowOutput,
    UnitRow,
)
from ninfer.program.checkpoints import CheckpointStore
from ninfer.program.draft_costs import measure
from ninfer.program.residents import Residents, pages_of
from ninfer.program.sequence_record import SequenceRecord
from ninfer.program.stores.disk_store import DiskStore
from ninfer.program.stores.host_store import HostStore
from ninfer.program.stores.page_store import PageStore
from ninfer.program.stores.state_store import StateStore
from ninfer.program.transfers import CopyTransfer, Transfers
from ninfer.program.unit import Unit, check_accepted, check_outputs, num_taken_inputs
from ninfer.program.unit_work import UnitWork

T = TypeVar("T")


class ModelProgram:
    """Implements the contract's Program over any Executor. Used by one task alone.

    Owns the executor and the disk store: `close` closes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        executor: Executor,
        capacity: Capacity,
        disk: DiskStore | None = None,
    ) -> None:
        _check_capacity(capacity, executor)
        self._capacity = capacity
        self._vocab_size = config.vocab_size
        self._executor = executor
        self._disk = disk
        self._has_states = executor.slot_bytes > 0
        self._pages = PageStore(capacity.num_pages)
        self._states = StateStore(capacity.num_slots)
        self._host = HostStore(capacity.num_host_blocks, self._pages)
        self._residents = Residents(
            capacity, self._pages, self._states, has_states=self._has_states
        )
        self._checkpoints = CheckpointStore(self._pages, self._states, self._host, disk)
        self._transfers = Transfers(
            executor, self._checkpoints, self._pages, self._states, self._host, disk
        )
        self._unit: Unit[Any] | None = None
        self._rewound: tuple[int, ...] | None = None
        self._is_closed = False

    @property
    def device(self) -> str:
        """The executor and what it runs on, for people."""
        return f"{self._executor.name} ({self._executor.device_name})"

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def measure_drafts(self) -> DraftCosts:
        """Time a few steps. InvariantError when drafts have no room or a sequence was opened."""
        self._check_open()
        if self._capacity.max_draft_tokens == 0 or self._unit is not None or [*self._residents]:
            raise InvariantError("drafts are measured before the first sequence, if at all")
        return await UnitWork(measure(self._executor, self._capacity, self._vocab_size)).result()

    def open_sequence(self, spec: SequenceSpec, source: Source | None = None) -> SequenceHandle:
        """Bind a free lane, at the frontier of `source` or at 0.

        InvariantError without a free lane, for a prompt that is empty or longer than max_context,
        and for a source that cannot be one (see the contract).
        """
        sequence = self._open(spec, source, spec.prompt.num_tokens - 1)
        return sequence.handle

    def close_sequence(self, handle: SequenceHandle) -> None:
        """Return lane, pages and slots. InvariantError while a unit of it is pending."""
        self._residents.release(self._residents.idle(handle))

    def frontier(self, handle: SequenceHandle) -> int:
        """Tokens whose State and KV are committed."""
        return self._residents.get(handle).frontier

    def pages_needed(self, num_tokens: int) -> int:
        """Pages a sequence of so many tokens occupies."""
        return pages_of(num_tokens)

    def reserve_units(self, handle: SequenceHandle, num_tokens: int) -> bool:
        """Reserve what the next `num_tokens` inputs need, all or nothing: pages, a StateImage slot
        and the copy of a shared last page.

        False when pages or slots are short. InvariantError beyond max_context.
        """
        sequence = self._residents.extensible(handle, num_tokens)
        return self._residents.reserve(sequence, num_tokens)

    def needs_copy(self, handle: SequenceHandle) -> bool:
        """Whether the next reservation takes a page for a copy of the shared last one."""
        return self._residents.needs_copy(self._residents.get(handle))

    def missing(self, handle: SequenceHandle, num_tokens: int) -> Amounts:
        """What `reserve_units` with the same arguments lacks now."""
        sequence = self._residents.extensible(handle, num_tokens)
        return self._residents.missing(sequence, num_tokens)

    def launch_prefill(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        """Start the next `num_tokens` prompt inputs; the last prompt input also samples.

        Needs a running event loop, a reservation that covers the inputs and no other pending unit.
        """
        sequence = self._launchable_prompt(handle, num_tokens)
        num_pages = pages_of(sequence.frontier + num_tokens)
        row = sequence.prompt_row(num_tokens, num_pages, samples=True)
        return self._launch(UnitKind.PREFILL, (sequence,), (row,))

    def launch_decode(
        self,
        handles: Sequence[SequenceHandle],
        *,
        drafts: Sequence[Draft] = (),
        num_proposed: Sequence[int] = (),
        goes_on: bool = False,
    ) -> PendingBatch:
        """Start one step for rows whose prompt is done, each with its next accepted token and its
        draft. `num_proposed` and `goes_on` as the contract says; with a draft model nothing goes
        on."""
        if not handles or len(set(handles)) != len(handles):
            raise InvariantError(f"a decode batch of {len(handles)} rows, some of them twice")
        drafts = _one_each("drafts", drafts, NO_DRAFT, len(handles))
        num_proposed = _one_each("lengths of proposals", num_proposed, 0, len(handles))
        asked = tuple(zip(handles, drafts, num_proposed, strict=True))
        sequences = tuple(self._launchable_decode(*each) for each in asked)
        # A step ahead writes the slots that this one reads, and needs to know what they will hold.
        goes_on = goes_on and not self._capacity.has_draft_model
        goes_on = goes_on and not any(
            draft.token_ids or self._states.is_shared(sequence.slot)
            for sequence, draft in zip(sequences, drafts, strict=True)
        )
        rows = tuple(
            self._decode_row(sequence, draft, count, goes_on=goes_on)
            for sequence, (_, draft, count) in zip(sequences, asked, strict=True)
        )
        return self._launch(UnitKind.DECODE, sequences, rows, goes_on=goes_on)

    def force(self, handle: SequenceHandle, token_ids: Sequence[int]) -> None:
        """Accept tokens that nobody draws; see the contract. InvariantError for a row that cannot
        decode and for ids outside the vocabulary."""
        sequence = self._residents.idle(handle)
        name = sequence.spec.request_id
        if sequence.num_prompt_left > 0 or not sequence.accepted or sequence.has_ended:
            raise InvariantError(f"{name}: no tokens can be forced here")
        if not all(0 <= token_id < self._vocab_size for token_id in token_ids):
            raise InvariantError(f"{name}: forced tokens outside the vocabulary")
        for token_id in token_ids:
            sequence.accept(token_id)

    def launch_replay(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        """Start the next `num_tokens` inputs that were chosen before; see the contract."""
        sequence = self._launchable_sequence(handle, num_tokens)
        limit = min(sequence.num_replay_left, REPLAY_TOKENS, self._capacity.prefill_chunk)
        if sequence.num_prompt_left > 0 or num_tokens > limit:
            raise InvariantError(
                f"{sequence.spec.request_id}: {num_tokens} inputs to replay, at most {limit} can"
            )
        row = sequence.replay_row(num_tokens, pages_of(sequence.frontier + num_tokens))
        return self._launch(UnitKind.REPLAY, (sequence,), (row,))

    async def complete(self, batch: PendingBatch) -> None:
        """Wait until the unit has run and fill `outputs`; idempotent until the settlement.

        Raises what the executor raised (DeviceError); the batch is still pending then. When the
        waiting task is cancelled, the cancellation is raised only after the unit has ended, so
        abort is always possible afterwards.
        """
        unit = self._unit_of(batch)
        if batch.outputs is None:
            outputs: tuple[RowOutput, ...] = await unit.work.result()
            check_outputs(unit.rows, outputs, self._vocab_size)
            batch.outputs = outputs

    async def rewind(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        """Let rows that take some of their tokens have the state behind these; see the contract.
        InvariantError as in commit."""
        unit = self._unit_of(batch)
        outputs = _checked_outputs(batch, accepted)
        if not any(map(_is_partly_taken, outputs, accepted)):
            return
        counts = [
            num_taken_inputs(row, count if _is_partly_taken(output, count) else len(output.tokens))
            for row, output, count in zip(unit.rows, outputs, accepted, strict=True)
        ]
        await UnitWork(self._executor.rewind(unit.rows, counts)).result()
        self._rewound = tuple(accepted)

    def commit(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        """Settle a completed batch; `accepted` as the contract says. InvariantError, with nothing
        changed, when the unit was not completed, a count is out of range, or states are behind
        tokens that are not taken."""
        unit = self._unit_of(batch)
        outputs = _checked_outputs(batch, accepted)
        is_partial = any(map(_is_partly_taken, outputs, accepted))
        if is_partial and self._rewound != tuple(accepted):
            raise InvariantError("some tokens of a row are taken, and its state has more")
        for sequence, row, output, count in zip(
            unit.sequences, unit.rows, outputs, accepted, strict=True
        ):
            if not output.is_finite or (row.sample is not None and count == 0):
                sequence.has_ended = True
                continue
            self._residents.advance(sequence, num_taken_inputs(row, count))
            for token in output.tokens[:count]:
                sequence.accept(token.token_id)
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
        num_pages = pages_of(sequence.frontier + num_tokens)
        row = sequence.prompt_row(num_tokens, num_pages, samples=False)
        unit = self._start(self._executor.score(row), (sequence,), (row,))
        try:
            logits = await unit.work.result()
            if logits.shape != (num_tokens, self._vocab_size):
                raise InvariantError(
                    f"the executor's logits are {logits.shape},"
                    f" not {(num_tokens, self._vocab_size)}"
                )
            self._residents.advance(sequence, num_tokens)
            return logits
        finally:
            self._settle(unit)

    def num_replay_left(self, handle: SequenceHandle) -> int:
        """Inputs behind the frontier that were fed before a pause; their units draw nothing."""
        return self._residents.get(handle).num_replay_left

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        """End residence between units, with a Snapshot or without. At frontier 0 there is nothing
        to keep. InvariantError while a unit of it is pending and when it has ended."""
        sequence = self._residents.idle(handle)
        if sequence.has_ended:
            raise InvariantError(f"{sequence.spec.request_id}: has ended; it can only be closed")
        snapshot = None
        if keeps_state and sequence.frontier > 0:
            snapshot = self._freeze(sequence)
        self._residents.release(sequence)
        return PausedSequence(sequence.spec, tuple(sequence.accepted), sequence.frontier, snapshot)

    def resume(self, paused: PausedSequence, source: Source | None = None) -> SequenceHandle:
        """Bind a lane again, from `source` (up to the old frontier) or from 0. The Snapshot stays
        the caller's unless the source consumes it."""
        sequence = self._open(paused.spec, source, paused.frontier)
        sequence.restore(paused.accepted)
        return sequence.handle

    def capture(self, handle: SequenceHandle) -> CheckpointId | None:
        """Freeze the committed frontier. None at frontier 0 and when no slot would be left for the
        row's next unit. InvariantError while a unit is pending."""
        sequence = self._residents.idle(handle)
        takes_slot = (
            self._has_states and sequence.provisional_slot is None and not sequence.has_ended
        )
        if sequence.frontier == 0 or (takes_slot and self._states.num_free == 0):
            return None
        return self._freeze(sequence)

    def checkpoint(self, checkpoint: CheckpointId) -> CheckpointFacts:
        """InvariantError for one that was released."""
        return self._checkpoints.facts(checkpoint)

    def release(self, checkpoint: CheckpointId) -> None:
        """Forget it in memory and on disk. InvariantError while it is leased."""
        self._checkpoints.release(checkpoint)

    def drop_device(self, checkpoint: CheckpointId) -> None:
        """Forget the device copy. InvariantError when it is leased or is nowhere else."""
        self._checkpoints.drop_device(checkpoint)

    def drop_host(self, checkpoint: CheckpointId) -> None:
        """Forget the host copy. InvariantError when it is leased or is nowhere else."""
        self._checkpoints.drop_host(checkpoint)

    def reclaimable(self, checkpoints: Collection[CheckpointId]) -> Amounts:
        """What would be free if all of these were released together, now."""
        return self._checkpoints.reclaimable(checkpoints)

    def free(self) -> Amounts:
        """Free pages, slots and host blocks; disk bytes below the bound."""
        disk = self._disk
        return Amounts(
            pages=self._pages.num_free,
            slots=self._states.num_free,
            host_blocks=self._host.num_free,
            disk_bytes=0 if disk is None else max(0, disk.max_bytes - disk.used_bytes),
        )

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        """Reserve the destination, lease the checkpoint and start the copies; see the contract.
        Needs a running event loop."""
        self._check_open()
        return self._transfers.begin(kind, checkpoint, note)

    def settle_transfer(self, transfer: Transfer) -> bool:
        """Publish the copy and end the lease; see the contract."""
        if not isinstance(transfer, CopyTransfer):
            raise InvariantError("the transfer is not one of this program")
        return self._transfers.settle(transfer)

    def disk_notes(self) -> Mapping[CheckpointId, Mapping[str, object]]:
        """The usable checkpoints that were found on disk at start, with their notes."""
        return self._checkpoints.disk_notes

    def occupancy(self) -> Occupancy:
        """Reserved pages and slots count as used; ROOT_SLOT is in no count."""
        return Occupancy(
            lanes_used=self._residents.num_lanes_used,
            pages_used=self._pages.num_used,
            pages_total=self._pages.num_pages,
            slots_used=self._states.num_used,
            slots_total=self._states.num_slots,
            host_blocks_used=self._host.num_used,
            host_blocks_total=self._host.num_blocks,
            disk_bytes_used=0 if self._disk is None else self._disk.used_bytes,
            num_checkpoints=len(self._checkpoints),
        )

    def check(self) -> None:
        """Verify all internal counts; InvariantError says which one is off."""
        residents, checkpoints, transfers = self._residents, self._checkpoints, self._transfers
        residents.check()
        checkpoints.check()
        transfers.check()
        self._pages.check()
        self._states.check([*residents.slots(), *checkpoints.slots(), *transfers.slots()])
        self._host.check([*checkpoints.blocks(), *transfers.blocks()])
        owners = {sequence.handle.lane for sequence in residents} | set(transfers.page_owners())
        owners |= {record for record in checkpoints if record.device is not None}
        if self._pages.owners != owners:
            raise InvariantError("pages are held by others than sequences and checkpoints")
        pending = {id(sequence) for sequence in residents if sequence.is_pending}
        members = set() if self._unit is None else {id(s) for s in self._unit.sequences}
        if pending != members:
            raise InvariantError("pending rows and the members of the pending unit differ")

    def close(self) -> None:
        """End every sequence, forget every checkpoint in memory and release the executor; files
        stay; idempotent. An open transfer is given up. InvariantError while a unit runs."""
        if self._unit is not None:
            if not self._unit.work.is_done():
                raise InvariantError("the program is closed while a unit runs")
            self._unit.work.forget()
            self._settle(self._unit)
        self._transfers.close()
        for sequence in self._residents:
            self._residents.release(sequence)
        self._checkpoints.clear()
        self._is_closed = True
        if self._disk is not None:
            self._disk.close()
        self._executor.close()

    def _open(self, spec: SequenceSpec, source: Source | None, limit: int) -> SequenceRecord:
        """A new resident from a source of at most `limit` tokens."""
        self._check_open()
        if source is None:
            return self._residents.open(spec)
        record = self._checkpoints.get(source.checkpoint)
        if record.device is None:
            raise InvariantError(f"{record} is a source, but not on the device")
        least = record.frontier if self._has_states else 1
        if not least <= source.num_tokens <= min(record.frontier, limit):
            raise InvariantError(
                f"{spec.request_id}: {source.num_tokens} tokens of {record} at"
                f" {record.frontier}, at most {limit}"
            )
        if source.consumes and record.is_leased:
            raise InvariantError(f"{record} is leased and cannot be consumed")
        sequence = self._residents.open(spec, record.device, source.num_tokens)
        if source.consumes:
            self._checkpoints.release(source.checkpoint)
        return sequence

    def _freeze(self, sequence: SequenceRecord) -> CheckpointId:
        copy = self._residents.device_copy(sequence)
        return self._checkpoints.add(sequence.frontier, copy.pages, copy.slot).checkpoint_id

    def _launchable_sequence(self, handle: SequenceHandle, num_tokens: int) -> SequenceRecord:
        """A sequence with all the next `num_tokens` inputs need reserved."""
        self._check_open()
        if self._unit is not None:
            raise InvariantError("another unit is pending")
        sequence = self._residents.extensible(handle, num_tokens)
        if not self._residents.is_reserved(sequence, num_tokens):
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

    def _launchable_decode(
        self, handle: SequenceHandle, draft: Draft, num_proposed: int
    ) -> SequenceRecord:
        num_drafted = len(draft.token_ids)
        sequence = self._launchable_sequence(handle, 1 + num_drafted)
        if sequence.num_prompt_left > 0 or not sequence.accepted:
            raise InvariantError(f"{sequence.spec.request_id}: there is no token to decode from")
        limit = 0 if sequence.num_replay_left > 0 else self._capacity.max_draft_tokens
        if num_drafted > limit:
            raise InvariantError(
                f"{sequence.spec.request_id}: a draft of {num_drafted} tokens, at most {limit}"
            )
        limit = limit if self._capacity.has_draft_model else 0
        if not 0 <= num_proposed <= limit:
            raise InvariantError(
                f"{sequence.spec.request_id}: {num_proposed} proposed tokens, at most {limit}"
            )
        return sequence

    def _decode_row(
        self, sequence: SequenceRecord, draft: Draft, num_proposed: int, *, goes_on: bool
    ) -> UnitRow:
        num_inputs = 1 + len(draft.token_ids)
        num_pages = self._residents.pages_to_show(
            sequence, num_inputs, num_proposed, goes_on=goes_on
        )
        return sequence.decode_row(num_pages, draft, num_proposed)

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
        if kind is not UnitKind.DECODE:
            return (await self._executor.prefill(rows[0]),)
        if self._capacity.has_draft_model or any(row.checks for row in rows):
            return await self._executor.verify(rows)
        return await self._executor.decode(rows, goes_on=goes_on)

    def _start(
        self,
        work: Coroutine[Any, Any, T],
        sequences: tuple[SequenceRecord, ...],
        rows: tuple[UnitRow, ...],
        batch: PendingBatch | None = None,
        *,
        goes_on: bool = False,
    ) -> Unit[T]:
        unit = Unit(sequences, rows, UnitWork(work), batch, goes_on)
        for sequence, row in zip(sequences, rows, strict=True):
            self._residents.launch(sequence, row)
        self._unit = unit
        return unit

    def _unit_of(self, batch: PendingBatch) -> Unit[Any]:
        if batch.is_settled:
            raise InvariantError("the batch was settled before")
        if self._unit is None or self._unit.batch is not batch:
            raise InvariantError("the batch is not the pending unit")
        return self._unit

    def _settle(self, unit: Unit[Any]) -> None:
        self._rewound = None
        for sequence in unit.sequences:
            self._residents.settle(sequence)
        if unit.batch is not None:
            unit.batch.is_settled = True
        self._unit = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvariantError("the program is closed")


def _one_each(what: str, items: Sequence[T], default: T, num_rows: int) -> Sequence[T]:
    items = items or (default,) * num_rows
    if len(items) != num_rows:
        raise InvariantError(f"{len(items)} {what} for {num_rows} rows")
    return items


def _check_capacity(capacity: Capacity, executor: Executor) -> None:
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
    if not 0 <= capacity.max_draft_tokens <= executor.max_draft_tokens:
        raise InvariantError(
            f"drafts of {capacity.max_draft_tokens} tokens, the {executor.name} executor verifies"
            f" {executor.max_draft_tokens}"
        )
    if capacity.has_draft_model != executor.has_draft_model:
        raise InvariantError(f"the {executor.name} executor's draft model is not as planned")
    if executor.host_blocks.shape != (capacity.num_host_blocks, executor.page_bytes):
        raise InvariantError(f"host blocks {executor.host_blocks.shape} are not as planned")


def _checked_outputs(batch: PendingBatch, accepted: Sequence[int]) -> tuple[RowOutput, ...]:
    """Of a completed batch. InvariantError for one that is none, and for counts out of range."""
    if batch.outputs is None:
        raise InvariantError("a unit is committed before it was completed")
    check_accepted(batch.outputs, accepted)
    return batch.outputs


def _is_partly_taken(output: RowOutput, count: int) -> bool:
    return 0 < count < len(output.tokens)
