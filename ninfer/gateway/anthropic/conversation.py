"""`system` and `messages` -> ChatMessage.

Neighbours of one role are one turn. A system message stays where it is, so that histories only
grow; the blocks of `system` come before everything, one message each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ninfer.contract.chat import ChatMessage, ContentPart, TextPart
from ninfer.gateway.anthropic.blocks import (
    BLANK_LINE,
    ToolChange,
    Turn,
    TurnRole,
    read_content,
    read_texts,
)
from ninfer.gateway.cache_fields import has_mark
from ninfer.gateway.fields import Fields, invalid_value, missing
from ninfer.gateway.media.references import MediaReference

_ROLES: Final[Mapping[str, TurnRole]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
}
_ONE_TURN: Final = "next_user_message"
"""`clear_at` of a system message that counts until the user speaks again."""
_BILLING_LINE: Final = "x-anthropic-billing-header:"
"""Begins a line that differs in every request and says nothing to a model."""


@dataclass(frozen=True, slots=True)
class MessagesConversation:
    """`is_prefill`: the last message is an answer to be continued. `media`: references of the
    pictures in the messages, in their order; so are `tool_changes`."""

    messages: tuple[ChatMessage, ...]
    media: tuple[MediaReference, ...]
    tool_changes: tuple[ToolChange, ...]
    is_prefill: bool


def parse_conversation(fields: Fields) -> MessagesConversation:
    """Raises RequestError naming the message and the block."""
    turns = _turns(fields)
    if has_mark(fields):
        turns[-1].mark_end()
    messages = [*_system_messages(fields)]
    references: dict[int, MediaReference] = {}
    for turn in turns:
        messages += turn.messages()
        references |= turn.media
    changes = [change for turn in turns for change in turn.tool_changes]
    places = [id(part) for message in messages for part in message.content]
    last = turns[-1]
    return MessagesConversation(
        messages=tuple(messages),
        media=tuple(references[place] for place in places if place in references),
        tool_changes=tuple(changes),
        is_prefill=last.role == "assistant" and not last.calls,
    )


def _turns(fields: Fields) -> list[Turn]:
    values = fields.sequence("messages")
    if values is None:
        raise missing(fields.path_of("messages"))
    if not values:
        raise invalid_value(fields.path_of("messages"), "must not be empty")
    messages = [
        (message, message.meaning("role", _ROLES)) for message in fields.children("messages")
    ]
    last_question = max((i for i, (_, role) in enumerate(messages) if role == "user"), default=-1)
    turns: list[Turn] = []
    for index, (message, role) in enumerate(messages):
        if not turns or turns[-1].role != role or role == "system":
            turns.append(Turn(role))
        turn = turns[-1]
        read_content(message, turn)
        if role == "system":
            is_over = message.string("clear_at") == _ONE_TURN and index < last_question
            turn.parts = [] if is_over else _with_blank_lines(turn.parts)
    return turns


def _with_blank_lines(parts: list[ContentPart]) -> list[ContentPart]:
    """Blocks of one system message, set apart as those of `system` are."""
    return [
        replace(part, text=BLANK_LINE + part.text) if index and isinstance(part, TextPart) else part
        for index, part in enumerate(parts)
    ]


def _system_messages(fields: Fields) -> list[ChatMessage]:
    parts = read_texts(fields, "system")
    if parts and parts[0].text.startswith(_BILLING_LINE):
        rest = parts[0].text.partition("\n")[2].lstrip("\n")
        parts[0:1] = [replace(parts[0], text=rest)] if rest else []
    return [ChatMessage("system", (part,)) for part in parts]
