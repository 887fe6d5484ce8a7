"""WatchedProgram: a FaultyProgram that notes where each request stands and which ones come back."""

from __future__ import annotations

from collections.abc import Mapping

from ninfer.contract.cache import CheckpointId
from ninfer.contract.program import (
    PausedSequence,
    PendingBatch,
    Program,
    SequenceHandle,
    SequenceSpec,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.engine.request_record import Phase
from tests.helpers.faulty_program import FaultyProgram


class WatchedProgram(FaultyProgram):
    """log        "pause r2", "resume r2" in order
    sources    tokens that each resume began with
    num_forced_units   units that fed several tokens which nobody drew
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program, lambda name: None)
        self.log: list[str] = []
        self.sources: list[int] = []
        self.num_forced_units = 0
        self._residents: dict[SequenceHandle, SequenceSpec] = {}
        self._paused: dict[str, PausedSequence] = {}
        self._restored: CheckpointId | None = None

    def open_sequence(self, spec: SequenceSpec, source: Source | None = None) -> SequenceHandle:
        handle = super().open_sequence(spec, source)
        self._residents[handle] = spec
        return handle

    def close_sequence(self, handle: SequenceHandle) -> None:
        super().close_sequence(handle)
        del self._residents[handle]

    def launch_replay(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        self.num_forced_units += 1
        return super().launch_replay(handle, num_tokens)

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        paused = super().pause(handle, keeps_state=keeps_state)
        del self._residents[handle]
        self._paused[paused.spec.request_id] = paused
        self.log.append(f"pause {paused.spec.request_id}")
        return paused

    def resume(self, paused: PausedSequence, source: Source | None = None) -> SequenceHandle:
        handle = super().resume(paused, source)
        self._residents[handle] = paused.spec
        del self._paused[paused.spec.request_id]
        self.log.append(f"resume {paused.spec.request_id}")
        self.sources.append(0 if source is None else source.num_tokens)
        return handle

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        transfer = super().begin_transfer(kind, checkpoint, note)
        if transfer is not None and kind is TransferKind.RESTORE:
            self._restored = checkpoint
        return transfer

    def settle_transfer(self, transfer: Transfer) -> bool:
        self._restored = None
        return super().settle_transfer(transfer)

    @property
    def is_restoring(self) -> bool:
        """A checkpoint is on its way to the device."""
        return self._restored is not None

    def phase_of(self, request_id: str) -> Phase:
        """Where a request stands that has not ended. One whose first source comes up a tier counts
        as waiting."""
        paused = self._paused.get(request_id)
        if paused is not None:
            is_restored = self._restored is not None and self._restored == paused.checkpoint
            return Phase.MATERIALIZING if is_restored else Phase.PAUSED
        for handle, spec in self._residents.items():
            if spec.request_id == request_id:
                return self._resident_phase(handle, spec)
        return Phase.WAITING

    def _resident_phase(self, handle: SequenceHandle, spec: SequenceSpec) -> Phase:
        if self._program.num_replay_left(handle):
            return Phase.REPLAY
        is_prompt = self._program.frontier(handle) < spec.prompt.num_tokens
        return Phase.PREFILL if is_prompt else Phase.DECODE_READY
