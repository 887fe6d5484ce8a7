"""Deltas of the engine -> items of the answer and the events that tell of them.

One item is open at a time. Blanks between items are none of their own: text that is only blanks is
held until something else is said, and dropped when nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import OutputDelta
from ninfer.gateway.answer_parts import chat_logprob_entry
from ninfer.gateway.responses.output_items import (
    CallItem,
    Event,
    MessageItem,
    OutputItem,
    ReasoningItem,
    call_item,
)
from ninfer.gateway.responses.tools import ToolSet


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputView:
    """What of the output a client wants to see, and how."""

    hides_reasoning: bool = False
    has_summary: bool = False
    seals_reasoning: bool = False
    has_logprobs: bool = False


class OutputRecorder:
    """`token_bytes`: the bytes of a token, for logprobs."""

    def __init__(
        self, view: OutputView, tools: ToolSet, token_bytes: Callable[[int], bytes]
    ) -> None:
        self._view = view
        self._tools = tools
        self._token_bytes = token_bytes
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._channel = ""
        self._blanks = ""
        """Text of the channel that is held, for it is only blanks."""
        self._waiting: list[dict[str, Any]] = []
        """Logprobs of tokens whose text is held, or that have none."""

    def output(self) -> list[dict[str, Any]]:
        return [item.as_json() for item in self._items]

    def add(self, deltas: Iterable[OutputDelta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            self._enter(delta.channel)
            if delta.channel == "call":
                events += self._add_call(delta)
            elif delta.channel == "content":
                events += self._add_content(delta)
            elif not self._view.hides_reasoning:
                events += self._add_reasoning(delta.text)
        return events

    def finish(self, *, is_cut: bool) -> list[Event]:
        """No more deltas come; `is_cut`: not because the answer was complete. A call that is still
        open is cut in any case."""
        return self._close_open(is_cut=is_cut)

    def _add_reasoning(self, text: str) -> list[Event]:
        if isinstance(self._open, ReasoningItem):
            return self._open.append(text) if text else []
        text = self._said(text)
        if not text:
            return []
        item = ReasoningItem(
            len(self._items),
            has_summary=self._view.has_summary,
            is_sealed=self._view.seals_reasoning,
        )
        return [*self._begin(item), *item.append(text)]

    def _add_content(self, delta: OutputDelta) -> list[Event]:
        if self._view.has_logprobs:
            self._waiting += [
                chat_logprob_entry(token, self._token_bytes) for token in delta.tokens
            ]
        if isinstance(self._open, MessageItem):
            return self._open.append(delta.text, self._take_waiting()) if delta.text else []
        text = self._said(delta.text)
        if not text:
            return []
        item = MessageItem(len(self._items), has_logprobs=self._view.has_logprobs)
        return [*self._begin(item), *item.append(text, self._take_waiting())]

    def _add_call(self, delta: OutputDelta) -> list[Event]:
        mark = delta.call
        if mark is None:
            raise InvariantError("a delta of a call does not say of which")
        events: list[Event] = []
        if mark.begins:
            events += self._begin(call_item(len(self._items), self._tools.of_call(mark.name)))
        item = self._open
        if not isinstance(item, CallItem):
            raise InvariantError("a call goes on that has not begun")
        events += item.append(delta.text)
        if mark.ends:
            self._open = None
            events += item.end()
        return events

    def _enter(self, channel: str) -> None:
        """What is held of another channel will never be said, unless its item is open."""
        if channel == self._channel:
            return
        self._channel, self._blanks = channel, ""
        if not isinstance(self._open, MessageItem):
            self._waiting = []

    def _said(self, text: str) -> str:
        """The text behind what was held, or nothing as long as all of it is blanks."""
        self._blanks += text
        if self._blanks.isspace() or not self._blanks:
            return ""
        text, self._blanks = self._blanks, ""
        return text

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._close_open(is_cut=False)
        self._items.append(item)
        self._open = item
        return [*events, *item.begin()]

    def _close_open(self, *, is_cut: bool) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        if isinstance(item, MessageItem):
            item.add_logprobs(self._take_waiting())
        return item.cut() if is_cut or isinstance(item, CallItem) else item.end()

    def _take_waiting(self) -> list[dict[str, Any]]:
        waiting, self._waiting = self._waiting, []
        return waiting
