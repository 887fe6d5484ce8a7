from __future__ import annotations

from typing import Any

import pytest

from ninfer.cli.message_json import dump_message, parse_messages
from ninfer.contract.chat import ChatMessage, TextPart, ToolCall
from ninfer.contract.errors import RequestError


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_all_forms_of_content_and_all_fields_are_read() -> None:
    messages = parse_messages(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": _parts("a", "b")},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function",
                     "function": {"name": "f", "arguments": '{"x": 1}'}},
                    {"function": {"name": "g", "arguments": "not json"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    )  # fmt: skip
    assert [message.text for message in messages] == ["Be short.", "ab", "", "2"]
    assert messages[2].reasoning_content == "hm"
    assert messages[2].tool_calls == (ToolCall("f", {"x": 1}, "c1"), ToolCall("g", "not json"))
    assert messages[3].tool_call_id == "c1"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (None, "messages"),
        ({}, "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0]"),
        ([{"role": ["user"], "content": "x"}], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "tool", "tool_call_id": 1}], "messages[0].tool_call_id"),
    ],
)
def test_bad_messages_name_the_field(raw: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(raw)
    assert caught.value.param == param


def test_what_is_written_reads_back_equal() -> None:
    message = ChatMessage("assistant", (TextPart("é\n"),), "hm", (ToolCall("f", {"x": [1]}, "c"),))
    assert parse_messages([dump_message(message)]) == (message,)
