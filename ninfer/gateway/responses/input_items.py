"""`input` of a request -> items, each with what it means to the conversation.

An item stays as it came, so that it can be stored and listed; its meaning is what the model will
be shown. Items of tools that only hosted services run mean nothing here and are skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ninfer.contract.chat import ChatMessage, ContentPart, Role, ToolCall
from ninfer.gateway.chat_messages import parse_arguments, parse_content
from ninfer.gateway.fields import (
    Fields,
    as_object,
    invalid_type,
    invalid_value,
    missing,
)
from ninfer.gateway.media.references import MediaReference
from ninfer.gateway.responses.call_input import INPUT_PARAMETER
from ninfer.gateway.responses.client_tools import CLIENT_TOOLS
from ninfer.gateway.responses.sealed_text import unseal
from ninfer.gateway.responses.tools import ToolSet

_logger = logging.getLogger(__name__)
_ROLES: Final[Mapping[str, Role]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
}


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant said in one message."""

    content: tuple[ContentPart, ...]


Meaning: TypeAlias = ChatMessage | Thought | Said | ToolCall


@dataclass(frozen=True, slots=True)
class InputItem:
    """`media`: what the media parts of its meanings stand for, in their order. `reference`: the id
    of a stored item that this one stands for; its meaning is not here."""

    raw: Mapping[str, Any]
    meanings: tuple[Meaning, ...] = ()
    media: tuple[MediaReference, ...] = ()
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class ItemReader:
    """How items are read. `takes_media`: the model sees pictures; others' are refused."""

    tools: ToolSet = field(default_factory=ToolSet)
    takes_media: bool = False

    def read(self, item: Fields) -> InputItem:
        """Raises RequestError naming the field."""
        kind = item.string("type")
        if kind == "item_reference" or (kind is None and not item.has("role") and item.has("id")):
            item_id = item.string("id")
            if not item_id:
                raise missing(item.path_of("id"))
            return InputItem(item.values, reference=item_id)
        media: list[MediaReference] = []
        meanings = _meanings(item, kind, self.tools, media if self.takes_media else None)
        return InputItem(item.values, meanings, tuple(media))


def parse_input(fields: Fields, reader: ItemReader) -> tuple[InputItem, ...]:
    """Raises RequestError naming the item. A text is one message of the user; absent is no item."""
    value, path = fields.get("input"), fields.path_of("input")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of items", value)
    items = tuple(
        reader.read(as_object(item, f"{path}[{index}]")) for index, item in enumerate(value)
    )
    num_skipped = sum(not item.meanings and item.reference is None for item in items)
    if num_skipped:
        _logger.debug("%d input items mean nothing to the conversation", num_skipped)
    return items


def _meanings(
    item: Fields, kind: str | None, tools: ToolSet, media: list[MediaReference] | None
) -> tuple[Meaning, ...]:
    if kind is None and not item.has("role"):
        raise missing(item.path_of("type"))
    if kind in (None, "message"):
        return _message(item, media)
    if kind in _CALLS:
        return (_CALLS[kind](item, tools),)
    if kind in _OUTPUTS:
        return (_call_output(item, media),)
    if kind in CLIENT_TOOLS:
        return (CLIENT_TOOLS[kind](item),)
    if kind == "reasoning":
        text = _thought(item)
        return (Thought(text),) if text else ()
    return _message(item, media) if _is_like_a_message(item) else ()


def _is_like_a_message(item: Fields) -> bool:
    """Of an unknown type, but a known role says something."""
    return item.get("role") in _ROLES and isinstance(item.get("content"), str | list)


def _message(item: Fields, media: list[MediaReference] | None) -> tuple[Meaning, ...]:
    name = item.string("role")
    if name is None:
        raise missing(item.path_of("role"))
    role = _ROLES.get(name.lower())
    if role is None:
        raise invalid_value(item.path_of("role"), f"must be one of {', '.join(_ROLES)}")
    content, thoughts = parse_content(item, role, media=media)
    if role != "assistant":
        return (ChatMessage(role, tuple(content)),)
    said = Said(tuple(content))
    return (Thought("".join(thoughts)), said) if thoughts else (said,)


def _thought(item: Fields) -> str:
    """The thought itself, else the one that was sealed, else its summary."""
    plain = "".join(_texts(item, "content"))
    sealed = item.string("encrypted_content")
    summary = "\n\n".join(_texts(item, "summary"))
    return plain or (unseal(sealed) if sealed else None) or summary


def _texts(item: Fields, name: str) -> list[str]:
    if isinstance(item.get(name), str):
        return [item.string(name) or ""]
    return [part.string("text") or "" for part in item.children(name)]


def _called_name(item: Fields, tools: ToolSet) -> str:
    name, namespace = item.string("name"), item.string("namespace")
    if not name:
        raise missing(item.path_of("name"))
    return tools.call_name(namespace or None, name)


def _function_call(item: Fields, tools: ToolSet) -> ToolCall:
    return ToolCall(_called_name(item, tools), parse_arguments(item), item.string("call_id"))


def _custom_call(item: Fields, tools: ToolSet) -> ToolCall:
    arguments = {INPUT_PARAMETER: item.string("input") or ""}
    return ToolCall(_called_name(item, tools), arguments, item.string("call_id"))


def _call_output(item: Fields, media: list[MediaReference] | None) -> ChatMessage:
    """Text, or a list of parts."""
    content, _ = parse_content(item, "tool", "output", media=media)
    return ChatMessage("tool", tuple(content), tool_call_id=item.string("call_id"))


_CALLS: Final[Mapping[str, Callable[[Fields, ToolSet], ToolCall]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
}
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
