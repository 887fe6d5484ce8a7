"""Worker: the one task that writes request records, the Scheduler and the Program.

    loop:  boundary   take in submissions; cancels, deadlines, queue timeouts; the open transfer
           lanes      resume, admit, begin transfers (admission.py)
           launch     permits and the next unit (units.py, pressure.py)
           show       preview and session.commit of rows that surely went on, while the device works
           publish    events of the unit before
           complete   wait for the unit
           settle     judge every row, preview of those that may end, Program.rewind where one takes
                      part of a round, Program.commit, accounting

A failure of a request's own output session ends that request. Any other failure ends the worker:
every request is answered with `engine_unavailable`, and `failure` says why.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Final

from ninfer.contract.drafting import DraftCosts
from ninfer.contract.errors import InvariantError, NInferError, Unavailable
from ninfer.contract.generation import Admitted, OutputPreview, Progress
from ninfer.contract.program import Program, UnitKind
from ninfer.contract.sampling import GeneratedToken, PromptScores
from ninfer.engine.admission import Admission
from ninfer.engine.background import Background
from ninfer.engine.context_protocol import ContextPolicy
from ninfer.engine.endings import Endings
from ninfer.engine.expiry import Expiry, ExpiryQueue
from ninfer.engine.forcing import accept_forced, adopt_forced, plan_inputs
from ninfer.engine.inbox import Inbox
from ninfer.engine.metrics import EngineMetrics
from ninfer.engine.outbox import Outbox
from ninfer.engine.pacing import PrefillPace
from ninfer.engine.pressure import Pressure
from ninfer.engine.request_record import Phase, RequestRecord
from ninfer.engine.residency import Residency
from ninfer.engine.retry_estimate import RetryEstimates
from ninfer.engine.scheduler import Scheduler
from ninfer.engine.settlement import RowVerdict, adopt, judge_row, preview_accepted
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.engine.speculation.speculation import Speculation
from ninfer.engine.transfer_desk import TransferDesk
from ninfer.engine.units import LaunchedUnit, UnitLauncher

_logger = logging.getLogger(__name__)

MAX_BARREN_CYCLES: Final = 64
"""Cycles in a row that changed who has a lane and ran nothing; more of them are a fault."""
_LEAST_WAIT_S: Final = 0.1
"""Before a request that waits for a sibling, not for a lane, is looked at again."""


class Worker:
    """Run `run` as a task, once. Others use `inbox` and read; nothing else here is theirs."""

    def __init__(
        self,
        program: Program,
        *,
        policy: ContextPolicy,
        queue_timeout_s: float,
        max_decode_gap_s: float | None,
        clock: Callable[[], float],
        metrics: EngineMetrics,
        make_drafter: MakeDrafter,
        draft_costs: DraftCosts,
    ) -> None:
        self.inbox = Inbox()
        self._program = program
        self._policy = policy
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._metrics = metrics
        self._records: dict[int, RequestRecord] = {}
        self.retries: Final = RetryEstimates(self._records, metrics, clock, self._longest_wait_s)
        self._expiries = ExpiryQueue()
        self._outbox = Outbox()
        self._pace = PrefillPace(max_decode_gap_s)
        scheduler = self._scheduler = Scheduler(program.capacity)
        desk = self._desk = TransferDesk(program, clock, self.inbox.wake)
        residency = self._residency = Residency(program, scheduler, policy, desk, metrics)
        pressure = self._pressure = Pressure(
            program, scheduler, policy, desk, residency, self._records
        )
        self._admission = Admission(
            program, scheduler, desk, residency, pressure, self._records, self._note_admitted
        )
        is_speculating = program.capacity.max_draft_tokens > 0
        speculation = self._speculation = (
            Speculation(program, make_drafter, draft_costs, metrics.drafts)
            if is_speculating
            else None
        )
        self._launcher = UnitLauncher(
            program, scheduler, pressure, self._pace, self._records, speculation
        )
        self._background = Background(scheduler, policy, desk, residency)
        self._endings = Endings(self._release, self._outbox, metrics, clock)
        self._unseen: list[tuple[RequestRecord, GeneratedToken]] = []
        self._failure: str | None = None
        self._has_ended = False
        self._last_unit_s = clock()

    @property
    def has_ended(self) -> bool:
        """No request will be answered any more; all there were have been."""
        return self._has_ended

    @property
    def failure(self) -> str | None:
        """Why the worker ended, unless it was asked to."""
        return self._failure

    @property
    def num_waiting(self) -> int:
        """Without a lane, paused ones among them."""
        if self._has_ended:
            return 0
        return self._scheduler.num_waiting + self._scheduler.num_paused + self.inbox.num_submitted

    @property
    def num_running(self) -> int:
        """With a lane."""
        return 0 if self._has_ended else self._scheduler.num_running

    @property
    def last_unit_s(self) -> float:
        """When a unit last finished."""
        return self._last_unit_s

    async def run(self) -> None:
        """Serve until the inbox says stop. However it ends, every request has been answered."""
        try:
            await self._serve()
        except CancelledError:
            self._failure = "the engine's task was cancelled"
            raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            _logger.exception("the engine has failed")
        finally:
            self._has_ended = True
            self._answer_all()

    async def _serve(self) -> None:
        num_barren = 0
        while True:
            started_s = time.thread_time()
            self._pass_boundary()
            unit = self._launcher.launch_next(self._clock())
            self._metrics.scheduling_s_total += time.thread_time() - started_s
            self._show_unseen(() if unit is None else unit.records)
            self._outbox.publish()
            if unit is not None:
                await self._program.complete(unit.batch)
                await self._settle(unit)
                num_barren = 0
            elif self.inbox.is_stopping:
                await self._background.finish()
                return
            elif self._admission.is_due and num_barren < MAX_BARREN_CYCLES:
                num_barren += 1
            else:
                self._check_not_stuck()
                await self.inbox.wait()

    def _pass_boundary(self) -> None:
        now = self._clock()
        newcomers = self._take_in()
        self._evict()
        for record in self.inbox.take_cancelled():
            if record.ticket in self._records:
                self._cut_off(record, None)
        self._expire(now)
        if self.inbox.take_flush():
            self._policy.flush()
            self._scheduler.note_event()
        if self._desk.settle():
            self._scheduler.note_event()
        self._admission.scan(now)
        self._background.begin_next(is_idle=not self._records)
        for record in newcomers:
            self._arm_queue_timeout(record)
        self._expiries.prune(len(self._records), self._records.__contains__)

    def _take_in(self) -> list[RequestRecord]:
        newcomers = self.inbox.take_submitted()
        # All are known before any is queued, so that none is lost should queueing fail.
        self._records.update((record.ticket, record) for record in newcomers)
        for record in newcomers:
            self._enqueue(record)
        return newcomers

    def _enqueue(self, record: RequestRecord) -> None:
        request = record.request
        self._scheduler.enqueue(record.ticket, num_prompt_tokens=request.prompt.num_tokens)
        self._residency.policy_of(record).arrive(record.ticket, request)
        if request.deadline_s is not None:
            self._expiries.add(request.deadline_s, record.ticket, Expiry.DEADLINE)

    def _evict(self) -> None:
        error = self.inbox.take_eviction()
        if error is not None:
            self._show_unseen(())
            for record in list(self._records.values()):
                self._endings.fail(record, error)

    def _expire(self, now: float) -> None:
        for ticket, kind in self._expiries.take_due(now):
            record = self._records.get(ticket)
            if record is None:
                continue
            if kind is Expiry.DEADLINE:
                self._cut_off(
                    record, Unavailable("deadline_exceeded", "the request's deadline has passed")
                )
            elif record.phase is Phase.WAITING and self._admission.awaits_sibling(record):
                # It could have a lane; its wait begins when that is over.
                again_s = max(self._longest_wait_s(record), _LEAST_WAIT_S)
                self._expiries.add(now + again_s, ticket, kind)
            elif record.phase is Phase.WAITING:
                self._endings.fail(record, self._queue_timeout(record))

    def _note_admitted(self, record: RequestRecord) -> None:
        admitted_s = record.submitted_s if record.admitted_s is None else record.admitted_s
        self._metrics.note_admitted(admitted_s - record.submitted_s)
        self._outbox.add(record, Admitted(record.usage()))

    def _arm_queue_timeout(self, record: RequestRecord) -> None:
        """For those the first admission left waiting: a free lane wins over a timeout of 0."""
        if record.phase is Phase.WAITING:
            due_s = record.submitted_s + self._longest_wait_s(record)
            self._expiries.add(due_s, record.ticket, Expiry.QUEUE_TIMEOUT)

    def _longest_wait_s(self, record: RequestRecord) -> float:
        wait_s = record.request.queue_timeout_s
        return self._queue_timeout_s if wait_s is None else wait_s

    def _queue_timeout(self, record: RequestRecord) -> Unavailable:
        return Unavailable(
            "request_queue_timeout",
            f"no lane became free within {self._longest_wait_s(record):g} s",
            self.retries.until_lane_s(record),
        )

    def _check_not_stuck(self) -> None:
        """Nothing runs. With requests there and no copy that would change it, waiting would never
        end: an accounting fault."""
        if self._records and self._desk.is_free:
            raise InvariantError(
                f"none of {len(self._records)} requests can get memory for its next unit"
            )

    async def _settle(self, unit: LaunchedUnit) -> None:
        now = self._last_unit_s = self._clock()
        outputs = unit.batch.outputs
        if outputs is None or len(outputs) != len(unit.records):
            raise InvariantError("a completed unit has not one output for each of its rows")
        verdicts = [
            judge_row(record, output, is_sampled=is_sampled)
            for record, output, is_sampled in zip(
                unit.records, outputs, unit.is_sampled, strict=True
            )
        ]
        num_accepted = [verdict.accepted for verdict in verdicts]
        await self._program.rewind(unit.batch, num_accepted)
        self._program.commit(unit.batch, num_accepted)
        self._metrics.histograms.unit_tokens.observe(sum(unit.batch.num_inputs))
        match unit.batch.kind:
            case UnitKind.PREFILL:
                self._note_prefilled(unit, now)
            case UnitKind.REPLAY:
                self._note_replayed(unit)
            case UnitKind.DECODE:
                self._note_decoded(unit)
        if self._speculation is not None and unit.rounds is not None:
            self._speculation.note(unit.records, unit.rounds, outputs, num_accepted)
        for record, output, verdict in zip(unit.records, outputs, verdicts, strict=True):
            if output.scores is not None:
                self._show_scores(record, output.scores)
            self._account(record, verdict, now)

    def _note_prefilled(self, unit: LaunchedUnit, now: float) -> None:
        """Tell how far the prompt is; a refused row stays where it was."""
        (record,), (num_inputs,) = unit.records, unit.batch.num_inputs
        frontier = self._program.frontier(record.resident)
        num_new = max(0, frontier - record.num_prefilled)
        record.num_prefilled += num_new
        self._metrics.num_prefill_units += 1
        self._metrics.prompt_tokens_total += num_new
        self._metrics.replayed_tokens_total += num_inputs - num_new
        self._pace.note(num_inputs, now - unit.launched_s)
        if self._pace.tokens_s is not None:
            self._policy.note_rates(prefill_tokens_s=self._pace.tokens_s)
        self._scheduler.note_prefilled(record.ticket, frontier)
        if record.phase is Phase.REPLAY and frontier == record.request.prompt.num_tokens:
            plan_inputs(record, self._program, self._scheduler)
        if frontier in record.captures:
            if record.ticket != self._scheduler.protected:
                policy = self._residency.policy_of(record)
                policy.reached(record.ticket, record.resident, frontier)
            # Its siblings may have waited for this.
            self._scheduler.note_event()

    def _note_replayed(self, unit: LaunchedUnit) -> None:
        (record,), (num_inputs,) = unit.records, unit.batch.num_inputs
        self._scheduler.note_replayed(record.ticket, num_inputs)
        if record.phase is Phase.REPLAY:
            self._metrics.replayed_tokens_total += num_inputs

    def _note_decoded(self, unit: LaunchedUnit) -> None:
        self._metrics.num_decode_units += 1
        self._metrics.decode_rows_total += len(unit.records)
        self._metrics.replayed_tokens_total += unit.is_sampled.count(False)

    def _account(self, record: RequestRecord, verdict: RowVerdict, now: float) -> None:
        if verdict.error is not None:
            self._endings.fail(record, verdict.error)
        elif verdict.finish is not None:
            self._endings.finish(record, verdict.finish)
        elif verdict.token is not None:
            self._count_token(record, verdict, now)
            self._note_progress(record)
            self._unseen.append((record, verdict.token))
        elif verdict.preview is not None:
            self._count_token(record, verdict, now)
            self._adopt_now(record, verdict.preview)
        else:
            self._note_progress(record)

    def _count_token(self, record: RequestRecord, verdict: RowVerdict, now: float) -> None:
        if record.first_token_s is None:
            record.first_token_s = now
            self._metrics.note_first_token(now - record.submitted_s)
        elif record.last_token_s is not None:
            gap_s = (now - record.last_token_s) / verdict.accepted
            for _ in range(verdict.accepted):
                self._metrics.histograms.token_gap.observe(gap_s)
        record.last_token_s = now
        record.accepted.extend(verdict.token_ids)
        self._metrics.note_output(verdict.accepted, now)

    def _show_unseen(self, running: Sequence[RequestRecord]) -> None:
        """Tell the sessions of the tokens that were accepted without them. A request whose session
        fails ends, one of those with a unit `running` when that has run."""
        unseen, self._unseen = self._unseen, []
        for record, token in unseen:
            try:
                preview = preview_accepted(record, token)
                adopt(record, preview)
            except NInferError as error:
                if record in running:
                    record.failure = error
                else:
                    self._endings.fail(record, error)
            else:
                self._show(record, preview)

    def _adopt_now(self, record: RequestRecord, preview: OutputPreview) -> None:
        """Tell the session between units."""
        try:
            adopt(record, preview)
        except NInferError as error:
            self._endings.fail(record, error)
            return
        if preview.finish is None:
            self._note_progress(record)
            self._show(record, preview)
            self._force(record)
        else:
            self._offer(record)
            self._endings.finish(record, preview.finish, preview.deltas)

    def _force(self, record: RequestRecord) -> None:
        """Accept at once what must come next."""
        try:
            forced = adopt_forced(record)
        except NInferError as error:
            self._endings.fail(record, error)
            return
        if forced is not None:
            accept_forced(record, forced, self._program, self._scheduler)
            self._metrics.note_output(len(forced.token_ids), self._clock())
            self._show(record, forced.preview)

    def _show(self, record: RequestRecord, preview: OutputPreview) -> None:
        if preview.deltas:
            self._outbox.add(record, Progress(preview.deltas, record.usage()))

    def _show_scores(self, record: RequestRecord, scores: PromptScores) -> None:
        """Those that were told before a pause come again."""
        news = scores.since(record.num_scored)
        if news.logprobs.size:
            record.num_scored = news.stop
            self._outbox.add(record, Progress((), record.usage(), (news,)))

    def _note_progress(self, record: RequestRecord) -> None:
        """A unit of a row that goes on is committed."""
        handle, is_going = record.resident, bool(record.accepted)
        if record.phase is Phase.REPLAY:
            is_going = self._program.num_replay_left(handle) == 0
        if is_going and record.phase is not Phase.DECODE_READY:
            record.move(Phase.DECODE_READY)
        is_protected = record.ticket == self._scheduler.protected
        if is_protected and self._program.frontier(handle) > record.old_frontier:
            self._scheduler.end_protection(record.ticket)

    def _cut_off(self, record: RequestRecord, error: NInferError | None) -> None:
        """End from outside, with everything shown that was accepted. It may have ended by that."""
        self._show_unseen(())
        if record.ticket in self._records:
            self._endings.cut_off(record, error)

    def _offer(self, record: RequestRecord) -> None:
        """The context cache may keep what a request that ended well leaves behind."""
        policy, handle = self._residency.policy_of(record), record.resident
        frontier = self._program.frontier(handle)
        if policy.finished(record.ticket, handle, tuple(record.accepted), frontier):
            record.sequence = None

    def _release(self, record: RequestRecord) -> None:
        self._residency.close(record)
        self._admission.forget(record.ticket)
        self._pressure.forget(record.ticket)
        del self._records[record.ticket]

    def _answer_all(self) -> None:
        """The worker has ended: answer whoever has no answer yet. The Program is left alone."""
        for record in (*self._records.values(), *self.inbox.take_submitted()):
            self._endings.answer_stopped(record)
        self._records.clear()
        self._outbox.publish()
