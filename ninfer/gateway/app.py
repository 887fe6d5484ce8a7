"""The Gateway: every HTTP request enters here and leaves as one answer.

    Connection -> Gateway.handle -> Router -> protocol handler -> answer
                        \\_ any exception -> JSON error answer

It exists before the model does: the port answers /health and /v1/models while the model loads;
`attach` adds what generation needs.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from ninfer.contract.errors import RequestError
from ninfer.contract.model import ModelCard
from ninfer.gateway import health, metrics_route, models_route, native, openai_chat
from ninfer.gateway.connection import Connection
from ninfer.gateway.counters import GatewayCounters
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.lifecycle import Lifecycle, ServedModel
from ninfer.gateway.limits import GatewayLimits, limits_from
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.router import Router, normalise_path
from ninfer.options import ServeOptions


class Gateway:
    """The HTTP surface of one model.

    card     what /v1/models says until a model is attached (its max_context may be provisional)
    limits   deadlines and sizes; by default those of the options
    log      where a line a request goes, if anywhere; its owner closes it
    """

    def __init__(
        self,
        options: ServeOptions,
        card: ModelCard,
        *,
        limits: GatewayLimits | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.options = options
        self.limits = limits or limits_from(options)
        self.lifecycle = Lifecycle(card)
        self.counters = GatewayCounters()
        self._log = log
        self._router = _make_router()

    def attach(self, model: ServedModel) -> None:
        """The model is loaded and warm: from now on requests are served."""
        self.lifecycle.attach(model)

    def refuse_method(self, path: str | None) -> RequestError:
        """The error for a method that HTTP does not know, on a request path if that is known."""
        return self._router.refusal(None if path is None else normalise_path(path))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises only ConnectionError and CancelledError."""
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.begin_request(request.version)
        self.counters.exchanges_active += 1
        self.counters.exchanges_total += 1
        try:
            return await self._answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.counters.aborts += 1
            raise
        finally:
            self.counters.exchanges_active -= 1
            if isinstance(connection, Connection):
                connection.end_request()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = normalise_path(request.path)
        exchange = Exchange(
            request, path, self.lifecycle, self.options, self.limits, self.counters, self._log
        )
        try:
            handler = self._router.resolve(request.method, path)
            response = await handler(exchange)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  the top of a request
            response = exchange.error(error)
        await exchange.deliver(response)
        if exchange.is_abandoned:
            request.protocol.force_close()
        return response


def _make_router() -> Router:
    exact = {
        "/": {"GET": health.index},
        "/health": {"GET": health.health},
        "/ready": {"GET": health.health},
        "/live": {"GET": health.live},
        "/version": {"GET": health.version},
        "/metrics": {"GET": metrics_route.metrics},
        "/flush_cache": {"POST": metrics_route.flush_cache},
        "/models": {"GET": models_route.list_models},
        "/chat/completions": {"POST": openai_chat.chat_completions},
        "/generate": {"POST": native.generate},
    }
    return Router(exact, {"/models/": {"GET": models_route.get_model}})
