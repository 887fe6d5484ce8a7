"""EngineRequestHandle: the consumer's end of a request."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from ninfer.contract.generation import Event
from ninfer.engine.event_stream import EventStream


class EngineRequestHandle:
    """Implements `contract.generation.RequestHandle` over one EventStream.

    A handle that is dropped without having been left (its maker failed before entering it, say)
    lets go by itself, so that its place is not lost.
    """

    def __init__(
        self,
        request_id: str,
        stream: EventStream,
        cancel: Callable[[], None],
        let_go: Callable[[], None],
    ) -> None:
        """`cancel` asks the worker for the end; `let_go` gives up the consumer's half of the place.
        Neither may refer to this handle."""
        self._request_id = request_id
        self._stream = stream
        self._cancel = cancel
        self._let_go = let_go
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _abandon, loop, stream, cancel, let_go)
        self._finalizer.atexit = False

    @property
    def request_id(self) -> str:
        return self._request_id

    def cancel(self) -> None:
        self._cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._stream.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finalizer.detach()
        _release(self._stream, self._cancel, self._let_go)


def _release(stream: EventStream, cancel: Callable[[], None], let_go: Callable[[], None]) -> None:
    stream.close()
    cancel()
    let_go()


def _abandon(
    loop: asyncio.AbstractEventLoop,
    stream: EventStream,
    cancel: Callable[[], None],
    let_go: Callable[[], None],
) -> None:
    # The collector may run in any thread, and after the loop has ended.
    if not loop.is_closed():
        loop.call_soon_threadsafe(_release, stream, cancel, let_go)
