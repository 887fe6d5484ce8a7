"""Worker: the one task that writes request records, the Scheduler and the Program.

    loop:  boundary   take in submissions; cancels, deadlines and queue timeouts; admit
           launch     reserve and start the next unit: a decode batch or a prefill chunk
           show       preview and session.commit of rows that surely went on, while the device works
           publish    events of the unit before
           complete   wait for the unit
           settle     judge every row, preview of those that may end, Program.commit, accounting

A failure of a request's own output session ends that request. Any other failure ends the worker:
every request is answered with `engine_unavailable`, and `failure` says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ninfer.contract.errors import InvariantError, NInferError, Unavailable
from ninfer.contract.generation import (
    Admitted,
    Failed,
    Finish,
    Finished,
    FinishReason,
    OutputDelta,
    OutputPreview,
    OutputSession,
    Progress,
)
from ninfer.contract.program import PendingBatch, Program, SequenceSpec, UnitKind
from ninfer.contract.sampling import GeneratedToken
from ninfer.engine.expiry import Expiry, ExpiryQueue
from ninfer.engine.inbox import Inbox
from ninfer.engine.metrics import EngineMetrics
from ninfer.engine.outbox import Outbox
from ninfer.engine.request_record import Phase, RequestRecord
from ninfer.engine.scheduler import DecodeUnit, PrefillUnit, Scheduler, UnitPlan
from ninfer.engine.settlement import RowVerdict, call_session, judge_row, preview_accepted

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A launched unit and the requests of its rows, in row order.

    is_sampled   each row was to produce a token (all units but inner prefill chunks)
    """

    batch: PendingBatch
    records: tuple[RequestRecord, ...]
    is_sampled: bool


class Worker:
    """Run `run` as a task, once. Others use `inbox` and read; nothing else here is theirs."""

    def __init__(
        self,
        program: Program,
        *,
        queue_timeout_s: float,
        clock: Callable[[], float],
        metrics: EngineMetrics,
    ) -> None:
        self.inbox = Inbox()
        self._program = program
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._metrics = metrics
        self._scheduler = Scheduler(program.capacity)
        self._records: dict[int, RequestRecord] = {}
        self._expiries = ExpiryQueue()
        self._outbox = Outbox()
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
        return 0 if self._has_ended else self._scheduler.num_waiting + self.inbox.num_submitted

    @property
    def num_running(self) -> int:
        return 0 if self._has_ended else self._scheduler.num_running

    @property
    def last_unit_s(self) -> float:
        """When a unit last finished."""
        return self._last_unit_s

    async def run(self) -> None:
        """Serve until the inbox says stop. However it ends, every request has been answered."""
        try:
            await self._serve()
        except asyncio.CancelledError:
            self._failure = "the engine's task was cancelled"
            raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            _logger.exception("the engine has failed")
        finally:
            self._has_ended = True
            self._answer_all()

    async def _serve(self) -> None:
        while True:
            self._pass_boundary()
            unit = self._launch_next()
            self._show_unseen(() if unit is None else unit.records)
            self._outbox.publish()
            if unit is not None:
                await self._program.complete(unit.batch)
                self._settle(unit)
            elif self.inbox.is_stopping:
                return
            else:
                await self.inbox.wait()

    def _pass_boundary(self) -> None:
        now = self._clock()
        newcomers = self._take_in()
        self._evict()
        for record in self.inbox.take_cancelled():
            if record.ticket in self._records:
                self._cut_off(record, None)
        self._expire(now)
        self._admit(now)
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
        self._scheduler.enqueue(
            record.ticket,
            num_prompt_tokens=record.request.prompt.num_tokens,
            worst_case_pages=record.budget.worst_case_pages,
        )
        if record.request.deadline_s is not None:
            self._expiries.add(record.request.deadline_s, record.ticket, Expiry.DEADLINE)

    def _evict(self) -> None:
        error = self.inbox.take_eviction()
        if error is not None:
            self._show_unseen(())
            for record in list(self._records.values()):
                self._end_failed(record, error)

    def _expire(self, now: float) -> None:
        for ticket, kind in self._expiries.take_due(now):
            record = self._records.get(ticket)
            if record is None:
                continue
            if kind is Expiry.DEADLINE:
                self._cut_off(
                    record, Unavailable("deadline_exceeded", "the request's deadline has passed")
                )
            elif record.phase is Phase.WAITING:
                self._end_failed(record, self._queue_timeout(record))

    def _admit(self, now: float) -> None:
        while (ticket := self._scheduler.next_admission()) is not None:
            record = self._records[ticket]
            request = record.request
            record.sequence = self._program.open_sequence(
                SequenceSpec(
                    request_id=request.request_id,
                    prompt=request.prompt,
                    sampling=request.sampling,
                    min_tokens=request.min_tokens,
                    suppressed_ids=request.suppressed_ids,
                )
            )
            self._scheduler.admit(ticket)
            record.move(Phase.PREFILL)
            record.admitted_s = now
            self._metrics.note_admitted(now - record.submitted_s)
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
            self._metrics.retry_after_s(self._program.capacity.max_concurrency),
        )

    def _launch_next(self) -> _Unit | None:
        for plan in self._scheduler.candidates():
            unit = self._try_launch(plan)
            if unit is not None:
                self._scheduler.note_launched(plan)
                return unit
        if self._scheduler.num_running:
            # Worst cases fit together, so this is an accounting fault; waiting would never end.
            raise InvariantError("no resident request can get memory for its next unit")
        return None

    def _try_launch(self, plan: UnitPlan) -> _Unit | None:
        """Launch with the rows that get their memory; None when none does."""
        match plan:
            case PrefillUnit():
                return self._try_prefill(plan)
            case DecodeUnit():
                return self._try_decode(plan)

    def _try_prefill(self, plan: PrefillUnit) -> _Unit | None:
        record = self._records[plan.ticket]
        if not self._program.reserve_units(record.resident, plan.num_tokens):
            return None
        batch = self._program.launch_prefill(record.resident, plan.num_tokens)
        return _Unit(batch, (record,), plan.is_last)

    def _try_decode(self, plan: DecodeUnit) -> _Unit | None:
        candidates = [self._records[ticket] for ticket in plan.tickets]
        records = tuple(
            record for record in candidates if self._program.reserve_units(record.resident, 1)
        )
        if not records:
            return None
        goes_on = not self._scheduler.has_prompts and all(map(_may_go_on, records))
        handles = [record.resident for record in records]
        return _Unit(self._program.launch_decode(handles, goes_on=goes_on), records, True)

    def _settle(self, unit: _Unit) -> None:
        now = self._last_unit_s = self._clock()
        outputs = unit.batch.outputs
        if outputs is None or len(outputs) != len(unit.records):
            raise InvariantError("a completed unit has not one output for each of its rows")
        verdicts = [
            judge_row(record, output, is_sampled=unit.is_sampled)
            for record, output in zip(unit.records, outputs, strict=True)
        ]
        self._program.commit(unit.batch, [verdict.accepted for verdict in verdicts])
        self._count_unit(unit)
        for record, verdict in zip(unit.records, verdicts, strict=True):
            if unit.batch.kind is UnitKind.PREFILL:
                self._note_prefilled(record)
            self._account(record, verdict, now)

    def _note_prefilled(self, record: RequestRecord) -> None:
        """Tell the Scheduler how far the prompt is; a refused row stays where it was."""
        frontier = self._program.frontier(record.resident)
        self._scheduler.note_prefilled(record.ticket, frontier)

    def _count_unit(self, unit: _Unit) -> None:
        if unit.batch.kind is UnitKind.PREFILL:
            self._metrics.num_prefill_units += 1
            self._metrics.prompt_tokens_total += sum(unit.batch.num_inputs)
        else:
            self._metrics.num_decode_units += 1
            self._metrics.decode_rows_total += len(unit.records)

    def _account(self, record: RequestRecord, verdict: RowVerdict, now: float) -> None:
        if verdict.error is not None:
            self._end_failed(record, verdict.error)
        elif verdict.finish is not None:
            self._end_finished(record, verdict.finish, ())
        elif verdict.token is not None:
            self._count_tokens(record, 1, now)
            self._unseen.append((record, verdict.token))
        elif verdict.preview is not None:
            self._count_tokens(record, verdict.preview.accepted, now)
            try:
                self._adopt(record, verdict.preview)
            except NInferError as error:
                self._end_failed(record, error)

    def _count_tokens(self, record: RequestRecord, accepted: int, now: float) -> None:
        if record.first_token_s is None:
            record.first_token_s = now
            self._metrics.note_first_token(now - record.submitted_s)
        record.last_token_s = now
        record.completion_tokens += accepted
        self._metrics.completion_tokens_total += accepted

    def _show_unseen(self, running: Sequence[RequestRecord]) -> None:
        """Tell the sessions of the tokens that were accepted without them. A request whose session
        fails ends, one of those with a unit `running` when that has run."""
        unseen, self._unseen = self._unseen, []
        for record, token in unseen:
            try:
                self._adopt(record, preview_accepted(record, token))
            except NInferError as error:
                if record in running:
                    record.failure = error
                else:
                    self._end_failed(record, error)

    def _adopt(self, record: RequestRecord, preview: OutputPreview) -> None:
        """Raises NInferError when the session fails."""
        record.reasoning_tokens = call_session(
            record, lambda: _commit_session(record.request.session, preview)
        )
        if preview.finish is not None:
            self._end_finished(record, preview.finish, preview.deltas)
            return
        if record.phase is Phase.PREFILL:
            record.move(Phase.DECODE_READY)
        if preview.deltas:
            self._outbox.add(record, Progress(preview.deltas, record.usage()))

    def _cut_off(self, record: RequestRecord, error: NInferError | None) -> None:
        """End from outside: as cancelled, or with `error`. Text held back is shown first."""
        self._show_unseen(())
        if record.ticket not in self._records:
            return
        try:
            deltas = self._flush(record)
        except NInferError as session_error:
            self._end_failed(record, session_error)
            return
        if error is None:
            self._end_finished(record, Finish(FinishReason.CANCELLED), deltas)
            return
        if deltas:
            self._outbox.add(record, Progress(deltas, record.usage()))
        self._end_failed(record, error)

    def _flush(self, record: RequestRecord) -> tuple[OutputDelta, ...]:
        if record.completion_tokens == 0:
            return ()
        return call_session(record, record.request.session.flush)

    def _end_finished(
        self, record: RequestRecord, finish: Finish, deltas: tuple[OutputDelta, ...]
    ) -> None:
        self._retire(record)
        timings = record.timings(self._clock())
        self._metrics.note_finished(finish.reason, timings)
        self._outbox.add(record, Finished(finish, deltas, record.usage(), timings))

    def _end_failed(self, record: RequestRecord, error: NInferError) -> None:
        self._retire(record)
        self._metrics.note_failed(error)
        self._outbox.add(record, Failed(error, record.usage()))

    def _retire(self, record: RequestRecord) -> None:
        self._scheduler.remove(record.ticket)
        if record.phase is not Phase.WAITING:
            record.move(Phase.MODEL_FINISHED)
            self._program.close_sequence(record.resident)
            record.sequence = None
        record.move(Phase.DONE)
        del self._records[record.ticket]

    def _answer_all(self) -> None:
        """The worker has ended: answer whoever has no answer yet. The Program is left alone."""
        for record in (*self._records.values(), *self.inbox.take_submitted()):
            if record.phase in (Phase.PREFILL, Phase.DECODE_READY):
                record.move(Phase.MODEL_FINISHED)
            record.move(Phase.DONE)
            error = Unavailable("engine_unavailable", "the engine has stopped")
            self._metrics.note_failed(error)
            self._outbox.add(record, Failed(error, record.usage()))
        self._records.clear()
        self._outbox.publish()


def _may_go_on(record: RequestRecord) -> bool:
    """The budget allows a token behind the next one."""
    return record.budget.num_tokens - record.completion_tokens > 1


def _commit_session(session: OutputSession, preview: OutputPreview) -> int:
    """Adopt `preview`; returns the reasoning tokens so far."""
    session.commit(preview)
    return session.reasoning_tokens
