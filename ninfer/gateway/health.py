"""/health, /ready, /live, /version and /: small answers that never wait for the engine."""

from __future__ import annotations

from aiohttp import web

import ninfer
from ninfer.contract.generation import EngineHealth
from ninfer.gateway.errors import retry_after_header
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.lifecycle import RETRY_AFTER_S


async def health(exchange: Exchange) -> web.StreamResponse:
    """200 while requests are welcome, also when the queue is full; 503 otherwise."""
    state = exchange.lifecycle.health
    if state is EngineHealth.READY:
        return exchange.json({"status": state.value})
    headers = {"x-should-retry": "true", **retry_after_header(RETRY_AFTER_S[state])}
    return exchange.json({"status": state.value}, 503, headers)


async def live(exchange: Exchange) -> web.StreamResponse:
    """200 until the process exits."""
    return exchange.json({"status": "ok"})


async def version(exchange: Exchange) -> web.StreamResponse:
    return exchange.json({"version": ninfer.__version__})


async def index(exchange: Exchange) -> web.StreamResponse:
    """Something for probes of the base URL."""
    return exchange.json({"name": "ninfer", "version": ninfer.__version__})
