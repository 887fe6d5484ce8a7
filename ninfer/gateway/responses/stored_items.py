"""A response as it is kept. Its items all have a type, an id and, for messages, parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ninfer.gateway.responses.store import StoredResponse, Turn

_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
_CALLS: Final = ("function_call", "custom_tool_call")


@dataclass(frozen=True, slots=True)
class StoredInput:
    """What a request said, as it is kept: a JSON list and the ids in it."""

    items: bytes
    item_ids: tuple[str, ...]


def stored_input(response_id: str, said: Iterable[Mapping[str, Any]]) -> StoredInput:
    """Ids of new items follow from the response's. Takes time when much was said."""
    tail = response_id.rpartition("_")[2]
    items = [_with_id(item, f"{tail}_{index}") for index, item in enumerate(said)]
    return StoredInput(orjson.dumps(items), tuple(item["id"] for item in items))


def stored_response(
    before: Turn | None, said: StoredInput, response: Mapping[str, Any], session_key: str
) -> StoredResponse:
    """`said`: what the response answers, behind the turn `before`. Calls that were cut off are no
    history."""
    outputs = [item for item in response["output"] if not _is_cut_call(item)]
    item_ids = (*said.item_ids, *(item["id"] for item in outputs))
    turn = Turn(before, said.items, orjson.dumps(outputs), item_ids)
    return StoredResponse(orjson.dumps(response), turn, session_key)


def _with_id(item: Mapping[str, Any], tail: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    own = item.get("id")
    item_id = own if isinstance(own, str) and own else _PREFIXES.get(kind, "item_") + tail
    stored = {**item, "id": item_id, "type": kind}
    if kind == "message":
        stored["content"] = _parts(item)
        stored.setdefault("status", "completed")
    return stored


def _parts(item: Mapping[str, Any]) -> list[Any]:
    content = item.get("content")
    if isinstance(content, list):
        return content
    if not content:
        return []
    if item.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


def _is_cut_call(item: Mapping[str, Any]) -> bool:
    return item.get("type") in _CALLS and item.get("status") == "incomplete"
