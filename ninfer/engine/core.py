"""Engine: requests in, events out. Implements `contract.generation.GenerationEngine`.

    Gateway, CLI --submit--> Engine --Inbox--> Worker (one task) --> Program
         ^                                        |
         +---- RequestHandle <--- EventStream ----+

The Engine checks and counts; it never touches the Scheduler, the Program or a request's state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ninfer.contract.drafting import DraftCosts
from ninfer.contract.errors import InvariantError, RequestError, Unavailable
from ninfer.contract.generation import EngineHealth, EngineStatus, GenerationRequest, RequestHandle
from ninfer.contract.program import Program
from ninfer.engine.context_protocol import ContextPolicy
from ninfer.engine.event_stream import EventStream
from ninfer.engine.handle import EngineRequestHandle
from ninfer.engine.metrics import EngineMetrics
from ninfer.engine.no_cache import NoCache
from ninfer.engine.outstanding import Outstanding, Place
from ninfer.engine.request_checks import OutputBudget, check_request
from ninfer.engine.request_record import RequestRecord
from ninfer.engine.speculation.costs import AssumedCosts
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.engine.speculation.row_drafter import RowDrafter
from ninfer.engine.worker import Worker

STALL_AFTER_S: Final = 60.0
"""No unit finished for so long while work is pending: the engine counts as unavailable."""


class Engine:
    """One model's engine. Owns the Program from construction on; use it from one loop.

    max_pending       requests that may wait beyond those that run
    queue_timeout_s   longest wait for a lane; a request may bring its own
    policy            the context cache over the same Program; None: no cache
    max_decode_gap_s  longest time a running stream may stand still for a prefill chunk; None: any
    clock             seconds, monotonic
    make_drafter      what drafts for a request, when the Program's capacity has room for drafts
    draft_costs       what drafts cost, as `Program.measure_drafts` found; None: assumed
    """

    def __init__(
        self,
        program: Program,
        *,
        max_pending: int,
        queue_timeout_s: float,
        policy: ContextPolicy | None = None,
        max_decode_gap_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_drafter: MakeDrafter = RowDrafter,
        draft_costs: DraftCosts | None = None,
    ) -> None:
        self._program = program
        self._capacity = program.capacity
        self._max_pending = max_pending
        self._clock = clock
        self._metrics = EngineMetrics()
        self._outstanding = Outstanding(self._capacity.max_concurrency + max_pending)
        self._worker = Worker(
            program,
            policy=NoCache() if policy is None else policy,
            queue_timeout_s=queue_timeout_s,
            max_decode_gap_s=max_decode_gap_s,
            clock=clock,
            metrics=self._metrics,
            make_drafter=make_drafter,
            draft_costs=AssumedCosts() if draft_costs is None else draft_costs,
        )
        self._task: asyncio.Task[None] | None = None
        self._num_tickets = 0
        self._busy_since_s = 0.0
        self._is_admission_closed = False
        self._is_closed = False

    @property
    def max_context(self) -> int:
        return self._capacity.max_context

    @property
    def metrics(self) -> EngineMetrics:
        """Counters to read; the worker writes them."""
        return self._metrics

    async def start(self) -> None:
        """Start the worker; InvariantError when it was started or closed before."""
        if self._task is not None or self._is_closed:
            raise InvariantError("an engine starts once")
        self._task = asyncio.create_task(self._worker.run(), name="engine-worker")

    def check(self, request: GenerationRequest) -> None:
        self._budget_of(request)

    def submit(self, request: GenerationRequest) -> RequestHandle:
        try:
            self._check_open()
            budget = self._budget_of(request)
            place = self._take_place()
        except (RequestError, Unavailable):
            self._metrics.requests_rejected += 1
            raise
        return self._enqueue(request, budget, place)

    def status(self) -> EngineStatus:
        health, error = self._health()
        occupancy = self._program.occupancy()
        return EngineStatus(
            health=health,
            waiting=self._worker.num_waiting,
            running=self._worker.num_running,
            outstanding=self._outstanding.num_places,
            max_concurrency=self._capacity.max_concurrency,
            max_pending=self._max_pending,
            pages_used=occupancy.pages_used,
            pages_total=occupancy.pages_total,
            prompt_tokens_total=self._metrics.prompt_tokens_total,
            completion_tokens_total=self._metrics.completion_tokens_total,
            error=error,
            slots_used=occupancy.slots_used,
            slots_total=occupancy.slots_total,
            has_ended=self._worker.has_ended or self._is_closed,
        )

    def now(self) -> float:
        return self._clock()

    def flush_cache(self) -> None:
        """Release all that the context cache holds and nobody uses, at the next boundary."""
        self._worker.inbox.ask_flush()

    def close_admission(self) -> None:
        self._is_admission_closed = True

    async def drain(self, timeout_s: float) -> bool:
        self.close_admission()
        try:
            async with asyncio.timeout(timeout_s):
                await self._outstanding.wait_all_free()
        except TimeoutError:
            if self._outstanding.num_unanswered > 0:
                self._worker.inbox.evict(
                    Unavailable("server_draining", "the server is shutting down")
                )
                await self._outstanding.wait_all_answered()
                return False
        return self._worker.failure is None

    async def aclose(self) -> None:
        self._is_admission_closed = True
        self._worker.inbox.stop(Unavailable("engine_unavailable", "the engine is shutting down"))
        if self._task is not None:
            # Not `await self._task`: cancelling the caller must not cancel the worker, which
            # finishes its unit first.
            await asyncio.wait([self._task])
        if not self._is_closed:
            self._is_closed = True
            self._program.close()

    def _budget_of(self, request: GenerationRequest) -> OutputBudget:
        return check_request(
            request,
            capacity=self._capacity,
            vocab_size=self._program.vocab_size,
            pages_needed=self._program.pages_needed,
        )

    def _check_open(self) -> None:
        if self._is_closed or self._worker.has_ended or self._worker.inbox.is_stopping:
            raise Unavailable("engine_unavailable", "the engine has stopped")
        if self._task is None:
            raise Unavailable("model_loading", "the engine has not started yet")
        if self._is_admission_closed:
            raise Unavailable("server_draining", "the server is shutting down")

    def _take_place(self) -> Place:
        was_idle = self._outstanding.num_unanswered == 0
        place = self._outstanding.take()
        if place is None:
            raise Unavailable(
                "server_overloaded",
                f"{self._outstanding.num_places} requests are running or waiting, which is the"
                " most this server takes",
                self._worker.retries.until_place_s(),
            )
        if was_idle:
            self._busy_since_s = self._clock()
        return place

    def _enqueue(
        self, request: GenerationRequest, budget: OutputBudget, place: Place
    ) -> EngineRequestHandle:
        stream = EventStream()
        record = RequestRecord(
            ticket=self._num_tickets,
            request=request,
            budget=budget,
            stream=stream,
            place=place,
            submitted_s=self._clock(),
        )
        self._num_tickets += 1
        handle = EngineRequestHandle(
            request.request_id,
            stream,
            cancel=partial(self._worker.inbox.cancel, record),
            let_go=place.let_go_consumer,
        )
        self._worker.inbox.submit(record)
        return handle

    def _health(self) -> tuple[EngineHealth, str | None]:
        if self._worker.has_ended or self._is_closed:
            return EngineHealth.UNAVAILABLE, self._worker.failure or "the engine was closed"
        if self._task is None:
            return EngineHealth.LOADING, None
        stalled_s = self._stalled_s()
        if stalled_s > STALL_AFTER_S:
            return EngineHealth.UNAVAILABLE, f"no unit has finished for {stalled_s:.0f} s"
        if self._is_admission_closed:
            return EngineHealth.DRAINING, None
        return EngineHealth.READY, None

    def _stalled_s(self) -> float:
        if self._outstanding.num_unanswered == 0:
            return 0.0
        return self._clock() - max(self._busy_since_s, self._worker.last_unit_s)
