"""Responses that are kept, so that a later request can go on from them: in memory, bounded.

    Turn <- Turn <- Turn         what each request said and what it was answered, as JSON
     ^        ^       ^
     r1       r2      r3         responses, least recently used first

A response keeps its turn, and a turn the one before it. What is dropped is the response that was
not used for longest; a turn goes when nothing stands on it any more. Bytes are those of the JSON.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from ninfer.contract.errors import RequestError

MAX_RESPONSES: Final = 1024
MAX_BYTES: Final = 256 * 2**20
_TURN_BYTES: Final = 1024
"""Counted for a turn on top of its JSON: objects and index entries."""


@dataclass(slots=True, eq=False)
class Turn:
    """What one request added to a conversation.

    said, answered   JSON lists of input and output items, all with ids
    num_users        responses and later turns that stand on it
    """

    before: Turn | None
    said: bytes
    answered: bytes
    item_ids: tuple[str, ...]
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.said) + len(self.answered) + _TURN_BYTES

    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        turns = list(_upwards(self))
        turns.reverse()
        return turns


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """`body`: the response as JSON. `session_key`: names its conversation for the cache."""

    body: bytes = field(repr=False)
    turn: Turn
    session_key: str


class ResponseStore:
    """Used from the event loop only."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._turn_of_item: dict[str, Turn] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises RequestError `response_not_found` naming `param`."""
        stored = self._responses.get(response_id)
        if stored is None:
            raise _not_found(param)
        self._responses.move_to_end(response_id)
        return stored

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, and drop others while there is too much."""
        self._responses[response_id] = stored
        self._num_bytes += len(stored.body)
        self._hold(stored.turn)
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._responses)))

    def delete(self, response_id: str) -> None:
        """Raises RequestError `response_not_found`. Later responses keep what they stand on."""
        if response_id not in self._responses:
            raise _not_found(None)
        self._drop(response_id)

    def turn_of(self, item_id: str) -> Turn | None:
        """The turn that an item stands in, the latest of several."""
        return self._turn_of_item.get(item_id)

    def _drop(self, response_id: str) -> None:
        stored = self._responses.pop(response_id)
        self._num_bytes -= len(stored.body)
        self._release(stored.turn)

    def _hold(self, turn: Turn) -> None:
        """One more stands on the turn; one that was given up meanwhile comes back."""
        for item in _upwards(turn):
            item.num_users += 1
            if item.num_users > 1:
                return
            self._num_bytes += item.num_bytes
            self._turn_of_item |= dict.fromkeys(item.item_ids, item)

    def _release(self, turn: Turn) -> None:
        for item in _upwards(turn):
            item.num_users -= 1
            if item.num_users:
                return
            self._num_bytes -= item.num_bytes
            for item_id in item.item_ids:
                if self._turn_of_item.get(item_id) is item:
                    del self._turn_of_item[item_id]


def turn_items(turn: Turn) -> list[dict[str, Any]]:
    return [*orjson.loads(turn.said), *orjson.loads(turn.answered)]


def _upwards(turn: Turn) -> Iterator[Turn]:
    current: Turn | None = turn
    while current is not None:
        yield current
        current = current.before


def _not_found(param: str | None) -> RequestError:
    return RequestError("response_not_found", "There is no stored response with this id.", param)
