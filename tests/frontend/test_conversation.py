"""Client conversations in the shape templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ninfer.contract.chat import ChatMessage, MediaPart, TextPart
from ninfer.contract.errors import RequestError
from ninfer.frontend.conversation import parse_arguments, split_thought, template_messages
from tests.helpers.demo_frontend import call, turn


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city":"Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("not json", {"arguments": "not json"}),
        ("[1]", {"arguments": "[1]"}),
        ("", {}),
        ("  ", {}),
        ('{"x": NaN}', {"arguments": '{"x": NaN}'}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_become_an_object(
    arguments: str | Mapping[str, Any], expected: dict[str, Any]
) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain", (None, "plain")),
        ("<think>\nhm\n</think>\n\nYes", ("hm", "Yes")),
        ("\n<think></think>Yes", ("", "Yes")),
        ("<think>\ncut of ", ("cut of ", "")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("say <think>a</think>", (None, "say <think>a</think>")),
    ],
)
def test_thought_at_the_start_of_content_is_split_off(
    content: str, expected: tuple[str | None, str]
) -> None:
    assert split_thought(content) == expected


def test_leading_system_messages_become_one_and_later_ones_stay() -> None:
    messages = template_messages(
        [turn("system", "a"), turn("developer", "b"), turn("user", "q"), turn("developer", "c")]
    )
    assert messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "q"},
        {"role": "system", "content": "c"},
    ]


def test_absent_content_is_empty_text_and_parts_are_joined() -> None:
    message = ChatMessage("user", (TextPart("a"), TextPart("b")))
    tool_turn = turn("assistant", tool_calls=(call("f", "{}"),))
    assert template_messages([message, tool_turn]) == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
    ]


def test_given_reasoning_leaves_the_content_alone() -> None:
    message = turn("assistant", "<think>x</think>y", reasoning_content="r")
    assert template_messages([message]) == [
        {"role": "assistant", "content": "<think>x</think>y", "reasoning_content": "r"}
    ]


def test_media_is_refused_by_its_path() -> None:
    message = ChatMessage("user", (TextPart("a"), MediaPart("image", b"")))
    with pytest.raises(RequestError) as caught:
        template_messages([turn("user", "q"), message])
    assert (caught.value.code, caught.value.param) == (
        "unsupported_value",
        "messages[1].content[1]",
    )


def test_no_messages_are_an_invalid_prompt() -> None:
    with pytest.raises(RequestError) as caught:
        template_messages([])
    assert (caught.value.code, caught.value.param) == ("invalid_prompt", "messages")
