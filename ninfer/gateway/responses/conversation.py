"""Meanings of items -> the turns of a conversation.

A thought, a message and calls of the assistant that follow one another are one turn of his. A new
turn begins with a thought behind words or calls, and with a message behind a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ninfer.contract.chat import ChatMessage, ContentPart, TextPart, ToolCall
from ninfer.gateway.responses.input_items import Meaning, Said, Thought


@dataclass(slots=True)
class _AssistantTurn:
    thoughts: list[str] = field(default_factory=list)
    content: list[ContentPart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    has_spoken: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.thoughts or self.calls or self.has_spoken)

    def ends_before(self, meaning: Thought | Said | ToolCall) -> bool:
        if isinstance(meaning, Thought):
            return self.has_spoken or bool(self.calls)
        return isinstance(meaning, Said) and self.has_spoken and not self.calls

    def add(self, meaning: Thought | Said | ToolCall) -> None:
        if isinstance(meaning, Thought):
            self.thoughts.append(meaning.text)
        elif isinstance(meaning, Said):
            self.content += meaning.content
            self.has_spoken = True
        else:
            self.calls.append(meaning)

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            tuple(self.content),
            reasoning_content="\n\n".join(self.thoughts) if self.thoughts else None,
            tool_calls=tuple(self.calls),
        )


def assemble(instructions: str | None, meanings: Iterable[Meaning]) -> tuple[ChatMessage, ...]:
    """`instructions` lead as a system message."""
    messages: list[ChatMessage] = []
    if instructions:
        messages.append(ChatMessage("system", (TextPart(instructions),)))
    turn = _AssistantTurn()

    def end_turn() -> None:
        nonlocal turn
        if not turn.is_empty:
            messages.append(turn.message())
            turn = _AssistantTurn()

    for meaning in meanings:
        if isinstance(meaning, ChatMessage):
            end_turn()
            messages.append(meaning)
            continue
        if turn.ends_before(meaning):
            end_turn()
        turn.add(meaning)
    end_turn()
    return tuple(messages)
