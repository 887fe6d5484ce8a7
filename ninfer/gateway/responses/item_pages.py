"""Pages of the items that a stored response was made from, newest first unless asked otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from ninfer.gateway.fields import Fields, as_integer, invalid_type, invalid_value
from ninfer.gateway.responses.store import Turn, turn_items

MAX_LIMIT: Final = 100
_DEFAULT_LIMIT: Final = 20
_MAX_DIGITS: Final = 18
ORDERS: Final = ("asc", "desc")


def item_page(turn: Turn, query: Mapping[str, str]) -> dict[str, Any]:
    """Raises RequestError naming the field of the query: `limit`, `order`, `after`."""
    items = _input_items(turn)
    if Fields(query).choice("order", ORDERS) != "asc":
        items.reverse()
    limit = _limit(query.get("limit"))
    start = _start(items, query.get("after"))
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "has_more": start + limit < len(items),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _input_items(turn: Turn) -> list[dict[str, Any]]:
    *earlier, last = turn.path()
    items = [item for before in earlier for item in turn_items(before)]
    return [*items, *orjson.loads(last.said)]


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise invalid_type("limit", "an integer", text)
    return as_integer(int(text), "limit", 1, MAX_LIMIT)


def _start(items: list[dict[str, Any]], after: str | None) -> int:
    """Behind the item `after`; items of one id are taken for the last of them."""
    if after is None:
        return 0
    places = [index for index, item in enumerate(items) if item["id"] == after]
    if not places:
        raise invalid_value("after", "must be the id of one of the items")
    return places[-1] + 1
