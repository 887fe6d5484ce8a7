"""Items of a request become the turns that the model is shown."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import ChatMessage, TextPart, ToolCall
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.responses.conversation import assemble
from ninfer.gateway.responses.input_items import ItemReader, parse_input
from ninfer.gateway.responses.sealed_text import seal
from ninfer.gateway.responses.tools import parse_tools


def turns(*items: Any, instructions: str | None = None, tools: Any = None) -> list[ChatMessage]:
    reader = ItemReader(parse_tools(Fields({"tools": tools})))
    parsed = parse_input(Fields({"input": list(items)}), reader)
    meanings = [meaning for item in parsed for meaning in item.meanings]
    return list(assemble(instructions, meanings))


def message(role: Any, *texts: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role, tuple(TextPart(text) for text in texts), **fields)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(call_id: str, name: str = "f", **fields: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": '{"a": 1}'}
    return {**item, **fields}


def result(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def called(call_id: str, name: str = "f", arguments: Any = None) -> ToolCall:
    return ToolCall(name, {"a": 1} if arguments is None else arguments, call_id)


def test_a_text_is_a_message_of_the_user() -> None:
    (item,) = parse_input(Fields({"input": "hi"}), ItemReader())
    assert item.meanings == (message("user", "hi"),)


@pytest.mark.parametrize("value", [None, "", []])
def test_empty_input_has_no_items(value: Any) -> None:
    assert parse_input(Fields({"input": value}), ItemReader()) == ()


def test_instructions_lead_and_system_messages_stay_in_place() -> None:
    assert turns(
        user("a"),
        {"type": "message", "role": "developer", "content": "b"},
        {"role": "system", "content": [{"type": "input_text", "text": "c"}]},
        instructions="first",
    ) == [
        message("system", "first"),
        message("user", "a"),
        message("developer", "b"),
        message("system", "c"),
    ]


def test_parts_of_every_kind_of_text() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
        "e",
    ]
    assert turns({"role": "assistant", "content": parts}) == [message("assistant", *"abcde")]


def test_reasoning_message_and_calls_are_one_turn() -> None:
    assert turns(
        user("q"),
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "well"},
        call("c1"),
        call("c2"),
        result("c1", "one"),
        result("c2", "two"),
        {"role": "assistant", "content": "end"},
    ) == [
        message("user", "q"),
        message(
            "assistant",
            "well",
            reasoning_content="hm",
            tool_calls=(called("c1"), called("c2")),
        ),
        message("tool", "one", tool_call_id="c1"),
        message("tool", "two", tool_call_id="c2"),
        message("assistant", "end"),
    ]


def test_hosted_items_between_do_not_split_a_turn() -> None:
    assert turns(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "assistant", "content": "well"},
    ) == [message("assistant", "well", reasoning_content="hm")]


def test_a_thought_behind_words_or_calls_begins_a_turn() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert turns(call("c1"), reasoning, call("c2"), reasoning) == [
        message("assistant", tool_calls=(called("c1"),)),
        message("assistant", reasoning_content="hm", tool_calls=(called("c2"),)),
        message("assistant", reasoning_content="hm"),
    ]


def test_two_messages_are_two_turns_but_words_behind_a_call_belong_to_it() -> None:
    said = [{"role": "assistant", "content": text} for text in "abc"]
    assert turns(said[0], said[1], call("c1"), said[2], result("c1")) == [
        message("assistant", "a"),
        message("assistant", "b", "c", tool_calls=(called("c1"),)),
        message("tool", "done", tool_call_id="c1"),
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "plain"}], "summary": []}, "plain"),
        ({"content": None, "encrypted_content": seal("sealed"), "summary": []}, "sealed"),
        ({"content": [], "encrypted_content": seal("sealed"), "summary": None}, "sealed"),
        ({"encrypted_content": "gAAAA", "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"summary": [{"text": "a"}, {"text": "b"}]}, "a\n\nb"),
        ({"content": "plain", "encrypted_content": None}, "plain"),
        ({"content": [{"text": "both"}], "encrypted_content": seal("sealed")}, "both"),
    ],
)
def test_reasoning_in_every_form(fields: dict[str, Any], text: str) -> None:
    item = {"type": "reasoning", "id": "rs_unknown", **fields}
    assert turns(item) == [message("assistant", reasoning_content=text)]


def test_reasoning_without_any_text_is_nothing() -> None:
    item: dict[str, Any] = {"type": "reasoning", "encrypted_content": None, "summary": []}
    assert turns(item, user("a")) == [message("user", "a")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (None, {}),
        ('{"city":"Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("not json", "not json"),
        ("[1]", "[1]"),
    ],
)
def test_arguments_in_every_form(arguments: Any, expected: Any) -> None:
    (turn,) = turns(call("c1", arguments=arguments))
    assert turn.tool_calls == (called("c1", arguments=expected),)


def test_output_may_be_a_list_of_parts_or_missing() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert turns(result("c1", parts), result("c2", None), result("c3", [])) == [
        message("tool", "a", "b", tool_call_id="c1"),
        message("tool", tool_call_id="c2"),
        message("tool", tool_call_id="c3"),
    ]


def test_custom_calls_are_calls_with_one_string() -> None:
    item = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    assert turns(item, output) == [
        message("assistant", tool_calls=(called("c1", "patch", {"input": "*** Begin"}),)),
        message("tool", "ok", tool_call_id="c1"),
    ]


def test_calls_of_a_namespace_are_called_what_the_model_called_them() -> None:
    tools = [
        {"type": "function", "name": "box.f"},
        {"type": "namespace", "name": "box", "tools": [{"type": "function", "name": "f"}]},
    ]
    (known,) = turns(call("c1", "f", namespace="box"), tools=tools)
    (unknown,) = turns(call("c1", "f", namespace="box"))
    assert known.tool_calls == (called("c1", "box.f_"),)
    assert unknown.tool_calls == (called("c1", "box.f"),)


def test_client_side_tools_are_ordinary_turns() -> None:
    action: dict[str, Any] = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
    commands = {"commands": ["ls"], "timeout_ms": 5}
    operation = {"type": "delete_file", "path": "a"}
    chunk = {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}}
    assert turns(
        {"type": "local_shell_call", "id": "ls_1", "call_id": "c1", "action": action},
        {"type": "local_shell_call_output", "id": "c1", "output": "{}"},
        {"type": "shell_call", "call_id": "c2", "action": commands},
        {"type": "shell_call_output", "call_id": "c2", "output": [chunk, {"stdout": "c"}]},
        {"type": "apply_patch_call", "call_id": "c3", "operation": operation},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "failed"},
    ) == [
        message(
            "assistant",
            tool_calls=(
                called("c1", "local_shell", {"type": "exec", "command": ["ls"], "env": {}}),
            ),
        ),
        message("tool", "{}", tool_call_id="c1"),
        message("assistant", tool_calls=(called("c2", "shell", commands),)),
        message("tool", 'a\nb\n{"type":"exit","exit_code":1}\nc', tool_call_id="c2"),
        message("assistant", tool_calls=(called("c3", "apply_patch", operation),)),
        message("tool", "failed", tool_call_id="c3"),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_call",
        "image_generation_call",
        "file_search_call",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "mcp_call",
        "mcp_list_tools",
        "compaction",
        "tool_search_call",
        "ghost_snapshot",
        "additional_tools",
    ],
)
def test_items_of_hosted_tools_are_skipped(kind: str) -> None:
    assert turns({"type": kind, "id": "x", "output": {"a": 1}}, user("a")) == [message("user", "a")]


def test_an_unknown_type_that_says_something_is_a_message() -> None:
    item = {"type": "agent_message", "role": "user", "content": "hi"}
    assert turns(item) == [message("user", "hi")]


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "rs_1"}, {"id": "rs_1"}])
def test_references_are_left_to_the_store(item: dict[str, Any]) -> None:
    (parsed,) = parse_input(Fields({"input": [item]}), ItemReader())
    assert (parsed.reference, parsed.meanings) == ("rs_1", ())


def test_a_mark_ends_a_prefix() -> None:
    part = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": True}
    (turn,) = turns({"role": "user", "content": [part]})
    assert turn.content == (TextPart("a", ends_prefix=True),)


@pytest.mark.parametrize(
    ("item", "code", "path"),
    [
        (5, "invalid_type", "input[0]"),
        ({}, "missing_required_parameter", "input[0].type"),
        ({"type": 5}, "invalid_type", "input[0].type"),
        ({"type": "message", "content": "a"}, "missing_required_parameter", "input[0].role"),
        ({"role": "tool", "content": "a"}, "invalid_value", "input[0].role"),
        ({"role": "user", "content": 5}, "invalid_type", "input[0].content"),
        (
            {"role": "user", "content": [{"type": "nope"}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
            "unsupported_value",
            "input[0].content[0]",
        ),
        ({"type": "function_call"}, "missing_required_parameter", "input[0].name"),
        (
            {"type": "function_call", "name": "f", "arguments": 5},
            "invalid_type",
            "input[0].arguments",
        ),
        ({"type": "function_call_output", "output": 5}, "invalid_type", "input[0].output"),
        ({"type": "item_reference"}, "missing_required_parameter", "input[0].id"),
        ({"type": "reasoning", "content": 5}, "invalid_type", "input[0].content"),
        ({"type": "reasoning", "encrypted_content": 5}, "invalid_type", None),
        ({"type": "shell_call", "action": []}, "invalid_type", "input[0].action"),
        ({"type": "custom_tool_call", "name": "p", "input": {}}, "invalid_type", "input[0].input"),
    ],
)
def test_bad_items_are_named(item: Any, code: str, path: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        turns(item)
    assert caught.value.code == code
    assert caught.value.param == (path or "input[0].encrypted_content")


def test_input_of_another_type_is_named() -> None:
    with pytest.raises(RequestError, match="'input' must be a string or a list"):
        parse_input(Fields({"input": {}}), ItemReader())
