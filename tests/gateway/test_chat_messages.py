"""Messages in every form that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import ChatMessage, ToolCall
from ninfer.contract.errors import RequestError
from ninfer.gateway.chat_messages import parse_messages
from ninfer.gateway.fields import Fields


def parse(*messages: Any) -> tuple[ChatMessage, ...]:
    return parse_messages(Fields({"messages": list(messages)})).messages


def error_of(*messages: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*messages)
    return caught.value


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("system", "system"),
        ("developer", "developer"),
        ("user", "user"),
        ("USER", "user"),
        ("Assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(name: str, role: str) -> None:
    assert parse({"role": name, "content": "x"})[0].role == role


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_all_forms_of_empty_content(role: str, content: dict[str, Any]) -> None:
    assert parse({"role": role, **content})[0] == ChatMessage(role=role)  # type: ignore[arg-type]


def test_text_parts_join_in_order() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        "b",
        {"type": "input_text", "text": "c"},
        {"type": "output_text", "text": "d"},
        {"type": "refusal", "refusal": "e"},
    ]
    assert parse({"role": "user", "content": parts})[0].text == "abcde"


@pytest.mark.parametrize(
    "extra",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning": "other"},
        {
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "reasoning", "text": "m"},
            ]
        },
    ],
)
def test_reasoning_of_history(extra: dict[str, Any]) -> None:
    assert parse({"role": "assistant", **extra})[0].reasoning_content == "hm"


def test_unknown_keys_are_ignored() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "name": "bob",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "id": 7,
        "reasoning_details": [{}],
        "tool_calls": None,
        "function_call": None,
    }
    assert parse(message)[0] == parse({"role": "assistant", "content": "x"})[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city":"Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("", {}),
        (None, {}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ('{"a":NaN}', '{"a":NaN}'),
        ('{"t":"cut \\ud83d"}', {"t": "cut \ufffd"}),
    ],
)
def test_tool_call_arguments(arguments: object, expected: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert parse({"role": "assistant", "tool_calls": [call]})[0].tool_calls == (
        ToolCall("f", expected),  # type: ignore[arg-type]
    )


def test_tool_calls_keep_ids_and_custom_and_legacy_forms_are_calls_too() -> None:
    calls = [
        {"id": "call_1", "type": "function", "index": 0, "function": {"name": "f"}},
        {"id": "call_2", "type": "custom", "custom": {"name": "patch", "input": "text"}},
    ]
    message = parse({"role": "assistant", "content": None, "tool_calls": calls})[0]
    assert message.tool_calls == (
        ToolCall("f", {}, "call_1"),
        ToolCall("patch", {"input": "text"}, "call_2"),
    )
    legacy = {"name": "g", "arguments": '{"a":1}'}
    assert parse({"role": "assistant", "function_call": legacy})[0].tool_calls == (
        ToolCall("g", {"a": 1}),
    )


def test_tool_results() -> None:
    with_id = parse(
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "42"}]}
    )
    assert with_id[0].tool_call_id == "c"
    assert with_id[0].text == "42"
    assert parse({"role": "tool", "content": "x", "name": "f"})[0].tool_call_id is None


@pytest.mark.parametrize(
    ("messages", "is_prefill"),
    [
        ([{"role": "assistant", "content": "x", "prefix": True}], True),
        ([{"role": "assistant", "content": "x", "partial": True}], True),
        ([{"role": "assistant", "content": "x", "prefix": False}], False),
        ([{"role": "user", "content": "x", "prefix": True}], False),
        ([{"role": "assistant", "content": "x", "prefix": True}, {"role": "user"}], False),
    ],
)
def test_prefill_marks(messages: list[Any], is_prefill: bool) -> None:
    assert parse_messages(Fields({"messages": messages})).is_prefill is is_prefill


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ({}, "missing_required_parameter", "messages"),
        ({"messages": None}, "missing_required_parameter", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
    ],
)
def test_the_list_itself(value: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(Fields(value))
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({}, "missing_required_parameter", "role"),
        ({"role": "robot"}, "invalid_value", "role"),
        ({"role": 1}, "invalid_type", "role"),
        ({"role": "user", "content": 1}, "invalid_type", "content"),
        ({"role": "user", "content": {"type": "text"}}, "invalid_type", "content"),
        ({"role": "user", "content": [1]}, "invalid_type", "content[0]"),
        ({"role": "user", "content": [{}]}, "missing_required_parameter", "content[0].type"),
        ({"role": "user", "content": [{"type": "x"}]}, "invalid_value", "content[0].type"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "missing_required_parameter",
            "content[0].text",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 1}]},
            "invalid_type",
            "content[0].text",
        ),
        (
            {"role": "user", "content": [{"type": "thinking", "thinking": "x"}]},
            "invalid_value",
            "content[0].type",
        ),
        (
            {"role": "user", "content": ["a", {"type": "image_url", "image_url": "data:,"}]},
            "unsupported_value",
            "content[1]",
        ),
        ({"role": "tool", "content": [{"type": "video_url"}]}, "unsupported_value", "content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "unsupported_value", "content[0]"),
        ({"role": "user", "content": [{"type": "file"}]}, "unsupported_value", "content[0]"),
        ({"role": "assistant", "tool_calls": {}}, "invalid_type", "tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{}]},
            "missing_required_parameter",
            "tool_calls[0].function",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "missing_required_parameter",
            "tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]},
            "invalid_type",
            "tool_calls[0].function.arguments",
        ),
    ],
)
def test_errors_name_the_path(message: dict[str, Any], code: str, param: str) -> None:
    error = error_of({"role": "user", "content": "fine"}, message)
    assert (error.code, error.param) == (code, f"messages[1].{param}")
