"""The Gateway: every HTTP request enters here and leaves as one answer.

    Connection -> Gateway.handle -> Router -> protocol handler -> answer
                        \\_ any exception -> JSON error answer

It exists before the model does: the port answers /health and /v1/models while the model loads;
`attach` adds what generation needs.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from aiohttp import web

from ninfer.contract.errors import RequestError
from ninfer.contract.model import ModelCard
from ninfer.gateway import (
    abort_route,
    health,
    load_route,
    metrics_route,
    models_route,
    native,
    openai_chat,
    openai_completions,
    server_info,
    tokenize_routes,
)
from ninfer.gateway.anthropic import routes as anthropic_routes
from ninfer.gateway.auth import read_authentication
from ninfer.gateway.connection import Connection
from ninfer.gateway.cors import CorsPolicy
from ninfer.gateway.counters import GatewayCounters
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.lifecycle import Lifecycle, ServedModel
from ninfer.gateway.limits import GatewayLimits, limits_from
from ninfer.gateway.media.desk import MediaDesk, open_media_desk
from ninfer.gateway.openapi.document import OpenApiDocument
from ninfer.gateway.openapi.operations import PUBLISHED_PATHS
from ninfer.gateway.page.routes import PREFIX as PAGE_PREFIX
from ninfer.gateway.page.routes import Page
from ninfer.gateway.page.status import status
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.responses.routes import ResponsesApi
from ninfer.gateway.router import Router, normalise_path
from ninfer.gateway.running import RunningRequests
from ninfer.options import ServeOptions

_OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/live"})


class Gateway:
    """The HTTP surface of one model.

    card     what /v1/models says until a model is attached (its max_context may be provisional)
    limits   deadlines and sizes; by default those of the options
    log      where a line a request goes, if anywhere; its owner closes it
    media    acquires pictures and videos; by default as the options have it
    Raises OptionError for API keys that cannot be read.
    """

    def __init__(
        self,
        options: ServeOptions,
        card: ModelCard,
        *,
        limits: GatewayLimits | None = None,
        log: RequestLog | None = None,
        media: MediaDesk | None = None,
    ) -> None:
        self.options = options
        self.limits = limits or limits_from(options)
        self.lifecycle = Lifecycle(card)
        self.counters = GatewayCounters()
        self.running = RunningRequests()
        self._log = log
        self._authentication = read_authentication(options)
        self._cors = CorsPolicy(options.cors_origins)
        self._media = media or open_media_desk(options)
        self._router = _make_router()

    def attach(self, model: ServedModel) -> None:
        """The model is loaded and warm: from now on requests are served."""
        self.lifecycle.attach(model)

    @property
    def is_protected(self) -> bool:
        """Requests need an API key."""
        return self._authentication.is_required

    @property
    def router(self) -> Router:
        """Every route there is."""
        return self._router

    def refuse_method(self, path: str | None) -> RequestError:
        """The error for a method that HTTP does not know, on a request path if that is known."""
        return self._router.refusal(None if path is None else normalise_path(path))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises only ConnectionError and CancelledError."""
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.begin_request(request.version)
        exchange = self._exchange(request)
        self.counters.exchanges_active += 1
        self.counters.exchanges_total += 1
        start_s = time.monotonic()
        try:
            return await self._answer(exchange)
        except (asyncio.CancelledError, ConnectionError):
            self.counters.aborts += exchange.answered is None
            raise
        finally:
            self.counters.exchanges_active -= 1
            route = self._router.route_of(normalise_path(request.path))
            handler = PUBLISHED_PATHS.get(route, route)
            seconds = time.monotonic() - start_s
            status = None if exchange.answered is None else exchange.answered.status
            self.counters.http.note_answered(handler, request.method, status, seconds)
            if isinstance(connection, Connection):
                connection.end_request(has_body_rest=not request.content.is_eof())

    def _exchange(self, request: web.BaseRequest) -> Exchange:
        return Exchange(
            request, normalise_path(request.path), self.lifecycle, self.options, self.limits,
            self.counters, self._log,
            running=self.running, headers=self._cors.headers(request), media=self._media,
        )  # fmt: skip

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        try:
            response = await self._respond(exchange)
            await exchange.deliver(response)
        finally:
            exchange.end()
        if exchange.is_abandoned:
            exchange.request.protocol.force_close()
        return response

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        try:
            connection = exchange.request.protocol
            if isinstance(connection, Connection):
                connection.check_head(exchange.request)
            if exchange.request.method == "OPTIONS":
                return self._preflight(exchange)
            if not self._is_open(exchange.path):
                self._authentication.check(exchange.request)
            handler = self._router.resolve(exchange.request.method, exchange.path)
            return await handler(exchange)
        except ConnectionError:
            raise
        except asyncio.CancelledError:
            abort = exchange.take_abort()
            if abort is None:
                raise
            return exchange.error(abort)
        except Exception as error:  # noqa: BLE001  the top of a request
            return exchange.error(error)

    def _preflight(self, exchange: Exchange) -> web.StreamResponse:
        """What a path takes; a browser asks before a page may use it."""
        allowed = self._router.allowed(exchange.path)
        headers = self._cors.preflight_headers(exchange.request, allowed)
        return exchange.empty({"Allow": allowed, **headers})

    def _is_open(self, path: str) -> bool:
        """Without a key: probes, and the page, which asks its user for one."""
        if path == "/metrics":
            return not self.options.protect_metrics
        return path in _OPEN_PATHS or path.startswith(PAGE_PREFIX)


def _make_router() -> Router:
    page, responses, openapi = Page(), ResponsesApi(), OpenApiDocument()
    exact = {
        "/": {"GET": page.index},
        "/health": {"GET": health.health},
        "/ready": {"GET": health.health},
        "/live": {"GET": health.live},
        "/version": {"GET": health.version},
        "/status": {"GET": status},
        "/metrics": {"GET": metrics_route.metrics},
        "/openapi.json": {"GET": openapi.answer},
        "/load": {"GET": load_route.load},
        "/server_info": {"GET": server_info.server_info},
        "/get_server_info": {"GET": server_info.server_info},
        "/flush_cache": {"POST": metrics_route.flush_cache},
        "/abort_request": {"POST": abort_route.abort_request},
        "/models": {"GET": models_route.list_models},
        "/messages": {"POST": anthropic_routes.create_message},
        "/messages/count_tokens": {"POST": anthropic_routes.count_tokens},
        "/chat/completions": {"POST": openai_chat.chat_completions},
        "/completions": {"POST": openai_completions.completions},
        "/generate": {"POST": native.generate},
        "/tokenize": {"POST": tokenize_routes.tokenize},
        "/detokenize": {"POST": tokenize_routes.detokenize},
        "/apply-template": {"POST": tokenize_routes.apply_template},
        "/responses": {"POST": responses.create},
        "/responses/input_tokens": {"POST": responses.count_tokens},
    }
    prefixes = {"/models/": {"GET": models_route.get_model}, PAGE_PREFIX: {"GET": page.file}}
    patterns = {
        "/responses/{id}": {"GET": responses.retrieve, "DELETE": responses.delete},
        "/responses/{id}/input_items": {"GET": responses.input_items},
        "/responses/{id}/cancel": {"POST": responses.cancel},
    }
    return Router(exact, prefixes, patterns)
