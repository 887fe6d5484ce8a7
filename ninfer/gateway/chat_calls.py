"""Tool calls of chat answers: collected into a message, or as the deltas of a stream.

A call gets its id once, when it begins. One that is cut off is no part of a collected message; in a
stream its pieces are out already, and the finish reason tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import CallMark, OutputDelta
from ninfer.gateway.request_ids import new_id


def call_mark(delta: OutputDelta) -> CallMark:
    if delta.call is None:
        raise InvariantError("the text of a call comes without its mark")
    return delta.call


@dataclass(slots=True)
class _Call:
    name: str
    call_id: str
    texts: list[str] = field(default_factory=list)
    is_complete: bool = False

    def entry(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.texts)}
        return {"id": self.call_id, "type": "function", "function": function}


class CallCollector:
    """The calls of one choice."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, delta: OutputDelta) -> None:
        mark = call_mark(delta)
        if mark.begins:
            self._calls.append(_Call(mark.name, new_id("call_")))
        call = self._calls[mark.index]
        call.texts.append(delta.text)
        call.is_complete |= mark.ends

    def entries(self) -> list[dict[str, Any]]:
        """`tool_calls` of the message: the complete ones."""
        return [call.entry() for call in self._calls if call.is_complete]


class CallDeltas:
    """Turns what is known of the calls of one choice into deltas of a stream.

    has_complete   whether any call is complete
    """

    def __init__(self) -> None:
        self.has_complete = False

    def of(self, delta: OutputDelta) -> Iterator[dict[str, Any]]:
        """Id, type and name come once and first; accumulators join strings that come again."""
        mark = call_mark(delta)
        self.has_complete |= mark.ends
        if mark.begins:
            function = {"name": mark.name, "arguments": ""}
            call_id = new_id("call_")
            yield _delta({"index": mark.index, "id": call_id, "type": "function"}, function)
        if delta.text:
            yield _delta({"index": mark.index}, {"arguments": delta.text})


def _delta(call: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{**call, "function": function}]}
