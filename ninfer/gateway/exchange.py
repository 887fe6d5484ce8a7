"""One HTTP request and its answer: what every protocol handler is given.

Before the status line an error is raised and becomes a JSON answer; once an event stream has begun
it becomes the stream's last event. So does an abort from outside, which arrives as a cancellation
of the task.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import orjson
from aiohttp import web

from ninfer.contract.chat import ChatPrompt
from ninfer.contract.errors import NInferError, RequestError
from ninfer.gateway.answer_headers import answer_headers
from ninfer.gateway.body import read_json_body
from ninfer.gateway.cache_fields import SESSION_HEADER
from ninfer.gateway.connection import Connection
from ninfer.gateway.counters import GatewayCounters
from ninfer.gateway.errors import describe_error, family_of, is_expected
from ninfer.gateway.exchange_log import ExchangeLog
from ninfer.gateway.fields import Fields
from ninfer.gateway.lifecycle import Lifecycle
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.media.desk import MediaDesk, with_media
from ninfer.gateway.media.references import MediaReference, no_vision
from ninfer.gateway.request_end import RequestEnd
from ninfer.gateway.request_ids import exchange_id
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.running import RunningRequests
from ninfer.gateway.sse import EventStream, StreamStyle
from ninfer.gateway.trace import parse_trace
from ninfer.options import ServeOptions

T = TypeVar("T")
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_NAME_FIELDS: Final = ("rid", "request_id")
_CHOICE_SUFFIX: Final = re.compile(r"(-[0-9]{1,3}){1,2}\Z")
_MAX_NAMES: Final = 128
_logger = logging.getLogger(__name__)
_CLOSING_CODES: Final = frozenset(
    {
        *("headers_too_large", "invalid_http", "request_timeout", "server_draining"),
        "unsupported_transfer_encoding",
    }
)
_ABANDONING_CODES: Final = frozenset(
    {"request_timeout", "invalid_http", "unsupported_transfer_encoding"}
)


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
        *,
        running: RunningRequests | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        media: MediaDesk | None = None,
    ) -> None:
        """`running` is where an abort finds the request; `headers` go out with every answer;
        `media` acquires pictures and videos."""
        self.request = request
        self.path = path
        self.lifecycle = lifecycle
        self.options = options
        self.limits = limits
        self.counters = counters
        self._running = running
        self._media = media
        self._task: asyncio.Task[Any] | None = None
        self._is_aborted = False
        self._failure: NInferError | None = None
        self.answered: web.StreamResponse | None = None
        """The answer, once all of it was sent: who leaves then has missed nothing."""
        self.request_id = exchange_id(request.headers.get("X-Request-Id"))
        trace = parse_trace(request.headers.get("traceparent"))
        self._log = ExchangeLog(log, self.request_id, path, trace, logs_bodies=options.log_prompts)
        self._headers: Mapping[str, str] = {**answer_headers(self.request_id), **headers}
        self.is_abandoned = False
        """The rest of the request body is not worth waiting for."""

    @property
    def served_name(self) -> str:
        return self.options.model_name or self.lifecycle.card.name

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return tuple(dict.fromkeys((self.served_name, *self.options.model_alias)))

    @property
    def session_id(self) -> str | None:
        """The conversation's name, where it came in a header."""
        return self.request.headers.get(SESSION_HEADER)

    async def acquire_media(
        self, chat: ChatPrompt, references: Sequence[MediaReference]
    ) -> ChatPrompt:
        """`chat` with the files that `references`, one for each of its media parts in their order,
        stand for. Raises RequestError: `unsupported_value` naming the part for a model without
        vision, and what MediaDesk.acquire raises."""
        if not references:
            return chat
        if self._media is None or not self.lifecycle.card.has_vision:
            raise no_vision(references[0].part)
        return with_media(chat, await self._media.acquire(references))

    def note_end(self, end: RequestEnd) -> None:
        """Note in the request log how one of the engine's requests ended."""
        self._log.note_end(end.because_of(self._failure, is_told=self._is_aborted))

    def note_begin(self, request_ids: Sequence[str]) -> None:
        """The engine is given requests of these names; an abort may use them, and the name of the
        answer that several of them belong to."""
        self.counters.http.choices.observe(len(request_ids))
        parents = [_CHOICE_SUFFIX.sub("", request_id) for request_id in request_ids]
        self._name((*request_ids, *parents))

    def _name(self, names: Iterable[str]) -> None:
        """Names an abort may use."""
        if self._running is not None:
            self._running.add(self, names)

    def abort(self) -> bool:
        """End the request with an error, wherever it is. False when its answer is complete."""
        if self._task is None or self._is_aborted:
            return False
        self._is_aborted = True
        self._failure = RequestError(
            "request_aborted", "The request was ended by the server's operator."
        )
        self._task.cancel()
        return True

    def abort_others(self, name: str | None) -> int:
        """Abort all running requests of that name, or all there are; returns how many."""
        if self._running is None:
            return 0
        self._running.remove(self)
        return self._running.abort_all() if name is None else self._running.abort(name)

    def take_abort(self) -> NInferError | None:
        """The error of an abort that has just cancelled the task: it goes on to answer."""
        if not self._is_aborted or self._task is None:
            return None
        self._task.uncancel()
        self._task = None
        return self._failure

    def end(self) -> None:
        """Nothing can be aborted any more."""
        self._task = None
        if self._running is not None:
            self._running.remove(self)

    def check_model(self, name: str | None) -> str:
        """The name to echo. Raises `model_not_found` for another one when names are strict."""
        if self.options.strict_model and name not in self.served_names:
            raise RequestError("model_not_found", "The requested model does not exist.", "model")
        return name or self.served_name

    async def read(self, parse: Callable[[Fields], T]) -> T:
        """The body, checked by `parse` (a pure function: it may run in a thread)."""
        connection = self.request.protocol
        if isinstance(connection, Connection):
            connection.need_client()
        self._task = asyncio.current_task()
        self._name((self.request_id,))
        self._log.note_read()

        def note_and_parse(fields: Fields) -> tuple[T, tuple[str, ...]]:
            self._log.note_body(fields.values)
            return parse(fields), _own_names(fields)

        body = await read_json_body(self.request, self.limits, note_and_parse)
        self.counters.surrogates_replaced += body.surrogates_replaced
        value, names = body.value
        self._name(names)
        return value

    def json(
        self, payload: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        return web.Response(
            status=status,
            body=orjson.dumps(payload),
            content_type="application/json",
            headers={**(headers or {}), **self._headers},
        )

    def text(self, body: bytes, content_type: str) -> web.Response:
        """`content_type` with its parameters."""
        headers = {"Content-Type": content_type, **self._headers}
        return web.Response(body=body, headers=headers)

    def empty(self, headers: Mapping[str, str]) -> web.Response:
        """204: there is nothing to say but the headers."""
        return web.Response(status=204, headers={**headers, **self._headers})

    def error(self, error: Exception) -> web.Response:
        """The JSON answer for an exception, in the shape of the path's family; what is not the
        client's fault is logged."""
        self._report(error)
        self._log.note_error(error)
        answer = describe_error(error, family_of(self.path), self.request_id)
        response = self.json(answer.body, answer.status, answer.headers)
        if isinstance(error, NInferError) and error.code in _CLOSING_CODES:
            response.force_close()
            self.is_abandoned = error.code in _ABANDONING_CODES
        return response

    @asynccontextmanager
    async def stream(self, style: StreamStyle) -> AsyncIterator[EventStream]:
        """An event stream: begun on entry, completed on exit. An error inside is sent as its last
        event, as the style has it, and does not leave the block."""
        async with EventStream(self.request, self._headers, self.limits, style) as stream:
            try:
                yield stream
            except ConnectionError:
                raise
            except asyncio.CancelledError:
                abort = self.take_abort()
                if abort is None:
                    raise
                self._report(abort)
                await stream.send((style.failure(abort),))
            except Exception as error:  # noqa: BLE001  the top of a streamed answer
                self._report(error)
                self._failure = self._failure or (error if isinstance(error, NInferError) else None)
                await stream.send((style.failure(error),))
            self._task = None
            await stream.finish()
            self.answered = stream.response

    async def deliver(self, response: web.StreamResponse) -> None:
        """Send a whole answer; a client that does not take it in time is cut off."""
        self._task = None
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await response.prepare(self.request)
                await response.write_eof()
                self.answered = response
        except TimeoutError:
            transport = self.request.transport
            if transport is not None:
                transport.abort()
            raise ConnectionError("the client did not take the answer") from None

    def _report(self, error: Exception) -> None:
        """Log without the texts of foreign exceptions: they may quote the prompt."""
        self.counters.errors.note(error, self.path, self.request_id)
        self.counters.http.note_error(error)
        if is_expected(error):
            return
        text = error.message if isinstance(error, NInferError) else ""
        frames = "".join(traceback.format_tb(error.__traceback__))
        _logger.error(
            "request %s failed: %s %s\n%s", self.request_id, type(error).__name__, text, frames
        )


def _own_names(fields: Fields) -> tuple[str, ...]:
    """Names that the client gave its request; a wrong type is not ours to judge."""
    values = [fields.get(name) for name in _NAME_FIELDS]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return tuple(item for item in flat[:_MAX_NAMES] if isinstance(item, str))


Handler: TypeAlias = Callable[[Exchange], Awaitable[web.StreamResponse]]
