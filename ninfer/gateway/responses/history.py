"""What a request says of stored responses and items, resolved: the whole conversation.

previous_response_id -> its turns    item_reference -> that item    input -> as it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ninfer.contract.chat import ChatMessage
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.media.references import MediaReference
from ninfer.gateway.responses.conversation import assemble
from ninfer.gateway.responses.input_items import InputItem, ItemReader
from ninfer.gateway.responses.request import ResponsesRequest
from ninfer.gateway.responses.store import ResponseStore, Turn, turn_items


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
    """`said`: the request's own items, with what its references stand for. `media`: what the
    media parts of the messages stand for, in their order."""

    messages: tuple[ChatMessage, ...]
    said: tuple[InputItem, ...]
    media: tuple[MediaReference, ...] = ()


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
    said = [
        item
        if item.reference is None
        else request.reader.read(Fields(stored[item.reference], f"input[{index}]"))
        for index, item in enumerate(request.items)
    ]
    items = [*_earlier_items(history, request.reader), *said]
    meanings = (meaning for item in items for meaning in item.meanings)
    return Conversation(
        messages=assemble(request.instructions, meanings),
        said=tuple(said),
        media=tuple(reference for item in items for reference in item.media),
    )


def _turn_of(store: ResponseStore, item_id: str, path: str) -> Turn:
    turn = store.turn_of(item_id)
    if turn is None:
        raise RequestError("item_not_found", "There is no stored item with this id.", path)
    return turn


def _earlier_items(history: History, reader: ItemReader) -> Iterator[InputItem]:
    turns = [] if history.before is None else history.before.path()
    items = (item for turn in turns for item in turn_items(turn))
    for index, item in enumerate(items):
        yield reader.read(Fields(item, f"previous_response_id[{index}]"))
