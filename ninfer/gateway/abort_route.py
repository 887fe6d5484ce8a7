"""/abort_request: end requests from outside."""

from __future__ import annotations

from aiohttp import web

from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields, invalid_value, missing

_NAMES = ("rid", "request_id")


async def abort_request(exchange: Exchange) -> web.StreamResponse:
    """By `rid` or `request_id` (the client's own, the answer's, or `x-request-id`), or all there
    are by `abort_all`. A name that nobody has ends nothing. Raises RequestError."""
    name = await exchange.read(_parse)
    return exchange.json({"status": "ok", "aborted": exchange.abort_others(name)})


def _parse(fields: Fields) -> str | None:
    """The name; None for all."""
    given = [fields.string(name) for name in _NAMES]
    if fields.flag("abort_all"):
        return None
    names = [name for name in given if name is not None]
    if not names:
        raise missing(_NAMES[0])
    if not names[0]:
        raise invalid_value(_NAMES[0], "must not be empty")
    return names[0]
