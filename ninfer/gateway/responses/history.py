"""What a request says of stored responses and items, resolved: the whole conversation.

previous_response_id -> its turns    item_reference -> that item    input -> as it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """What of the store a request builds on.

    before       the turn it goes on from, or None
    turns        those that stored items stand in, by the ids of the items
    session_key  names the conversation for the cache, or None for a new one
    """

    before: Turn | None = None
    turns: Mapping[str, Turn] = field(default_factory=dict)
    session_key: str | None = None

    @property
    def num_bytes(self) -> int:
        path = [] if self.before is None else self.before.path()
        return sum(turn.num_bytes for turn in (*path, *self.turns.values()))


@dataclass(frozen=True, slots=True)
class Conversation:
    """`said`: the request's own items, with what its references stand for."""

    messages: tuple[ChatMessage, ...]
    said: tuple[Mapping[str, Any], ...]


def find_history(store: ResponseStore, request: ResponsesRequest) -> History:
    """Raises RequestError `response_not_found` and `item_not_found`."""
    before, session_key = None, None
    if request.previous_response_id is not None:
        stored = store.get(request.previous_response_id, "previous_response_id")
        before, session_key = stored.turn, stored.session_key
    turns: dict[str, Turn] = {}
    for index, item in enumerate(request.items):
        if item.reference is not None:
            turns[item.reference] = _turn_of(store, item.reference, f"input[{index}].id")
    return History(before, turns, session_key)


def read_conversation(history: History, request: ResponsesRequest) -> Conversation:
    """Pure; takes time when the history is long."""
    turns = {id(turn): turn for turn in history.turns.values()}
    stored = {item["id"]: item for turn in turns.values() for item in turn_items(turn)}
    items = [
        item if item.reference is None else _stored_item(stored[item.reference], request.tools)
        for item in request.items
    ]
    meanings = [*_earlier_meanings(history, request.tools)]
    meanings += [meaning for item in items for meaning in item.meanings]
    return Conversation(assemble(request.instructions, meanings), tuple(item.raw for item in items))


def _turn_of(store: ResponseStore, item_id: str, path: str) -> Turn:
    turn = store.turn_of(item_id)
    if turn is None:
        raise RequestError("item_not_found", "There is no stored item with this id.", path)
    return turn


def _earlier_meanings(history: History, tools: ToolSet) -> Iterator[Meaning]:
    for turn in [] if history.before is None else history.before.path():
        for item in turn_items(turn):
            yield from _stored_item(item, tools).meanings


def _stored_item(item: Mapping[str, Any], tools: ToolSet) -> InputItem:
    return parse_item(Fields(item, "previous_response_id"), tools)
