"""Tool calls on a terminal: `name({"key": "value"})`, a line each."""

from __future__ import annotations

from ninfer.contract.chat import ToolCall
from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import OutputDelta


class CallTexts:
    """Turns the deltas of calls into text to show, and remembers the calls."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, list[str]]] = []
        self._complete: set[int] = set()

    def add(self, delta: OutputDelta) -> str:
        """What to show of a delta."""
        mark = delta.call
        if mark is None:
            raise InvariantError("the text of a call comes without its mark")
        if mark.begins:
            self._calls.append((mark.name, []))
        self._calls[mark.index][1].append(delta.text)
        if mark.ends:
            self._complete.add(mark.index)
        head = f"{mark.name}(" if mark.begins else ""
        return head + delta.text + (")\n" if mark.ends else "")

    def complete(self) -> tuple[ToolCall, ...]:
        """Those that were not cut off."""
        return tuple(
            ToolCall(name, "".join(texts))
            for index, (name, texts) in enumerate(self._calls)
            if index in self._complete
        )
