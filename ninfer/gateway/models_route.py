"""/v1/models: an entry for each name, in a list that client libraries of both API families read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ninfer.contract.errors import RequestError
from ninfer.gateway.exchange import Exchange


async def list_models(exchange: Exchange) -> web.StreamResponse:
    """Never touches the engine, so it also answers while the model is loading."""
    names = exchange.served_names
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return exchange.json({"object": "list", "data": [_entry(exchange, n) for n in names], **page})


async def get_model(exchange: Exchange) -> web.StreamResponse:
    """One entry; the id is the rest of the path and may contain slashes."""
    model_id = exchange.path.removeprefix("/models/")
    if model_id not in exchange.served_names:
        raise RequestError("model_not_found", "The requested model does not exist.", "model")
    return exchange.json(_entry(exchange, model_id))


def _entry(exchange: Exchange, name: str) -> dict[str, Any]:
    card = exchange.lifecycle.card
    # One token of the context is always the other side's: of the answer, of the prompt.
    most_tokens = card.max_context - 1
    created_at = datetime.fromtimestamp(card.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "ninfer",
        "root": card.name,
        "max_model_len": card.max_context,
        "type": "model",
        "display_name": name,
        "created_at": created_at,
        "lifecycle": "active",
        "max_input_tokens": most_tokens,
        "max_tokens": most_tokens,
    }
