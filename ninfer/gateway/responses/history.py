"""What a request says of stored responses and items, resolved: the whole conversation.

previous_response_id -> its turns    item_reference -> that item    input -> as it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer.contract.chat import ChatMessage
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.responses.conversation import assemble
from ninfer.gateway.responses.input_items import InputItem, Meaning, parse_item
from ninfer.gateway.responses.request import ResponsesRequest
from ninfer.gateway.responses.store import ResponseStore, Turn, turn_items
from ninfer.gateway.responses.tools import ToolSet


@dataclass(frozen=True, slots=True)
class History:
    """What of the store a request builds on. Holds no reference into the store that may change.

    before       the turn it goes on from, or None
    referenced   stored items by their ids
    session_key  names the conversation for the cache, or None for a new one
    """

    before: Turn | None = None
    referenced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    session_key: str | None = None

    @property
    def num_bytes(self) -> int:
        path = [] if self.before is None else self.before.path()
        return sum(turn.num_bytes for turn in path)


def find_history(store: ResponseStore, request: ResponsesRequest) -> History:
    """Raises RequestError `response_not_found` and `item_not_found`."""
    before, session_key = None, None
    if request.previous_response_id is not None:
        stored = store.get(request.previous_response_id, "previous_response_id")
        before, session_key = stored.turn, stored.session_key
    wanted = [item.reference for item in request.items if item.reference is not None]
    referenced = store.items(wanted) if wanted else {}
    for index, item in enumerate(request.items):
        if item.reference is not None and item.reference not in referenced:
            path = f"input[{index}].id"
            raise RequestError("item_not_found", "There is no stored item with this id.", path)
    return History(before, referenced, session_key)


def messages_of(history: History, request: ResponsesRequest) -> tuple[ChatMessage, ...]:
    """The conversation to answer. Pure; takes time when the history is long."""
    return assemble(request.instructions, _meanings(history, request))


def said_items(history: History, items: Sequence[InputItem]) -> list[Mapping[str, Any]]:
    """The request's own items as they are kept, with what references stand for."""
    return [
        item.raw if item.reference is None else history.referenced[item.reference] for item in items
    ]


def _meanings(history: History, request: ResponsesRequest) -> Iterator[Meaning]:
    tools = request.tools
    for turn in [] if history.before is None else history.before.path():
        for stored in turn_items(turn):
            yield from _stored_meanings(stored, tools)
    for item in request.items:
        if item.reference is None:
            yield from item.meanings
        else:
            yield from _stored_meanings(history.referenced[item.reference], tools)


def _stored_meanings(item: Mapping[str, Any], tools: ToolSet) -> tuple[Meaning, ...]:
    return parse_item(Fields(item, "previous_response_id"), tools).meanings
