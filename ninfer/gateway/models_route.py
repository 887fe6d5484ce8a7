"""/v1/models: one list that the client libraries of both API families can read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ninfer.contract.errors import RequestError
from ninfer.gateway.exchange import Exchange


async def list_models(exchange: Exchange) -> web.StreamResponse:
    """Never touches the engine, so it also answers while the model is loading."""
    entry = _entry(exchange)
    page = {"has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    return exchange.json({"object": "list", "data": [entry], **page})


async def get_model(exchange: Exchange) -> web.StreamResponse:
    """One entry; the id is the rest of the path and may contain slashes."""
    model_id = exchange.path.removeprefix("/models/")
    if model_id != exchange.served_name:
        raise RequestError("model_not_found", "The requested model does not exist.", "model")
    return exchange.json(_entry(exchange))


def _entry(exchange: Exchange) -> dict[str, Any]:
    card = exchange.lifecycle.card
    # One token of the context is always the other side's: of the answer, of the prompt.
    most_tokens = card.max_context - 1
    created_at = datetime.fromtimestamp(card.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": exchange.served_name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "ninfer",
        "root": card.name,
        "max_model_len": card.max_context,
        "type": "model",
        "display_name": exchange.served_name,
        "created_at": created_at,
        "lifecycle": "active",
        "max_input_tokens": most_tokens,
        "max_tokens": most_tokens,
    }
