"""Residency: opens, pauses, resumes and closes sequences, and keeps the Snapshots of the paused.

It is the one place where a request's phase, its sequence in the Program, its lane in the Scheduler
and what the context cache knows of it change together. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ninfer.contract.cache import CacheMode, CheckpointId
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import PausedSequence, Program, SequenceSpec, Source, TransferKind
from ninfer.engine.context_protocol import ContextPolicy, SourceChoice, TransferPlan
from ninfer.engine.forcing import plan_inputs
from ninfer.engine.metrics import EngineMetrics
from ninfer.engine.no_cache import NoCache
from ninfer.engine.request_record import Phase, RequestRecord
from ninfer.engine.scheduler import Scheduler
from ninfer.engine.transfer_desk import Ended, TransferDesk


class Residency:
    def __init__(
        self,
        program: Program,
        scheduler: Scheduler,
        policy: ContextPolicy,
        desk: TransferDesk,
        metrics: EngineMetrics,
    ) -> None:
        self._program = program
        self._scheduler = scheduler
        self._policy = policy
        self._no_cache = NoCache()
        self._desk = desk
        self._metrics = metrics
        self._has_host_tier = program.capacity.num_host_blocks > 0
        self._snapshots: dict[CheckpointId, RequestRecord] = {}

    def policy_of(self, record: RequestRecord) -> ContextPolicy:
        """The context cache as this request sees it."""
        is_off = record.request.cache.mode is CacheMode.OFF
        return self._no_cache if is_off else self._policy

    def reclaimable_pages(self) -> int:
        """Pages of optional checkpoints."""
        return self._policy.reclaimable().pages

    def note_moved(self, ended: Ended) -> None:
        """A transfer ended well: tell the context cache the pace of copies."""
        is_move = ended.transfer.kind in (TransferKind.DEMOTE, TransferKind.RESTORE)
        if is_move and ended.seconds > 0.0:
            self._policy.note_rates(move_tokens_s=ended.num_tokens / ended.seconds)

    def open(self, record: RequestRecord, choice: SourceChoice) -> None:
        """Start a newcomer that has a lane from `choice`."""
        spec = _spec_of(record)
        record.sequence = self._program.open_sequence(spec, choice.source)
        record.cache_use = choice.use
        record.num_prefilled = choice.use.num_tokens
        self._metrics.cached_tokens_total += choice.use.num_tokens
        record.move(Phase.PREFILL)
        self._bind(record, choice)

    def resume(self, record: RequestRecord, choice: SourceChoice) -> None:
        """Start a paused request that has a lane again, without its Snapshot."""
        if record.ledger.checkpoint is not None:
            raise InvariantError(f"request {record.request_id} has a Snapshot to start from")
        self._resume(record, choice.source)
        self._bind(record, choice)

    def resume_snapshot(self, record: RequestRecord) -> None:
        """Start a paused request that has a lane again from its Snapshot, which it takes over."""
        snapshot = _snapshot_of(record.ledger)
        self._resume(record, Source(snapshot, record.ledger.frontier, consumes=True))
        del self._snapshots[snapshot]
        self._bind(record, None)

    def pause(self, record: RequestRecord) -> None:
        """End residence. There is a Snapshot when there is a host tier it could go to."""
        paused = self._program.pause(record.resident, keeps_state=self._has_host_tier)
        record.sequence, record.paused = None, paused
        record.old_frontier = max(record.old_frontier, paused.frontier)
        if paused.checkpoint is not None:
            self._snapshots[paused.checkpoint] = record
        record.move(Phase.PAUSED)
        self._scheduler.pause(record.ticket)
        self._metrics.num_pauses += 1

    def close(self, record: RequestRecord) -> None:
        """The request is over: give back whatever it owns."""
        if record.sequence is not None:
            self._program.close_sequence(record.sequence)
            record.sequence = None
        if record.paused is not None:
            self._release_snapshot(record)
            record.paused = None
        self._scheduler.remove(record.ticket)
        self.policy_of(record).left(record.ticket)

    def snapshots_on_device(self) -> list[RequestRecord]:
        """Paused requests whose Snapshot takes device memory and is not on its way, youngest
        first."""
        records = []
        for snapshot, record in self._snapshots.items():
            facts = self._program.checkpoint(snapshot)
            if facts.is_on_device and not facts.is_leased and record.phase is Phase.PAUSED:
                records.append(record)
        return sorted(records, key=lambda record: record.ticket, reverse=True)

    def demote(self, record: RequestRecord) -> bool:
        """Begin to move a Snapshot to the host; False when the host has no room for it."""
        snapshot = _snapshot_of(record.ledger)
        if self._program.checkpoint(snapshot).is_on_host:
            self._program.drop_device(snapshot)
            self._scheduler.note_event()
            return True

        def on_end(ended: Ended) -> None:
            if self._forget_orphan(snapshot):
                return
            if not ended.is_ok:
                self.lose_snapshot(record)
                return
            self.note_moved(ended)
            self._program.drop_device(snapshot)

        return self._desk.begin(TransferPlan(TransferKind.DEMOTE, snapshot), on_end)

    def restore(self, record: RequestRecord, on_end: Callable[[RequestRecord], None]) -> bool:
        """Begin to bring a Snapshot back to the device; False when there is no room for it.
        `on_end` is called when the request is still there, with or without a Snapshot then."""
        snapshot = _snapshot_of(record.ledger)

        def ended(end: Ended) -> None:
            if self._forget_orphan(snapshot):
                return
            if end.is_ok:
                self.note_moved(end)
            else:
                self.lose_snapshot(record)
            on_end(record)

        return self._desk.begin(TransferPlan(TransferKind.RESTORE, snapshot), ended)

    def lose_snapshot(self, record: RequestRecord) -> None:
        """Give up a Snapshot that no transfer names: the request will replay."""
        self._release_snapshot(record)
        record.paused = replace(record.ledger, checkpoint=None)
        self._metrics.num_snapshots_lost += 1
        self._scheduler.note_event()

    def _resume(self, record: RequestRecord, source: Source | None) -> None:
        record.sequence = self._program.resume(record.ledger, source)
        record.paused = None
        is_replay = self._program.num_replay_left(record.sequence) > 0
        self._metrics.num_resumes += 1
        if is_replay:
            self._metrics.num_replays += 1
            record.move(Phase.REPLAY)
        else:
            record.move(Phase.DECODE_READY if record.accepted else Phase.PREFILL)

    def _bind(self, record: RequestRecord, choice: SourceChoice | None) -> None:
        """`choice` is what the context cache is told of; None: nothing."""
        policy = self.policy_of(record)
        if choice is not None:
            policy.bound(record.ticket, choice)
        captures = policy.stops(record.ticket)
        frontiers = (frontier.num_tokens for frontier in record.request.prompt.frontiers)
        record.captures = frozenset(captures)
        stops = tuple(sorted({*captures, *frontiers}))
        frontier = self._program.frontier(record.resident)
        self._scheduler.bind(record.ticket, frontier, stops)
        if frontier >= record.request.prompt.num_tokens:
            plan_inputs(record, self._program, self._scheduler)

    def _release_snapshot(self, record: RequestRecord) -> None:
        """A leased one is released when its transfer ends."""
        snapshot = record.ledger.checkpoint
        if snapshot is not None and not self._program.checkpoint(snapshot).is_leased:
            del self._snapshots[snapshot]
            self._program.release(snapshot)

    def _forget_orphan(self, snapshot: CheckpointId) -> bool:
        """True when the request that owned it has ended during the transfer."""
        if self._snapshots[snapshot].phase is not Phase.DONE:
            return False
        del self._snapshots[snapshot]
        self._program.release(snapshot)
        return True


def _spec_of(record: RequestRecord) -> SequenceSpec:
    request = record.request
    return SequenceSpec(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=request.sampling,
        min_tokens=request.min_tokens,
        suppressed_ids=request.suppressed_ids,
        scoring=request.scoring,
        mask=request.mask,
    )


def _snapshot_of(paused: PausedSequence) -> CheckpointId:
    if paused.checkpoint is None:
        raise InvariantError(f"request {paused.spec.request_id} has no Snapshot")
    return paused.checkpoint
