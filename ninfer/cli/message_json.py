"""OpenAI messages as JSON <-> ChatMessage, for `run --messages` and for saved conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from ninfer.contract.chat import ChatMessage, Role, TextPart, ToolCall
from ninfer.contract.errors import RequestError

_ROLES: Final[Mapping[str, Role]] = {role: role for role in get_args(Role)}


def parse_messages(raw: object, param: str = "messages") -> tuple[ChatMessage, ...]:
    """A list of message objects. Raises RequestError with the path of the bad field."""
    if not isinstance(raw, list):
        raise _wrong_type(param, "a list", raw)
    return tuple(_parse_message(item, f"{param}[{index}]") for index, item in enumerate(raw))


def dump_message(message: ChatMessage) -> dict[str, Any]:
    """A message of text as an OpenAI object."""
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning_content is not None:
        entry["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        entry["tool_calls"] = [_dump_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _parse_message(raw: object, param: str) -> ChatMessage:
    fields = _object(raw, param)
    name = fields.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        allowed = ", ".join(_ROLES)
        raise RequestError(
            "invalid_value", f"{param}.role: {name!r} is not one of {allowed}", param
        )
    return ChatMessage(
        role,
        _parse_content(fields.get("content"), f"{param}.content"),
        _text(fields.get("reasoning_content"), f"{param}.reasoning_content"),
        _parse_calls(fields.get("tool_calls"), f"{param}.tool_calls"),
        _text(fields.get("tool_call_id"), f"{param}.tool_call_id"),
    )


def _parse_content(raw: object, param: str) -> tuple[TextPart, ...]:
    if raw is None or raw == "":
        return ()
    if isinstance(raw, str):
        return (TextPart(raw),)
    if not isinstance(raw, list):
        raise _wrong_type(param, "a text or a list of parts", raw)
    return tuple(_parse_part(part, f"{param}[{index}]") for index, part in enumerate(raw))


def _parse_part(raw: object, param: str) -> TextPart:
    fields = _object(raw, param)
    kind = fields.get("type")
    if kind != "text":
        raise RequestError(
            "unsupported_value", f"{param}.type: only text works, not {kind!r}", param
        )
    text = fields.get("text")
    if not isinstance(text, str):
        raise _wrong_type(f"{param}.text", "a text", text)
    return TextPart(text)


def _parse_calls(raw: object, param: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise _wrong_type(param, "a list", raw)
    return tuple(_parse_call(item, f"{param}[{index}]") for index, item in enumerate(raw))


def _parse_call(raw: object, param: str) -> ToolCall:
    fields = _object(raw, param)
    function = _object(fields.get("function"), f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str):
        raise _wrong_type(f"{param}.function.name", "a text", name)
    arguments = _parse_arguments(function.get("arguments"), f"{param}.function.arguments")
    return ToolCall(name, arguments, _text(fields.get("id"), f"{param}.id"))


def _parse_arguments(raw: object, param: str) -> Mapping[str, Any] | str:
    """Templates iterate arguments, so JSON in a text is decoded; other text stays text."""
    if raw is None or isinstance(raw, dict):
        return raw or {}
    if not isinstance(raw, str):
        raise _wrong_type(param, "an object or JSON text", raw)
    try:
        decoded = json.loads(raw)
    except ValueError:
        return raw
    return decoded if isinstance(decoded, dict) else raw


def _dump_call(call: ToolCall) -> dict[str, Any]:
    text = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
    function = {"name": call.name, "arguments": text}
    return {"id": call.call_id, "type": "function", "function": function}


def _object(raw: object, param: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise _wrong_type(param, "an object", raw)
    return raw


def _text(raw: object, param: str) -> str | None:
    if raw is None or isinstance(raw, str):
        return raw
    raise _wrong_type(param, "a text", raw)


def _wrong_type(param: str, wanted: str, got: object) -> RequestError:
    return RequestError("invalid_type", f"{param}: {wanted} is needed, not {_kind(got)}", param)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names: Sequence[tuple[type, str]] = (
        (bool, "a boolean"), (int, "a number"), (float, "a number"),
        (str, "a text"), (list, "a list"), (dict, "an object"),
    )  # fmt: skip
    return next(name for kind, name in names if isinstance(value, kind))
