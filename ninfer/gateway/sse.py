"""Server-sent events: framing, wall-clock keep-alive and the cut-off of readers that fall behind.

An EventStream is an async context manager around the life of one streamed answer:

    enter: status line and headers -> send(frames)* -> finish() | an error frame -> leave

The engine never waits for a reader: frames go to the socket's buffer, and whoever lets it grow too
long, or takes nothing for too long, loses the connection and with it the request.

A step of the engine gives all streams a frame in one turn of the loop, and all of them are written
in the next turn, one right behind the other: a reader that waits for many streams (a proxy) is then
woken once, not once a frame, and waking it is most of what a small write costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final, Protocol, Self

import orjson
from aiohttp import web
from aiohttp.http import StreamWriter

from ninfer.contract.errors import InvariantError
from ninfer.gateway.errors import describe_error
from ninfer.gateway.limits import GatewayLimits

KEEP_ALIVE_FRAME: Final = b": keep-alive\n\n"
DONE_FRAME: Final = b"data: [DONE]\n\n"
HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class SlowReaderError(ConnectionError):
    """The client read too little for too long; its connection has been aborted."""


class StreamStyle(Protocol):
    """What a protocol's streams do beside answering."""

    def keep_alive(self) -> bytes:
        """A frame for a stream that has been silent for long; asked for on a wall clock."""

    def failure(self, error: Exception) -> bytes:
        """The last frames of a stream that fails."""


class OpenAIStreamStyle:
    """A comment on silence; the error object as the last event, without a closing mark."""

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE_FRAME

    def failure(self, error: Exception) -> bytes:
        return data_frame(describe_error(error).body)


def data_frame(payload: object) -> bytes:
    """One event. JSON escapes line breaks, so a single `data:` line always suffices."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def event_frame(name: str, payload: object) -> bytes:
    """One event with a name, as the clients of some protocols demand."""
    return f"event: {name}\n".encode() + data_frame(payload)


class EventStream:
    """One event-stream answer. Used by the task that made it."""

    def __init__(
        self,
        request: web.BaseRequest,
        headers: Mapping[str, str],
        limits: GatewayLimits,
        style: StreamStyle,
    ) -> None:
        self._request = request
        self._style = style
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._last_write_s = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._writer: StreamWriter | None = None
        self._has_ended = False
        self._unsent: list[bytes] = []
        self._num_written = 0
        self.response = web.StreamResponse(headers={**HEADERS, **headers})

    async def __aenter__(self) -> Self:
        writer = await self.response.prepare(self._request)
        if not isinstance(writer, StreamWriter):
            raise InvariantError("an event stream needs a plain HTTP connection")
        writer.send_headers()
        self._writer = writer
        self._last_write_s = self._loop.time()
        self._watch = asyncio.create_task(self._watch_reader())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))

    @property
    def is_behind(self) -> bool:
        """The reader has not taken everything yet."""
        return self._buffered_bytes() > 0

    async def send(self, frames: Iterable[bytes]) -> None:
        """Send whole frames with the next turn of the loop. Never waits. Raises ConnectionError."""
        data = b"".join(frames)
        if data:
            self._queue(data)

    async def catch_up(self) -> None:
        """Wait until the reader has taken most of what was sent, or is cut off."""
        self._flush()
        if self._writer is not None:
            await self._writer.drain()

    async def finish(self) -> None:
        """End the body and wait until the reader has it; the cut-off still holds meanwhile."""
        self._has_ended = True
        self._flush()
        await self.response.write_eof()

    def _queue(self, data: bytes) -> None:
        if self._writer is None:
            raise InvariantError("an event stream was written before it was entered")
        transport = self._writer.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader has left")
        if transport.get_write_buffer_size() > self._limits.stream_buffer_bytes:
            self._abort()
            raise SlowReaderError("the reader fell too far behind")
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._last_write_s = self._loop.time()

    def _flush(self) -> None:
        """Write what is queued as one chunk; a reader that left meanwhile has no use for it."""
        writer, unsent = self._writer, self._unsent
        if writer is None or not unsent:
            return
        self._unsent = []
        transport = writer.transport
        if transport is None or transport.is_closing():
            return
        data = b"".join(unsent)
        if writer.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._num_written += len(data)
        transport.write(data)

    async def _watch_reader(self) -> None:
        """Break silence; abort when nothing was taken for `write_timeout_s`."""
        try:
            await self._keep_watch()
        except ConnectionError:
            return  # the task that owns the stream is cancelled with its connection

    async def _keep_watch(self) -> None:
        taken_bytes = 0
        progress_s = self._loop.time()
        while True:
            now_s = self._loop.time()
            buffered = self._buffered_bytes()
            if not buffered or self._num_written - buffered != taken_bytes:
                taken_bytes = self._num_written - buffered
                progress_s = now_s
            elif now_s - progress_s >= self._limits.write_timeout_s:
                self._abort()
                return
            silent_s = now_s - self._last_write_s
            is_silent = silent_s >= self._limits.keep_alive_interval_s
            if is_silent and not buffered and not self._has_ended:
                self._queue(self._style.keep_alive())
                silent_s = 0.0
            wait_s = self._limits.keep_alive_interval_s - silent_s
            await asyncio.sleep(max(min(wait_s, self._limits.write_timeout_s / 4), 0.005))

    def _buffered_bytes(self) -> int:
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def _abort(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()
