"""Calls of the API's own tools that clients run, as ordinary tool turns: shells and patches.

The model never makes such items here, but a conversation begun elsewhere may hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import orjson

from ninfer.contract.chat import ChatMessage, TextPart, ToolCall
from ninfer.gateway.fields import Fields, first_given


def _call(name: str, field_name: str) -> Callable[[Fields], ToolCall]:
    def read(item: Fields) -> ToolCall:
        given = item.child(field_name)
        values = {} if given is None else given.values
        arguments = {key: value for key, value in values.items() if value is not None}
        return ToolCall(name, arguments, item.string("call_id"))

    return read


def _text_output(item: Fields) -> ChatMessage:
    text = first_given((item.string("output"), item.string("status")))
    return _result(item, text or "")


def _shell_output(item: Fields) -> ChatMessage:
    """A list of what the commands wrote, or a text."""
    if isinstance(item.get("output"), str):
        return _text_output(item)
    return _result(item, "\n".join(_shell_text(chunk) for chunk in item.children("output")))


def _shell_text(chunk: Fields) -> str:
    texts = [chunk.string("stdout"), chunk.string("stderr")]
    outcome = chunk.child("outcome")
    if outcome is not None:
        texts.append(orjson.dumps(outcome.values).decode())
    return "\n".join(text for text in texts if text)


def _result(item: Fields, text: str) -> ChatMessage:
    """Of a local shell's call the output has no other id than its own."""
    call_id = first_given((item.string("call_id"), item.string("id")))
    return ChatMessage("tool", (TextPart(text),) if text else (), tool_call_id=call_id)


CLIENT_TOOLS: Final[Mapping[str, Callable[[Fields], ToolCall | ChatMessage]]] = {
    "local_shell_call": _call("local_shell", "action"),
    "local_shell_call_output": _text_output,
    "shell_call": _call("shell", "action"),
    "shell_call_output": _shell_output,
    "apply_patch_call": _call("apply_patch", "operation"),
    "apply_patch_call_output": _text_output,
}
