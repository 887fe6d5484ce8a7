"""One TCP connection: deadline for headers, dead-peer detection, a cap on their number.

aiohttp's own keep-alive timer ends idle connections but would give a trickling header block as
long as an idle one; here a started request has its own, shorter deadline.

A client that shuts its sending side looks the same as one that has left, so a request with a body
is cancelled then, as other servers of models do: nobody may be there to read what it would cost.
Answers that need no body (health, models, errors) are still sent.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import orjson
from aiohttp import HttpVersion, HttpVersion10, web
from aiohttp.http_exceptions import BadHttpMessage, BadHttpMethod, LineTooLong

from ninfer.contract.errors import RequestError, Unavailable
from ninfer.gateway.answer_headers import answer_headers
from ninfer.gateway.errors import ErrorFamily, describe_error, family_of
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.request_ids import new_id

_logger = logging.getLogger(__name__)
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_LINGERING_S: Final = 2.0
_MAX_TARGET_BYTES: Final = 8_190
_MAX_HEADER_BYTES: Final = 16_380
"""Name and value of one header. Unlike the limit of the request line, which tells their errors
apart."""
_REQUEST_LINE: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?: (\S+) HTTP/1\.[01]\r?\n|\Z)")
"""A method and its target, or the beginning of a method that came alone."""
_TARGET: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ ([^\s?]+)")
"""A method and the path of its target, however the request goes on."""
MethodRefusal: TypeAlias = Callable[[str | None], RequestError]
ErrorNote: TypeAlias = Callable[[BaseException], None]


class Connection(web.RequestHandler):
    """A client connection. `begin_request` and `end_request` bracket every request on it.

    refuse_method   the error for a method that HTTP does not know, given the path if it is known
    note_error      is told of each error that is answered here
    """

    __slots__ = (
        "_gateway_limits",
        "_has_body_rest",
        "_has_half_closed",
        "_head",
        "_head_bytes",
        "_header_timer",
        "_is_serving",
        "_needs_client",
        "_note_error",
        "_num_answered",
        "_refuse_method",
    )

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: GatewayLimits,
        refuse_method: MethodRefusal,
        note_error: ErrorNote,
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.idle_timeout_s,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # None switches it off
            lingering_time=_LINGERING_S,
            logger=_logger,
            max_line_size=_MAX_TARGET_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
        self._gateway_limits = limits
        self._refuse_method = refuse_method
        self._note_error = note_error
        self._head = b""
        self._head_bytes = 0
        self._has_body_rest = False
        self._has_half_closed = False
        self._needs_client = False
        self._num_answered = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _tune_socket(transport, self._gateway_limits.user_timeout_s)
        self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_serving and self._header_timer is None:
            self._start_header_timer()
        if not self._is_serving:
            self._head = data[:_MAX_TARGET_BYTES]
        super().data_received(data)
        self._bound_head(len(data))

    def _bound_head(self, num_bytes: int) -> None:
        """Give up on a head that is too long before it is complete."""
        if self._request_count != self._num_answered or self._has_body_rest:
            self._head_bytes = 0
            return
        self._head_bytes += num_bytes
        if self._head_bytes > self._most_head_bytes:
            self._refuse(_long_headers(), self._family())

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own: keep it open?
        self._has_half_closed = True
        return not self._needs_client and self._num_answered < self._request_count

    def begin_request(self, version: HttpVersion) -> None:
        """Raises ConnectionError for a request line without a version: HTTP/0.9 has no status."""
        self._is_serving = True
        self._has_body_rest = False
        self._stop_header_timer()
        if version < HttpVersion10:
            error = RequestError("invalid_http", "The request line must name HTTP/1.1 or HTTP/1.0.")
            self._refuse(error, self._family())
            raise ConnectionResetError("a request without a version")
        self._head = b""

    @property
    def _most_head_bytes(self) -> int:
        return self._gateway_limits.max_header_bytes + _MAX_TARGET_BYTES

    def check_head(self, request: web.BaseRequest) -> None:
        """Raises RequestError: `headers_too_large` for many headers that are long together,
        `unsupported_transfer_encoding` for a coding below the chunks."""
        num_bytes = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
        if num_bytes > self._gateway_limits.max_header_bytes:
            raise _long_headers()
        codings = request.headers.get("Transfer-Encoding", "").split(",")
        if any(coding.strip().lower() not in ("", "chunked") for coding in codings):
            raise RequestError(
                "unsupported_transfer_encoding", "Transfer-Encoding must be chunked alone."
            )

    def need_client(self) -> None:
        """The rest of this request is only worth while if the client is there. Raises
        ConnectionError when it has left."""
        self._needs_client = True
        if self._has_half_closed:
            raise ConnectionResetError("the client closed its side")

    def end_request(self, *, has_body_rest: bool) -> None:
        """`has_body_rest`: more of the body may come, which nobody reads."""
        self._is_serving = False
        self._has_body_rest = has_body_rest
        self._needs_client = False
        self._num_answered += 1
        if self._has_half_closed and self._num_answered >= self._request_count:
            self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer for what never reached the gateway: text that is not HTTP."""
        if isinstance(exc, ConnectionError):
            raise exc  # nobody is there to answer
        if status == 500:
            _logger.error("request failed outside its handler: %s", type(exc).__name__)
            error: BaseException = exc or RuntimeError()
            family = family_of(request.path)
        else:
            error = self._parse_error(exc)
            family = self._family()
        if request.writer.output_size == 0:
            self._refuse(error, family)
        self.force_close()
        raise ConnectionError("nothing more to answer")

    def _parse_error(self, exc: BaseException | None) -> RequestError:
        if isinstance(exc, LineTooLong):
            if exc.args[1] == _MAX_TARGET_BYTES:
                return RequestError("uri_too_long", "The request line is too long.")
            return RequestError("headers_too_large", "A header is too long.")
        if isinstance(exc, BadHttpMessage) and exc.message.startswith("Too many headers"):
            return RequestError("headers_too_large", "There are too many headers.")
        if isinstance(exc, BadHttpMethod) and (line := _REQUEST_LINE.match(self._head)):
            target = line.group(1)
            path = None if target is None else target.decode("latin-1").partition("?")[0]
            return self._refuse_method(path)
        return RequestError("invalid_http", "The request is not valid HTTP.")

    def _family(self) -> ErrorFamily:
        """Of the request whose head is being read, as far as it is known."""
        match = _TARGET.match(self._head)
        return family_of(match.group(1).decode("latin-1") if match else None)

    def _start_header_timer(self) -> None:
        self._header_timer = self._loop.call_later(
            self._gateway_limits.header_timeout_s, self._on_header_timeout
        )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        error = RequestError("request_timeout", "The request's headers did not arrive in time.")
        self._refuse(error, self._family())

    def _refuse(self, error: BaseException, family: ErrorFamily) -> None:
        """Answer and close. Written by hand: there is no request yet, and aiohttp takes one that
        it could not read for HTTP/1.0."""
        if self.transport is None:
            return
        self._note_error(error)
        self.transport.write(_raw_answer(error, family))
        self.force_close()


class RefusedConnection(asyncio.Protocol):
    """A connection beyond the cap: told so and closed, without a parser or a task."""

    def __init__(self, note_error: ErrorNote) -> None:
        self._note_error = note_error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        error = Unavailable("server_overloaded", "Too many open connections.", 1.0)
        self._note_error(error)
        if isinstance(transport, asyncio.Transport):
            transport.write(_raw_answer(error))
        transport.close()


class ConnectionFactory:
    """Makes the protocol of each accepted connection."""

    def __init__(
        self,
        server: web.Server,
        limits: GatewayLimits,
        refuse_method: MethodRefusal,
        note_error: ErrorNote,
    ) -> None:
        self._server = server
        self._limits = limits
        self._refuse_method = refuse_method
        self._note_error = note_error
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> asyncio.Protocol:
        if len(self._server.connections) >= self._limits.max_connections:
            return RefusedConnection(self._note_error)
        return Connection(
            self._server, self._loop, self._limits, self._refuse_method, self._note_error
        )


def _long_headers() -> RequestError:
    return RequestError("headers_too_large", "The headers are too long together.")


def _raw_answer(error: BaseException, family: ErrorFamily = ErrorFamily.OPENAI) -> bytes:
    """A whole HTTP response for a connection that has no request to answer yet."""
    request_id = new_id("req_")
    answer = describe_error(error, family, request_id)
    body = orjson.dumps(answer.body)
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Date": formatdate(usegmt=True),
        "Connection": "close",
        **answer_headers(request_id),
        **answer.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    reason = HTTPStatus(answer.status).phrase
    return f"HTTP/1.1 {answer.status} {reason}\r\n{lines}\r\n".encode() + body


def _tune_socket(transport: asyncio.BaseTransport, user_timeout_s: float) -> None:
    """Notice dead peers; options a platform lacks are left alone."""
    sock: Any = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", int(user_timeout_s * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
