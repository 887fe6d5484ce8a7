"""A client's conversation in the shape chat templates read: dictionaries of plain strings.

Everything that clients spell in several ways is settled here, so that no template has to: absent
content is empty text, developer is system, the leading system messages are one, arguments of tool
calls are objects, and a thought written into an assistant's content is its reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from ninfer.contract.chat import ChatMessage, MediaPart, ToolCall
from ninfer.contract.errors import RequestError
from ninfer.frontend.tokenizer import THINK_CLOSE, THINK_OPEN

TemplateMessage: TypeAlias = dict[str, Any]
SYSTEM_SEPARATOR: Final = "\n\n"
"""Between the leading system messages, which are one for the template."""


def template_messages(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Raises RequestError: `invalid_prompt` for no messages, `unsupported_value` for media."""
    if not messages:
        raise RequestError("invalid_prompt", "at least one message is needed", "messages")
    num_leading = num_leading_system(messages)
    _refuse_media(messages)
    result: list[TemplateMessage] = []
    if num_leading:
        texts = [message.text for message in messages[:num_leading] if message.text]
        result.append({"role": "system", "content": SYSTEM_SEPARATOR.join(texts)})
    result.extend(_template_message(message) for message in messages[num_leading:])
    return result


def parse_arguments(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """The object that templates expect; a text that is none becomes the parameter `arguments`."""
    if not isinstance(arguments, str):
        return dict(arguments)
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}


def split_thought(content: str) -> tuple[str | None, str]:
    """(reasoning, answer) of an assistant's text that begins with a thought, else (None, text).

    A thought that was cut off is all reasoning.
    """
    body = content.lstrip()
    if not body.startswith(THINK_OPEN):
        return None, content
    thought, closing, answer = body.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    thought = thought.lstrip("\n")
    return (thought.rstrip() if closing else thought), answer.lstrip()


def num_leading_system(messages: Sequence[ChatMessage]) -> int:
    """How many system messages the conversation begins with."""
    for index, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return index
    return len(messages)


def _refuse_media(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        for part_index, part in enumerate(message.content):
            if isinstance(part, MediaPart):
                raise RequestError(
                    "unsupported_value",
                    f"this model takes text only, not {part.kind} input",
                    f"messages[{index}].content[{part_index}]",
                )


def _template_message(message: ChatMessage) -> TemplateMessage:
    role = "system" if message.role == "developer" else message.role
    result: TemplateMessage = {"role": role, "content": message.text}
    if role == "assistant":
        reasoning = message.reasoning_content
        if reasoning is None:
            reasoning, result["content"] = split_thought(message.text)
        if reasoning is not None:
            result["reasoning_content"] = reasoning
        if message.tool_calls:
            result["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    elif role == "tool" and message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _template_call(call: ToolCall) -> TemplateMessage:
    function = {"name": call.name, "arguments": parse_arguments(call.arguments)}
    result: TemplateMessage = {"type": "function", "function": function}
    if call.call_id is not None:
        result["id"] = call.call_id
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
