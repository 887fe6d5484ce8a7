"""/v1/load: how busy the server is, for routers and autoscalers."""

from __future__ import annotations

from aiohttp import web

from ninfer.gateway.exchange import Exchange


async def load(exchange: Exchange) -> web.StreamResponse:
    """Also while the model is loading; then nothing runs. Never waits for the engine."""
    health = exchange.lifecycle.health.value
    model = exchange.lifecycle.model
    if model is None:
        return exchange.json({"status": health, "server_load": 0, "num_reqs": 0})
    status = model.engine.status()
    return exchange.json(
        {
            "status": health,
            "server_load": status.outstanding,
            "num_reqs": status.running + status.waiting,
            "num_running_reqs": status.running,
            "num_waiting_reqs": status.waiting,
            "max_running_reqs": status.max_concurrency,
            "max_waiting_reqs": status.max_pending,
            "kv_pages_used": status.pages_used,
            "kv_pages": status.pages_total,
            "token_usage": status.pages_used / status.pages_total if status.pages_total else 0.0,
            "http_requests": exchange.counters.exchanges_active,
        }
    )
