"""The engine requests behind one HTTP request, read as one stream.

    async with Choices(engine, requests) as choices:
        async for index, event in choices: ...

Leaving the block cancels and releases every request that is still running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, TypeAlias

from ninfer.contract.chat import GenerationParams
from ninfer.contract.errors import InvariantError, Unavailable
from ninfer.contract.generation import (
    Admitted,
    Event,
    Failed,
    Finished,
    GenerationEngine,
    GenerationRequest,
    Progress,
    RequestHandle,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.request_end import EndReports, RequestWatcher

LiveEvent: TypeAlias = Admitted | Progress | Finished
_MASK: Final = 2**64 - 1
_QUEUE_EVENTS: Final = 64
_PLACE_WAIT_S: Final = 0.1
"""Longest time between two tries of a choice to get a place."""


def build_requests(
    model: ServedModel,
    answer_id: str,
    prompt: PreparedPrompt,
    params: GenerationParams,
    num_choices: int,
) -> list[GenerationRequest]:
    """One request a choice; all seeds follow from the first one's. They share the prompt object,
    which is how the engine knows that its prefill serves all of them."""
    build, now_s = model.frontend.build_request, model.engine.now()
    if num_choices == 1:
        return [build(answer_id, prompt, params, now=now_s)]
    first = build(f"{answer_id}-0", prompt, params, now=now_s)
    seeds = [derive_seed(first.sampling.seed, index) for index in range(1, num_choices)]
    return [first] + [
        build(f"{answer_id}-{index}", prompt, replace(params, seed=seed), now=now_s)
        for index, seed in enumerate(seeds, start=1)
    ]


def score_once(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """The choices of one prompt, of which only the first reports the prompt's log probabilities:
    they are the same for all."""
    return [
        request if not index else replace(request, scoring=None)
        for index, request in enumerate(requests)
    ]


def derive_seed(seed: int, index: int) -> int:
    """Seed of choice `index` as a signed 64-bit number (SplitMix64); choice 0 keeps its own."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


class Choices:
    """Events of all choices in order of arrival; ends when each has finished.

    At most `max_concurrency` of them are with the engine at once and the others follow as those
    end, so that a batch leaves room for others and may be larger than the queue. The first
    `Failed` is raised as its error. One choice is read directly; several have a task each that
    waits for their events.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        requests: Sequence[GenerationRequest],
        watcher: RequestWatcher | None = None,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._reports = EndReports(requests, watcher)
        self._stack = AsyncExitStack()
        self._num_running = len(requests)
        self._window = asyncio.Semaphore(engine.status().max_concurrency)
        self._single: AsyncIterator[Event] | None = None
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(_QUEUE_EVENTS)
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Check and prepare all and submit the first; raises what `submit` raises, and then none
        of the requests is left running."""
        for request in self._requests:
            self._engine.check(request)
            if request.prepare is not None:
                await request.prepare()
        self._reports.begin()
        async with AsyncExitStack() as stack:
            handles: list[RequestHandle | None] = [None] * len(self._requests)
            for index, request in enumerate(self._requests):
                if self._window.locked():
                    break
                await self._window.acquire()
                handles[index] = await stack.enter_async_context(self._engine.submit(request))
            self._stack = stack.pop_all()
        if len(handles) == 1 and handles[0] is not None:
            self._single = aiter(handles[0])
        else:
            self._pumps = [
                asyncio.create_task(self._pump(index, handle))
                for index, handle in enumerate(handles)
            ]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        try:
            await self._stack.aclose()
            if self._pumps:
                await asyncio.wait(self._pumps)
        finally:
            self._reports.close(exc)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, LiveEvent]:
        if self._num_running == 0:
            raise StopAsyncIteration
        if self._single is not None:
            index, event = 0, await _take(self._single)
        else:
            index, event = await self._next_of_many()
        self._reports.note(index, event)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            self._num_running -= 1
        return index, event

    async def _next_of_many(self) -> tuple[int, Event]:
        index, event = await self._queue.get()
        if isinstance(event, Exception):
            raise event
        return index, event

    async def _pump(self, index: int, handle: RequestHandle | None) -> None:
        try:
            if handle is None:
                await self._window.acquire()
                handle = await self._submit_late(self._requests[index])
            async with handle:
                await self._pass_on(index, handle)
            self._window.release()
        except Exception as error:  # noqa: BLE001  the top of a task: its reader raises it
            await self._queue.put((index, error))

    async def _pass_on(self, index: int, handle: RequestHandle) -> None:
        events = aiter(handle)
        while True:
            event = await _take(events)
            await self._queue.put((index, event))
            if isinstance(event, Finished | Failed):
                return

    async def _submit_late(self, request: GenerationRequest) -> RequestHandle:
        """Submit, and wait for a place when others have taken it meanwhile."""
        while True:
            try:
                return self._engine.submit(request)
            except Unavailable as error:
                if error.code != "server_overloaded" or self._is_late(request):
                    raise
                await asyncio.sleep(min(error.retry_after_s or _PLACE_WAIT_S, _PLACE_WAIT_S))

    def _is_late(self, request: GenerationRequest) -> bool:
        return request.deadline_s is not None and self._engine.now() >= request.deadline_s


async def _take(events: AsyncIterator[Event]) -> Event:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise InvariantError("a request's events ended without a terminal one") from None
