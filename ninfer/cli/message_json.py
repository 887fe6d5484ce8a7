"""OpenAI messages as JSON <-> ChatMessage, for `run --messages` and for saved conversations; tools.

What is read follows the HTTP API, so that a request's messages can be replayed from a file.
"""

from __future__ import annotations

import json
from typing import Any

from ninfer.contract.chat import ChatMessage, ToolCall
from ninfer.gateway.chat_messages import Conversation, parse_messages
from ninfer.gateway.fields import Fields
from ninfer.gateway.tool_fields import ChatTools, parse_chat_tools


def read_messages(raw: object) -> Conversation:
    """A list of messages, at least one. Raises RequestError with the path of the bad field."""
    return parse_messages(Fields({"messages": raw}))


def read_tools(raw: object) -> ChatTools:
    """A list of tools, or an object with `tools` and maybe a `tool_choice`, as in a request. Raises
    RequestError with the path of the bad field."""
    fields = raw if isinstance(raw, dict) else {"tools": raw}
    return parse_chat_tools(Fields(fields))


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


def _dump_call(call: ToolCall) -> dict[str, Any]:
    text = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
    function = {"name": call.name, "arguments": text}
    return {"id": call.call_id, "type": "function", "function": function}
