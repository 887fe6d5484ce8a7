"""Admission: who gets a lane, from where they start, and the transfers that come first.

    resume the oldest paused request -> admit from the queue -> begin the transfers that are wanted

Requests with one and the same prompt (several answers to one question) share its prefill: the later
ones wait for the checkpoints that the first leaves on its way.

A scan runs when something changed that could let somebody in (`Scheduler.revision`). What "fits"
is an estimate that keeps requests from being paused as soon as they run; whether a unit gets its
memory is decided by permits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ninfer.contract.cache import CacheMode, CacheUse, MissReason
from ninfer.contract.program import Amounts, Program, TransferKind
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context_protocol import SourceChoice, TransferPlan
from ninfer.engine.pressure import Pressure, Relief
from ninfer.engine.request_record import Phase, RequestRecord
from ninfer.engine.residency import Residency
from ninfer.engine.scheduler import Scheduler
from ninfer.engine.transfer_desk import Ended, TransferDesk

GROWTH_PAGES: Final = 1
"""Pages beyond its prompt and output so far that everyone with a lane should find free."""
MAX_MOVES: Final = 4
"""Transfers before one start; after them a request starts from the empty state."""


@dataclass(slots=True, eq=False)
class _Wanted:
    """A request with a lane that waits for a transfer: of its own Snapshot, or of what the context
    cache will choose when the transfer slot is free."""

    record: RequestRecord
    is_snapshot: bool = False
    num_moves: int = 0
    is_open: bool = False


class Admission:
    """`on_started` is told of every newcomer once its sequence is open."""

    def __init__(
        self,
        program: Program,
        scheduler: Scheduler,
        desk: TransferDesk,
        residency: Residency,
        pressure: Pressure,
        records: Mapping[int, RequestRecord],
        on_started: Callable[[RequestRecord], None],
    ) -> None:
        self._program = program
        self._scheduler = scheduler
        self._desk = desk
        self._residency = residency
        self._pressure = pressure
        self._records = records
        self._on_started = on_started
        self._wanted: dict[int, _Wanted] = {}
        self._scanned = -1

    @property
    def is_due(self) -> bool:
        """Something has changed since the last scan."""
        return self._scheduler.revision != self._scanned

    def scan(self, now: float) -> None:
        """Give lanes to whom they are due; without effect when nothing has changed."""
        if self.is_due:
            self._scanned = self._scheduler.revision
            self._resume_oldest()
            self._admit(now)
        self._begin_transfers()

    def awaits_sibling(self, record: RequestRecord) -> bool:
        """An older request with the same prompt is on its way to a checkpoint that this one can
        start from."""
        request = record.request
        if request.cache.mode is CacheMode.OFF or request.scoring is not None:
            return False
        return any(
            other.request.prompt is request.prompt
            and other.ticket < record.ticket
            and other.request.cache == request.cache
            and self._is_before_capture(other)
            for other in self._records.values()
        )

    def forget(self, ticket: int) -> None:
        """The request is over."""
        self._wanted.pop(ticket, None)

    def _resume_oldest(self) -> None:
        ticket = self._scheduler.oldest_paused
        if ticket is None:
            return
        record = self._records[ticket]
        snapshot = record.ledger.checkpoint
        if snapshot is not None and self._program.checkpoint(snapshot).is_leased:
            return
        is_due = self._scheduler.protectable() == ticket
        if not is_due and not (self._scheduler.has_free_lane and self._fits_again(record)):
            return
        while not self._scheduler.has_free_lane:
            if not self._pressure.pause_victim(ticket):
                return
        if is_due:
            self._scheduler.protect(ticket)
        self._scheduler.take_lane(ticket)
        self._start_paused(record)

    def _start_paused(self, record: RequestRecord) -> None:
        snapshot = record.ledger.checkpoint
        if snapshot is None:
            self._start(record, self._choose(record), num_moves=0)
            return
        facts = self._program.checkpoint(snapshot)
        if facts.is_on_device:
            self._residency.resume_snapshot(record)
        elif facts.is_on_host:
            record.move(Phase.MATERIALIZING)
            self._wanted[record.ticket] = _Wanted(record, is_snapshot=True)
        else:
            self._residency.lose_snapshot(record)
            self._start(record, self._choose(record), num_moves=0)

    def _admit(self, now: float) -> None:
        for ticket in self._scheduler.admissible(self._holds_back):
            record = self._records[ticket]
            choice = self._choose(record)
            is_alone = self._scheduler.num_running + self._scheduler.num_paused == 0
            if not is_alone and not self._fits(self._pages_to_start(record, choice)):
                self._residency.policy_of(record).unpin(ticket)
                continue
            self._scheduler.take_lane(ticket)
            record.admitted_s = now
            self._start(record, choice, num_moves=0)

    def _holds_back(self, ticket: int) -> bool:
        return self.awaits_sibling(self._records[ticket])

    def _is_before_capture(self, record: RequestRecord) -> bool:
        if record.phase is Phase.MATERIALIZING:
            return True
        if record.phase is not Phase.PREFILL:
            return False
        return self._program.frontier(record.resident) < max(record.captures, default=0)

    def _choose(self, record: RequestRecord) -> SourceChoice:
        """The context cache's choice, as far as the request can use it."""
        choice = self._residency.policy_of(record).choose(record.ticket)
        paused = record.paused
        is_beyond = (
            paused is not None
            and choice.source is not None
            and choice.source.num_tokens > paused.frontier
        )
        return self._from_root(record) if is_beyond else choice

    def _from_root(self, record: RequestRecord) -> SourceChoice:
        self._residency.policy_of(record).unpin(record.ticket)
        return SourceChoice(None, CacheUse(miss=MissReason.NOT_RESTORED))

    def _start(self, record: RequestRecord, choice: SourceChoice, num_moves: int) -> None:
        """Bind a request that has a lane, or want the transfer that must come first."""
        if choice.move is not None and num_moves < MAX_MOVES:
            if record.phase is not Phase.MATERIALIZING:
                record.move(Phase.MATERIALIZING)
            self._wanted[record.ticket] = _Wanted(record, num_moves=num_moves)
            return
        if choice.move is not None:
            choice = self._from_root(record)
        if record.paused is not None:
            self._residency.resume(record, choice)
        else:
            self._residency.open(record, choice)
            self._on_started(record)

    def _begin_transfers(self) -> None:
        """The oldest wanted one, as long as those before it turn out not to be possible."""
        while self._desk.is_free:
            waiting = [wanted for wanted in self._wanted.values() if not wanted.is_open]
            if not waiting:
                return
            wanted = min(waiting, key=self._priority)
            if not wanted.is_snapshot:
                self._begin(wanted)
            elif not self._begin_snapshot(wanted):
                return

    def _priority(self, wanted: _Wanted) -> tuple[bool, int]:
        ticket = wanted.record.ticket
        return ticket != self._scheduler.protected, ticket

    def _begin(self, wanted: _Wanted) -> None:
        """Begin the transfer that the context cache asks for now, or go on without."""
        record = wanted.record
        policy, choice = self._residency.policy_of(record), self._choose(record)
        plan = choice.move
        if plan is None:
            del self._wanted[record.ticket]
            self._start(record, choice, wanted.num_moves)
            return

        def on_end(ended: Ended) -> None:
            if ended.is_ok:
                self._residency.note_moved(ended)
            policy.transferred(plan, ended.transfer, is_ok=ended.is_ok)
            if self._wanted.get(record.ticket) is wanted:
                self._continue(wanted)

        wanted.is_open = True
        while not self._desk.begin(plan, on_end):
            need = self._room_for(plan)
            if need is None or not policy.relieve(need):
                policy.transferred(plan, None, is_ok=False)
                self._continue(wanted)
                return

    def _continue(self, wanted: _Wanted) -> None:
        """The transfer has ended, or could not begin: choose again."""
        del self._wanted[wanted.record.ticket]
        self._start(wanted.record, self._choose(wanted.record), wanted.num_moves + 1)

    def _begin_snapshot(self, wanted: _Wanted) -> bool:
        """Begin to restore a Snapshot; False when its time has not come."""
        record = wanted.record
        ticket, is_protected = record.ticket, record.ticket == self._scheduler.protected
        policy = self._residency.policy_of(record)
        while not self._residency.restore(record, self._restored):
            need = self._room_for_frontier(record.ledger.frontier)
            if not is_protected:
                if policy.relieve(need):
                    continue
                self._pause_again(record)
                return True
            relief = self._pressure.relieve(ticket, need)
            if relief is Relief.COMING:
                return False
            if relief is Relief.NONE:
                del self._wanted[ticket]
                self._residency.lose_snapshot(record)
                self._start(record, self._choose(record), num_moves=0)
                return True
        wanted.is_open = True
        return True

    def _restored(self, record: RequestRecord) -> None:
        del self._wanted[record.ticket]
        if record.ledger.checkpoint is None:
            self._start(record, self._choose(record), num_moves=0)
        else:
            self._residency.resume_snapshot(record)

    def _pause_again(self, record: RequestRecord) -> None:
        del self._wanted[record.ticket]
        record.move(Phase.PAUSED)
        self._scheduler.give_back(record.ticket)
        if self._scheduler.num_running == 0:
            self._scheduler.note_event()

    def _room_for(self, plan: TransferPlan) -> Amounts | None:
        """What a restore lacks on the device. None for a fetch: the context cache made room on the
        host when it chose."""
        if plan.kind is not TransferKind.RESTORE:
            return None
        return self._room_for_frontier(self._program.checkpoint(plan.checkpoint).frontier)

    def _room_for_frontier(self, frontier: int) -> Amounts:
        """What a restore of so many tokens lacks, which failed for want of it."""
        pages = self._program.pages_needed(frontier) - self._program.free().pages
        return Amounts(pages=pages) if pages > 0 else Amounts(slots=1)

    def _fits_again(self, record: RequestRecord) -> bool:
        paused = record.ledger
        pages = self._target_pages(record, paused.frontier)
        snapshot = paused.checkpoint
        if snapshot is not None and self._program.checkpoint(snapshot).is_on_device:
            pages -= self._program.pages_needed(paused.frontier)
        return self._fits(pages)

    def _fits(self, num_pages: int) -> bool:
        """Whether so many pages could be taken without bringing those with lanes into need."""
        needed = num_pages + sum(
            self._pages_to_grow(self._records[ticket]) for ticket in self._scheduler.residents()
        )
        needed += sum(self._target_pages(wanted.record, 0) for wanted in self._wanted.values())
        free = self._program.free().pages
        return needed <= free or needed <= free + self._residency.reclaimable_pages()

    def _pages_to_start(self, record: RequestRecord, choice: SourceChoice) -> int:
        shared = 0 if choice.source is None else choice.source.num_tokens // PAGE_TOKENS
        return self._target_pages(record, 0) - shared

    def _pages_to_grow(self, record: RequestRecord) -> int:
        """Beyond those it has: the copy of a page that it shares, too."""
        frontier = self._program.frontier(record.resident)
        growth = self._target_pages(record, frontier) - self._program.pages_needed(frontier)
        return growth + self._program.needs_copy(record.resident)

    def _target_pages(self, record: RequestRecord, frontier: int) -> int:
        """Pages a request should find room for: all it is known to need, and some to grow."""
        num_tokens = max(frontier, record.request.prompt.num_tokens + record.completion_tokens)
        pages = self._program.pages_needed(num_tokens) + GROWTH_PAGES
        return min(pages, record.budget.worst_case_pages)
