"""The body of /v1/messages: tools, thinking, structured output, hints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.gateway.anthropic.request import MessagesRequest, parse_messages_request
from ninfer.gateway.fields import Fields
from tests.helpers.fake_engine import VOCAB_SIZE

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
OTHER = {"name": "g", "input_schema": {"type": "object"}, "strict": True}


def parse(header: str | None = None, **fields: Any) -> MessagesRequest:
    values = {"model": "m", "messages": [USER], **fields}
    return parse_messages_request(Fields(values), VOCAB_SIZE, header)


def refusal(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value.code, caught.value.param


def rules(**fields: Any) -> ToolRules:
    found = parse(**fields).params.tools
    assert found is not None
    return found


def test_plain_request() -> None:
    request = parse()
    assert (request.model, request.stream, request.hides_thinking) == ("m", False, False)
    assert request.chat.template_kwargs == {}
    assert request.chat.add_generation_prompt
    assert request.params.max_tokens is None
    assert request.params.tools is None
    assert request.params.constraint is None
    assert request.params.split_reasoning


def test_generation_fields() -> None:
    params = parse(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["a", "b"],
        seed=3,
        stop=["not a field of this protocol"],
    ).params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)
    assert params.stop == ("a", "b")
    assert params.seed == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": -2}, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"temperature": 2.5}, "invalid_value", "temperature"),
        ({"stop_sequences": [""]}, "invalid_value", "stop_sequences[0]"),
        ({"stop_sequences": [1]}, "invalid_type", "stop_sequences[0]"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"metadata": "x"}, "invalid_type", "metadata"),
        ({"model": 5}, "invalid_type", "model"),
        ({"compaction": {"type": "summarize"}}, "unsupported_parameter", "compaction"),
        ({"thread": {"type": "create"}}, "thread_unsupported_request", "thread"),
        ({"best": 1, "no_repeat_ngram_size": 2}, "unsupported_parameter", "no_repeat_ngram_size"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (code, param)


def test_hints_do_nothing() -> None:
    plain = parse()
    hinted = parse(
        service_tier="auto",
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        container="c",
        mcp_servers=[{"type": "url"}],
        betas=["x"],
        diagnostics={},
        inference_geo="eu",
        speed="fast",
        user_profile_id="u",
        workspace_id="w",
        metadata={"user_id": None},
        a_field_of_next_year={"x": 1},
        tools=[],
        tool_choice={"type": "auto"},
    )
    assert hinted == plain


# Tools.


def test_tools_are_shown_and_ruled() -> None:
    request = parse(tools=[TOOL, OTHER])
    assert request.chat.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    )
    assert request.params.tools == ToolRules(
        tools=(ToolSpec("f", SCHEMA), ToolSpec("g", {"type": "object"}, is_strict=True))
    )
    assert not request.chat.tools_end_prefix
    assert parse(tools=[TOOL | {"cache_control": {"type": "ephemeral"}}]).chat.tools_end_prefix


def test_hosted_tools_are_skipped() -> None:
    hosted: list[Any] = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"name": "without a schema"},
        {"type": "memory_20250818", "name": "memory", "input_schema": {}},
    ]
    assert parse(tools=hosted).params.tools is None
    assert [spec.name for spec in rules(tools=[*hosted, TOOL]).tools] == ["f"]


@pytest.mark.parametrize(
    ("choice", "kind", "allowed", "parallel"),
    [
        (None, "auto", None, True),
        ({"type": "auto"}, "auto", None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", None, False),
        ({"type": "any"}, "required", None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "g"}, "required", ("g",), True),
        ({"type": "none"}, "none", None, True),
    ],
)
def test_tool_choices(choice: Any, kind: str, allowed: Any, parallel: bool) -> None:
    found = rules(tools=[TOOL, OTHER], tool_choice=choice)
    assert (found.choice, found.allowed, found.parallel) == (kind, allowed, parallel)


@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search_20250305", "name": "f"}]])
def test_choices_without_tools(tools: Any) -> None:
    for kind in ("auto", "none"):
        assert parse(tools=tools, tool_choice={"type": kind}).params.tools is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        assert refusal(tools=tools, tool_choice=choice) == ("invalid_value", "tool_choice.type")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": "x"}, "invalid_type", "tools"),
        ({"tools": [5]}, "invalid_type", "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[0].name"),
        ({"tools": [{"input_schema": {}}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [TOOL | {"name": "a b"}]}, "invalid_value", "tools[0].name"),
        ({"tools": [TOOL | {"input_schema": []}]}, "invalid_type", "tools[0].input_schema"),
        ({"tools": [TOOL | {"strict": 1}]}, "invalid_type", "tools[0].strict"),
        ({"tools": [TOOL | {"description": 1}]}, "invalid_type", "tools[0].description"),
        ({"tools": [TOOL] * 513}, "invalid_value", "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "invalid_type", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "invalid_value", "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "missing_required_parameter",
         "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "invalid_value",
         "tool_choice.name"),
    ],
)  # fmt: skip
def test_refused_tools(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (code, param)


def changed(*changes: tuple[str, Any]) -> list[Any]:
    """Messages that change the tools: each change is a block's type and its tool."""
    blocks = [{"type": f"tool_{kind}", "tool": tool} for kind, tool in changes]
    return [USER, {"role": "system", "content": blocks}, USER]


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


def test_messages_bring_tools_and_take_them_away() -> None:
    defined = {"type": "tool_definition", "definition": OTHER}
    messages = changed(("removal", reference("f")), ("addition", defined))
    request = parse(messages=messages, tools=[TOOL])
    assert [tool["function"]["name"] for tool in request.chat.tools] == ["f", "g"]
    found = request.params.tools
    assert found is not None
    assert (found.choice, found.allowed) == ("auto", ("g",))
    again = changed(("removal", reference("f")), ("addition", reference("f")))
    assert rules(messages=again, tools=[TOOL]).allowed is None
    none = changed(("removal", reference("f")))
    assert rules(messages=none, tools=[TOOL]).choice == "none"
    demand = {"type": "tool", "name": "f"}
    assert refusal(messages=messages, tools=[TOOL], tool_choice=demand) == (
        "invalid_value",
        "tool_choice.name",
    )
    assert refusal(messages=none, tools=[TOOL], tool_choice={"type": "any"}) == (
        "invalid_value",
        "tool_choice.type",
    )


def test_changes_name_tools_that_are_there() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    messages = changed(("removal", reference("web_search")), ("addition", reference("web_search")))
    assert parse(messages=messages, tools=[TOOL, hosted]).params.tools is not None
    assert refusal(messages=changed(("addition", reference("x"))), tools=[TOOL]) == (
        "invalid_value",
        "messages[1].content[0].tool.name",
    )
    twice = changed(("addition", {"type": "tool_definition", "definition": TOOL}))
    assert refusal(messages=twice, tools=[TOOL])[0] == "invalid_value"


def test_many_tools_are_fine() -> None:
    tools = [TOOL | {"name": f"tool_number_{number:028d}"} for number in range(512)]
    assert len(rules(tools=tools).tools) == 512


# Thinking.


@pytest.mark.parametrize(
    ("thinking", "max_tokens", "is_on", "budget"),
    [
        (None, 100, None, None),
        ({"type": "disabled"}, 100, False, None),
        ({"type": "adaptive"}, 100, True, None),
        ({"type": "between_tools"}, 100, True, None),
        ({"type": "enabled"}, 100, True, None),
        ({"type": "enabled", "budget_tokens": 1}, 100, True, 1),
        ({"type": "enabled", "budget_tokens": 1024}, None, True, 1024),
        ({"type": "enabled", "budget_tokens": 1024}, 1024, True, 1023),
        ({"type": "enabled", "budget_tokens": 1024}, 1, True, 1),
        ({"type": "disabled", "budget_tokens": 5}, 100, False, None),
    ],
)
def test_thinking(
    thinking: Any, max_tokens: int | None, is_on: bool | None, budget: int | None
) -> None:
    request = parse(thinking=thinking, max_tokens=max_tokens)
    assert request.chat.template_kwargs.get("enable_thinking") is is_on
    assert request.params.thinking_budget == budget


def test_display_of_thinking() -> None:
    for display, hides in (("omitted", True), ("summarized", False), ("new", False)):
        thinking = {"type": "adaptive", "display": display}
        assert parse(thinking=thinking).hides_thinking is hides


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_every_effort_thinks(effort: str) -> None:
    request = parse(output_config={"effort": effort}, thinking={"type": "adaptive"})
    assert request.chat.template_kwargs["enable_thinking"] is True


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        (5, "thinking"),
        ({"type": "x"}, "thinking.type"),
        ({"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": "x"}, "thinking.budget_tokens"),
        ({"type": "adaptive", "display": 5}, "thinking.display"),
    ],
)
def test_refused_thinking(thinking: Any, param: str) -> None:
    assert refusal(thinking=thinking)[1] == param


def test_a_prefill_is_continued_without_thinking() -> None:
    request = parse(
        messages=[USER, ANSWER],
        thinking={"type": "enabled", "budget_tokens": 2000},
        max_tokens=4000,
    )
    assert request.chat.continue_final_message
    assert not request.chat.add_generation_prompt
    assert request.chat.template_kwargs["enable_thinking"] is False
    assert request.params.thinking_budget is None


# Structured output.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format.schema"),
    ],
)  # fmt: skip
def test_a_schema_constrains_the_answer(fields: dict[str, Any], param: str) -> None:
    constraint = parse(**fields).params.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param, constraint.is_strict) == ("json_schema", param, True)
    assert json.loads(constraint.text) == SCHEMA
    with_tools = parse(**fields, tools=[TOOL])
    assert with_tools.params.constraint == constraint
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        assert refusal(**fields, tools=[TOOL], tool_choice=choice) == ("invalid_value", param)
    assert refusal(**fields, messages=[USER, ANSWER]) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"output_config": 5}, "invalid_type", "output_config"),
        ({"output_config": {"format": {}}}, "missing_required_parameter",
         "output_config.format.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "invalid_value",
         "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "missing_required_parameter",
         "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "invalid_type",
         "output_format.schema"),
    ],
)  # fmt: skip
def test_refused_formats(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (code, param)
    assert parse(output_config={"format": None}, output_format=None).params.constraint is None


def test_spellings_of_other_protocols_constrain_too() -> None:
    constraint = parse(guided_regex="a+").params.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("regex", "guided_regex")
    fields = {"output_format": {"type": "json_schema", "schema": SCHEMA}}
    assert refusal(**fields, guided_regex="a+") == ("invalid_value", "guided_regex")
    assert refusal(**fields, output_config={"format": fields["output_format"]}) == (
        "invalid_value",
        "output_format.schema",
    )


# The conversation's name.


@pytest.mark.parametrize(
    ("user_id", "key"),
    [
        ("user_0af1_account_11-22_session_3f2a-77b0", "3f2a-77b0"),
        ('{"device_id": "d", "account_uuid": "a", "session_id": "3f2a"}', "3f2a"),
        ('{"device_id": "d"}', '{"device_id": "d"}'),
        ("{not json", "{not json"),
        ("someone", "someone"),
        ("", None),
        ("x" * 1025, None),
        (5, None),
        (None, None),
    ],
)
def test_the_user_id_names_the_conversation(user_id: Any, key: str | None) -> None:
    assert parse(metadata={"user_id": user_id}).params.cache.session_key == key


def test_a_name_of_its_own_comes_first() -> None:
    metadata = {"user_id": "u"}
    assert parse("header", metadata=metadata).params.cache.session_key == "header"
    assert parse("header", session_id="own", metadata=metadata).params.cache.session_key == "own"
