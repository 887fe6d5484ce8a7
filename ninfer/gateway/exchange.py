"""One HTTP request and its answer: what every protocol handler is given.

Before the status line an error is raised and becomes a JSON answer; once an event stream has begun
it becomes the stream's last event.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, TypeVar

import orjson
from aiohttp import web

from ninfer.contract.errors import NInferError, RequestError
from ninfer.gateway.answer_headers import answer_headers
from ninfer.gateway.body import read_json_body
from ninfer.gateway.cache_fields import SESSION_HEADER
from ninfer.gateway.connection import Connection
from ninfer.gateway.counters import GatewayCounters
from ninfer.gateway.errors import describe_error, is_expected
from ninfer.gateway.fields import Fields
from ninfer.gateway.lifecycle import Lifecycle
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.request_end import RequestEnd
from ninfer.gateway.request_ids import exchange_id
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.sse import EventStream, StreamStyle
from ninfer.options import ServeOptions

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_CLOSING_CODES: Final = frozenset({"request_timeout", "invalid_http", "server_draining"})
_ABANDONING_CODES: Final = frozenset({"request_timeout", "invalid_http"})


class Exchange:
    """The request, the server around it, and the ways to answer."""

    def __init__(
        self,
        request: web.BaseRequest,
        path: str,
        lifecycle: Lifecycle,
        options: ServeOptions,
        limits: GatewayLimits,
        counters: GatewayCounters,
        log: RequestLog | None = None,
    ) -> None:
        self.request = request
        self.path = path
        self.lifecycle = lifecycle
        self.options = options
        self.limits = limits
        self.counters = counters
        self._log = log
        self.request_id = exchange_id(request.headers.get("X-Request-Id"))
        self.is_abandoned = False
        """The rest of the request body is not worth waiting for."""

    @property
    def served_name(self) -> str:
        return self.options.model_name or self.lifecycle.card.name

    @property
    def session_id(self) -> str | None:
        """The conversation's name, where it came in a header."""
        return self.request.headers.get(SESSION_HEADER)

    def log_end(self, end: RequestEnd) -> None:
        """Note in the request log how one of the engine's requests ended."""
        if self._log is not None:
            self._log.write({"exchange_id": self.request_id, "path": self.path, **end.as_json()})

    def check_model(self, name: str | None) -> str:
        """The name to echo. Raises `model_not_found` for another one when names are strict."""
        if self.options.strict_model and name != self.served_name:
            raise RequestError("model_not_found", "The requested model does not exist.", "model")
        return name or self.served_name

    async def read(self, parse: Callable[[Fields], T]) -> T:
        """The body, checked by `parse` (a pure function: it may run in a thread)."""
        connection = self.request.protocol
        if isinstance(connection, Connection):
            connection.need_client()
        body = await read_json_body(self.request, self.limits, parse)
        self.counters.surrogates_replaced += body.surrogates_replaced
        return body.value

    def json(
        self, payload: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        return web.Response(
            status=status,
            body=orjson.dumps(payload),
            content_type="application/json",
            headers={**(headers or {}), **self._headers()},
        )

    def text(self, body: bytes, content_type: str) -> web.Response:
        """`content_type` with its parameters."""
        headers = {"Content-Type": content_type, **self._headers()}
        return web.Response(body=body, headers=headers)

    def error(self, error: Exception) -> web.Response:
        """The JSON answer for an exception; what is not the client's fault is logged."""
        self._report(error)
        answer = describe_error(error)
        response = self.json(answer.body, answer.status, answer.headers)
        if isinstance(error, NInferError) and error.code in _CLOSING_CODES:
            response.force_close()
            self.is_abandoned = error.code in _ABANDONING_CODES
        return response

    @asynccontextmanager
    async def stream(self, style: StreamStyle) -> AsyncIterator[EventStream]:
        """An event stream: begun on entry, completed on exit. An error inside is sent as its last
        event, as the style has it, and does not leave the block."""
        async with EventStream(self.request, self._headers(), self.limits, style) as stream:
            try:
                yield stream
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001  the top of a streamed answer
                self._report(error)
                await stream.send((style.failure(error),))
            await stream.finish()

    async def deliver(self, response: web.StreamResponse) -> None:
        """Send a whole answer; a client that does not take it in time is cut off."""
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await response.prepare(self.request)
                await response.write_eof()
        except TimeoutError:
            transport = self.request.transport
            if transport is not None:
                transport.abort()
            raise ConnectionError("the client did not take the answer") from None

    def _headers(self) -> dict[str, str]:
        return answer_headers(self.request_id)

    def _report(self, error: Exception) -> None:
        """Log without the texts of foreign exceptions: they may quote the prompt."""
        if is_expected(error):
            return
        text = error.message if isinstance(error, NInferError) else ""
        frames = "".join(traceback.format_tb(error.__traceback__))
        _logger.error(
            "request %s failed: %s %s\n%s", self.request_id, type(error).__name__, text, frames
        )


Handler: TypeAlias = Callable[[Exchange], Awaitable[web.StreamResponse]]
