"""The `messages` of chat requests -> ChatMessage, in all forms that clients send.

Null, absent, empty text and an empty list are the same empty content. Nothing is merged or moved
here: where a system message may stand is the template's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ninfer.contract.chat import (
    ChatMessage,
    ContentPart,
    MediaPart,
    Role,
    TextPart,
    ToolCall,
)
from ninfer.contract.errors import RequestError
from ninfer.gateway.cache_fields import has_mark
from ninfer.gateway.fields import (
    Fields,
    first_given,
    invalid_type,
    invalid_value,
    missing,
    unsupported_value,
)
from ninfer.gateway.json_text import parse_json
from ninfer.gateway.media.references import (
    MEDIA_TYPES,
    MediaReference,
    no_vision,
    parse_media_part,
)

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_KEYS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_REASONING_KEYS: Final[Mapping[str, str]] = {"thinking": "thinking", "reasoning": "text"}
_UNSUPPORTED: Final = frozenset({"input_audio", "file", "input_file"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """`is_prefill`: the last message says itself that it is to be continued."""

    messages: tuple[ChatMessage, ...]
    is_prefill: bool


def parse_messages(fields: Fields, media: list[MediaReference] | None = None) -> Conversation:
    """Raises RequestError naming the message and the part.

    media   takes the references that the media parts of the messages stand for, in their order;
            None: such parts are refused
    """
    values = fields.sequence("messages")
    if values is None:
        raise missing(fields.path_of("messages"))
    if not values:
        raise invalid_value(fields.path_of("messages"), "must not be empty")
    entries = tuple(fields.children("messages"))
    messages = tuple(_message(entry, media) for entry in entries)
    last = entries[-1]
    asks = last.get("prefix") is True or last.get("partial") is True
    return Conversation(messages, asks and messages[-1].role == "assistant")


def _message(fields: Fields, media: list[MediaReference] | None) -> ChatMessage:
    role = fields.meaning("role", _ROLES)
    parts, thoughts = parse_content(fields, role, media=media)
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        names = ("reasoning_content", "reasoning")
        reasoning = first_given(fields.string(name) for name in names)
        if reasoning is None and thoughts:
            reasoning = "".join(thoughts)
        calls = _tool_calls(fields)
    return ChatMessage(
        role=role,
        content=_marked(parts) if has_mark(fields) else tuple(parts),
        reasoning_content=reasoning,
        tool_calls=calls,
        tool_call_id=fields.string("tool_call_id") if role == "tool" else None,
    )


def _marked(parts: list[ContentPart]) -> tuple[ContentPart, ...]:
    """A mark on the message is one on its last part."""
    if not parts:
        return ()
    *others, last = parts
    if isinstance(last, TextPart):
        return (*others, replace(last, ends_prefix=True))
    return (*parts, TextPart("", ends_prefix=True))


def parse_content(
    fields: Fields,
    role: Role,
    name: str = "content",
    *,
    media: list[MediaReference] | None = None,
) -> tuple[list[ContentPart], list[str]]:
    """(parts, thoughts) of a field that is a string or a list of parts; `media` as in
    `parse_messages`. Raises RequestError."""
    value = fields.get(name)
    path = fields.path_of(name)
    parts: list[ContentPart] = []
    thoughts: list[str] = []
    if value is None:
        return parts, thoughts
    if isinstance(value, str):
        return ([TextPart(value)] if value else []), thoughts
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of parts", value)
    for index, item in enumerate(value):
        part_path = f"{path}[{index}]"
        if isinstance(item, str):
            parts.append(TextPart(item))
        elif not isinstance(item, dict):
            raise invalid_type(part_path, "an object", item)
        elif (part := Fields(item, part_path)).string("type") in MEDIA_TYPES:
            parts += _media_parts(part, media)
        else:
            _part(part, role, parts, thoughts)
    return parts, thoughts


def _media_parts(part: Fields, media: list[MediaReference] | None) -> list[ContentPart]:
    """A place for the file, and one for a mark behind it."""
    if media is None:
        raise no_vision(part.path)
    reference = parse_media_part(part)
    media.append(reference)
    place = MediaPart(reference.kind, b"")
    return [place, TextPart("", ends_prefix=True)] if has_mark(part) else [place]


def _part(part: Fields, role: Role, parts: list[ContentPart], thoughts: list[str]) -> None:
    kind = part.string("type")
    path = part.path_of("type")
    if kind is None:
        raise missing(path)
    if kind in _TEXT_KEYS:
        parts.append(TextPart(_required_text(part, _TEXT_KEYS[kind]), has_mark(part)))
    elif kind in _REASONING_KEYS and role == "assistant":
        thoughts.append(part.string(_REASONING_KEYS[kind]) or "")
    elif kind in _UNSUPPORTED:
        raise unsupported_value(part.path, "audio and files cannot be read")
    else:
        raise invalid_value(path, f"must be one of {', '.join(_TEXT_KEYS)}")


def _required_text(part: Fields, name: str) -> str:
    text = part.string(name)
    if text is None:
        raise missing(part.path_of(name))
    return text


def _tool_calls(fields: Fields) -> tuple[ToolCall, ...]:
    calls = tuple(_tool_call(entry) for entry in fields.children("tool_calls"))
    legacy = fields.child("function_call")
    if legacy is None or calls:
        return calls
    return (ToolCall(_call_name(legacy), parse_arguments(legacy)),)


def _tool_call(entry: Fields) -> ToolCall:
    call_id = entry.string("id")
    custom = entry.child("custom")
    if custom is not None:
        return ToolCall(_call_name(custom), {"input": custom.string("input") or ""}, call_id)
    function = entry.child("function")
    if function is None:
        raise missing(entry.path_of("function"))
    return ToolCall(_call_name(function), parse_arguments(function), call_id)


def _call_name(function: Fields) -> str:
    name = function.string("name")
    if not name:
        raise missing(function.path_of("name"))
    return name


def parse_arguments(function: Fields) -> Mapping[str, Any] | str:
    """An object, also from its JSON text; any other text stays as it is."""
    value = function.get("arguments")
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise invalid_type(function.path_of("arguments"), "a string or an object", value)
    if not value.strip():
        return {}
    try:
        decoded = parse_json(value.encode("utf-8")).value
    except RequestError:
        return value
    return decoded if isinstance(decoded, dict) else value
