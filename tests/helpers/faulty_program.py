"""FaultyProgram: a real Program between whose methods and the engine a test can step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ninfer.contract.arrays import Float32Array
from ninfer.contract.cache import CheckpointId
from ninfer.contract.drafting import DraftCosts
from ninfer.contract.program import (
    Amounts,
    CheckpointFacts,
    Draft,
    Occupancy,
    PausedSequence,
    PendingBatch,
    Program,
    SequenceHandle,
    SequenceSpec,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.contract.units import Capacity


class FaultyProgram:
    """Implements the contract's Program by asking `on_call(method name)` before every call.

    on_call   may raise; the wrapped Program is then not called (but `complete` has waited first,
              so that no unit is left running)
    denies    handles whose `reserve_units` is answered False
    """

    def __init__(self, program: Program, on_call: Callable[[str], None]) -> None:
        self._program = program
        self._on_call = on_call
        self.denies: Callable[[SequenceHandle], bool] = lambda handle: False

    @property
    def capacity(self) -> Capacity:
        return self._program.capacity

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    async def measure_drafts(self) -> DraftCosts:
        self._on_call("measure_drafts")
        return await self._program.measure_drafts()

    def open_sequence(self, spec: SequenceSpec, source: Source | None = None) -> SequenceHandle:
        self._on_call("open_sequence")
        return self._program.open_sequence(spec, source)

    def close_sequence(self, handle: SequenceHandle) -> None:
        self._on_call("close_sequence")
        self._program.close_sequence(handle)

    def frontier(self, handle: SequenceHandle) -> int:
        self._on_call("frontier")
        return self._program.frontier(handle)

    def pages_needed(self, num_tokens: int) -> int:
        return self._program.pages_needed(num_tokens)

    def reserve_units(self, handle: SequenceHandle, num_tokens: int) -> bool:
        self._on_call("reserve_units")
        return not self.denies(handle) and self._program.reserve_units(handle, num_tokens)

    def force(self, handle: SequenceHandle, token_ids: Sequence[int]) -> None:
        self._on_call("force")
        self._program.force(handle, token_ids)

    def launch_replay(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        self._on_call("launch_replay")
        return self._program.launch_replay(handle, num_tokens)

    def launch_prefill(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        self._on_call("launch_prefill")
        return self._program.launch_prefill(handle, num_tokens)

    def launch_decode(
        self,
        handles: Sequence[SequenceHandle],
        *,
        drafts: Sequence[Draft] = (),
        num_proposed: Sequence[int] = (),
        goes_on: bool = False,
    ) -> PendingBatch:
        self._on_call("launch_decode")
        return self._program.launch_decode(
            handles, drafts=drafts, num_proposed=num_proposed, goes_on=goes_on
        )

    async def complete(self, batch: PendingBatch) -> None:
        await self._program.complete(batch)
        self._on_call("complete")

    async def rewind(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        await self._program.rewind(batch, accepted)

    def commit(self, batch: PendingBatch, accepted: Sequence[int]) -> None:
        self._on_call("commit")
        self._program.commit(batch, accepted)

    def abort(self, batch: PendingBatch) -> None:
        self._on_call("abort")
        self._program.abort(batch)

    async def score(self, handle: SequenceHandle, num_tokens: int) -> Float32Array:
        self._on_call("score")
        return await self._program.score(handle, num_tokens)

    def num_replay_left(self, handle: SequenceHandle) -> int:
        self._on_call("num_replay_left")
        return self._program.num_replay_left(handle)

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        self._on_call("pause")
        return self._program.pause(handle, keeps_state=keeps_state)

    def resume(self, paused: PausedSequence, source: Source | None = None) -> SequenceHandle:
        self._on_call("resume")
        return self._program.resume(paused, source)

    def capture(self, handle: SequenceHandle) -> CheckpointId | None:
        self._on_call("capture")
        return self._program.capture(handle)

    def checkpoint(self, checkpoint: CheckpointId) -> CheckpointFacts:
        self._on_call("checkpoint")
        return self._program.checkpoint(checkpoint)

    def release(self, checkpoint: CheckpointId) -> None:
        self._on_call("release")
        self._program.release(checkpoint)

    def drop_device(self, checkpoint: CheckpointId) -> None:
        self._on_call("drop_device")
        self._program.drop_device(checkpoint)

    def drop_host(self, checkpoint: CheckpointId) -> None:
        self._on_call("drop_host")
        self._program.drop_host(checkpoint)

    def reclaimable(self, checkpoints: Collection[CheckpointId]) -> Amounts:
        return self._program.reclaimable(checkpoints)

    def free(self) -> Amounts:
        return self._program.free()

    def needs_copy(self, handle: SequenceHandle) -> bool:
        self._on_call("needs_copy")
        return self._program.needs_copy(handle)

    def missing(self, handle: SequenceHandle, num_tokens: int) -> Amounts:
        self._on_call("missing")
        return self._program.missing(handle, num_tokens)

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        self._on_call("begin_transfer")
        return self._program.begin_transfer(kind, checkpoint, note)

    def settle_transfer(self, transfer: Transfer) -> bool:
        self._on_call("settle_transfer")
        return self._program.settle_transfer(transfer)

    def disk_notes(self) -> Mapping[CheckpointId, Mapping[str, object]]:
        return self._program.disk_notes()

    def occupancy(self) -> Occupancy:
        return self._program.occupancy()

    def check(self) -> None:
        self._program.check()

    def close(self) -> None:
        self._program.close()
