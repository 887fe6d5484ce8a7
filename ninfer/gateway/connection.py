"""One TCP connection: deadline for headers, dead-peer detection, a cap on their number.

aiohttp's own keep-alive timer ends idle connections but would give a trickling header block as
long as an idle one; here a started request has its own, shorter deadline.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, Final

import orjson
from aiohttp import web

from ninfer.contract.errors import RequestError, Unavailable
from ninfer.gateway.errors import describe_error
from ninfer.gateway.limits import GatewayLimits
from ninfer.gateway.request_ids import new_id

_logger = logging.getLogger(__name__)
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_LINGERING_S: Final = 2.0


class Connection(web.RequestHandler):
    """A client connection. `begin_request` and `end_request` bracket every request on it."""

    __slots__ = ("_gateway_limits", "_header_timer", "_is_serving")

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, limits: GatewayLimits
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.idle_timeout_s,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # None switches it off
            lingering_time=_LINGERING_S,
            logger=_logger,
        )
        self._gateway_limits = limits
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
        super().data_received(data)

    def begin_request(self) -> None:
        self._is_serving = True
        self._stop_header_timer()

    def end_request(self) -> None:
        self._is_serving = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer for what never reached the gateway: text that is not HTTP."""
        if status == 500:
            _logger.error("request failed outside its handler: %s", type(exc).__name__)
            error: BaseException = exc or RuntimeError()
        else:
            error = RequestError("invalid_http", "The request is not valid HTTP.")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has already begun")
        answer = describe_error(error)
        request_id = new_id("req_")
        response = web.Response(
            status=answer.status,
            body=orjson.dumps(answer.body),
            content_type="application/json",
            headers={"x-request-id": request_id, "request-id": request_id},
        )
        response.force_close()
        return response

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
        transport = self.transport
        if transport is None:
            return
        error = RequestError("request_timeout", "The request's headers did not arrive in time.")
        transport.write(_raw_answer(error))
        self.force_close()


class RefusedConnection(asyncio.Protocol):
    """A connection beyond the cap: told so and closed, without a parser or a task."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        error = Unavailable("server_overloaded", "Too many open connections.", 1.0)
        if isinstance(transport, asyncio.Transport):
            transport.write(_raw_answer(error))
        transport.close()


class ConnectionFactory:
    """Makes the protocol of each accepted connection."""

    def __init__(self, server: web.Server, limits: GatewayLimits) -> None:
        self._server = server
        self._limits = limits
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> asyncio.Protocol:
        if len(self._server.connections) >= self._limits.max_connections:
            return RefusedConnection()
        return Connection(self._server, self._loop, self._limits)


def _raw_answer(error: Exception) -> bytes:
    """A whole HTTP response for a connection that has no request to answer yet."""
    answer = describe_error(error)
    body = orjson.dumps(answer.body)
    request_id = new_id("req_")
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        "x-request-id": request_id,
        "request-id": request_id,
        **answer.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n{lines}\r\n".encode() + body


_REASONS: Final = {408: "Request Timeout", 429: "Too Many Requests"}


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
