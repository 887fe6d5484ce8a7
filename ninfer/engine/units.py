"""UnitLauncher: the next unit, with the rows that get their permits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ninfer.contract.program import PendingBatch, Program
from ninfer.engine.pacing import PrefillPace
from ninfer.engine.pressure import Pressure
from ninfer.engine.request_record import Phase, RequestRecord
from ninfer.engine.scheduler import DecodeUnit, PrefillUnit, ReplayUnit, Scheduler, UnitPlan
from ninfer.engine.speculation.speculation import NO_ROUNDS, RoundPlan, Speculation


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedUnit:
    """A launched unit and the requests of its rows, in row order.

    is_sampled   which rows are to produce a token: not inner prefill chunks and not replay
    rounds       drafts and proposals of a decode batch; None without speculative decoding
    """

    batch: PendingBatch
    records: tuple[RequestRecord, ...]
    is_sampled: tuple[bool, ...]
    launched_s: float
    rounds: RoundPlan | None = None


class UnitLauncher:
    def __init__(
        self,
        program: Program,
        scheduler: Scheduler,
        pressure: Pressure,
        pace: PrefillPace,
        records: Mapping[int, RequestRecord],
        speculation: Speculation | None,
    ) -> None:
        self._speculation = speculation
        self._program = program
        self._scheduler = scheduler
        self._pressure = pressure
        self._pace = pace
        self._records = records

    def launch_next(self, now: float) -> LaunchedUnit | None:
        """Launch the preferred unit that gets its memory; None when no row does."""
        unit = self._launch_any(now)
        if unit is None and self._scheduler.num_running:
            # Nobody may wait for an event that has already been: all ask again.
            self._pressure.forget_refusals()
            unit = self._launch_any(now)
        if unit is None and self._scheduler.residents() and self._pressure.clear_cache():
            self._pressure.forget_refusals()
            unit = self._launch_any(now)
        return unit

    def _launch_any(self, now: float) -> LaunchedUnit | None:
        for plan in self._scheduler.candidates(self._pace.chunk_limit()):
            unit = self._try_launch(plan, now)
            if unit is not None:
                self._scheduler.note_launched(plan)
                return unit
        return None

    def _try_launch(self, plan: UnitPlan, now: float) -> LaunchedUnit | None:
        match plan:
            case PrefillUnit():
                return self._try_prefill(plan, now)
            case DecodeUnit():
                return self._try_decode(plan, now)
            case ReplayUnit():
                return self._try_replay(plan, now)

    def _try_prefill(self, plan: PrefillUnit, now: float) -> LaunchedUnit | None:
        record = self._records[plan.ticket]
        if not record.is_resident or not self._pressure.permit(record, plan.num_tokens):
            return None
        batch = self._program.launch_prefill(record.resident, plan.num_tokens)
        is_sampled = plan.is_last and not record.accepted
        return LaunchedUnit(batch, (record,), (is_sampled,), now)

    def _try_replay(self, plan: ReplayUnit, now: float) -> LaunchedUnit | None:
        record = self._records[plan.ticket]
        if not record.is_resident or not self._pressure.permit(record, plan.num_tokens):
            return None
        batch = self._program.launch_replay(record.resident, plan.num_tokens)
        return LaunchedUnit(batch, (record,), (False,), now)

    def _is_sampled(self, record: RequestRecord) -> bool:
        """Whether its next decode step draws a token: not in a replay, and not behind forced
        tokens that are not all fed yet."""
        if record.phase is Phase.REPLAY:
            return False
        if record.request.mask is None:
            return True
        return self._program.num_replay_left(record.resident) == 0

    def _try_decode(self, plan: DecodeUnit, now: float) -> LaunchedUnit | None:
        # Permits go by age, and pressure pauses only rows that come later.
        records = tuple(
            record
            for record in map(self._records.__getitem__, plan.tickets)
            if record.is_resident and self._pressure.permit(record, 1)
        )
        if not records:
            return None
        handles = [record.resident for record in records]
        is_sampled = tuple(map(self._is_sampled, records))
        rounds = self._speculation.plan(records, is_sampled) if self._speculation else None
        asked = rounds or NO_ROUNDS
        goes_on = (
            not asked.drafts
            and not self._program.capacity.has_draft_model
            and not self._scheduler.has_prompts
            and all(map(_may_go_on, records))
        )
        batch = self._program.launch_decode(
            handles, drafts=asked.drafts, num_proposed=asked.num_proposed, goes_on=goes_on
        )
        return LaunchedUnit(batch, records, is_sampled, now, rounds)


def _may_go_on(record: RequestRecord) -> bool:
    """The budget allows a token behind the next one."""
    return record.budget.num_tokens - record.completion_tokens > 1
