from __future__ import annotations

from typing import Any

import pytest

from ninfer.cli.message_json import dump_message, read_messages
from ninfer.contract.chat import ChatMessage, TextPart, ToolCall
from ninfer.contract.errors import RequestError


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (None, "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
    ],
)
def test_bad_messages_name_the_field(raw: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages(raw)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", (TextPart("é\n"),)),
        ChatMessage("assistant", (TextPart("x"),), "hm", (ToolCall("f", {"x": [1]}, "c"),)),
        ChatMessage("assistant", tool_calls=(ToolCall("f", "not json"),)),
        ChatMessage("tool", (TextPart("2"),), tool_call_id="c"),
    ],
)
def test_what_is_written_reads_back_equal(message: ChatMessage) -> None:
    assert read_messages([dump_message(message)]).messages == (message,)
