"""Tools of a chat request: one shape for the template, and rules which may be called."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.tool_fields import FREE_FORM, ChatTools, parse_chat_tools


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def parse(*tools: Any, **fields: Any) -> ChatTools:
    return parse_chat_tools(Fields({"tools": list(tools), **fields}))


def rules(*tools: Any, **fields: Any) -> ToolRules:
    parsed = parse(*tools, **fields).rules
    assert parsed is not None
    return parsed


def test_shapes_become_one() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    parsed = parse(
        tool("f", description="does f", parameters=parameters, strict=True),
        {"type": "function", "name": "flat", "parameters": None},
        {"type": "custom", "custom": {"name": "patch", "description": "p"}},
        {"type": "web_search"},
    )
    assert [dict(item) for item in parsed.objects] == [
        tool("f", description="does f", parameters=parameters),
        tool("flat"),
        tool("patch", description="p", parameters=FREE_FORM),
    ]
    assert parsed.rules == ToolRules(
        tools=(ToolSpec("f", parameters, True), ToolSpec("flat"), ToolSpec("patch", FREE_FORM))
    )
    paths = [spec.path for spec in parsed.rules.tools]
    assert paths == ["tools[0].function.parameters", "tools[1].parameters", None]


def test_legacy_functions_are_tools() -> None:
    fields = {"functions": [{"name": "f"}], "function_call": {"name": "f"}}
    parsed = parse_chat_tools(Fields(fields))
    assert [dict(item) for item in parsed.objects] == [tool("f")]
    assert parsed.rules == ToolRules(tools=(ToolSpec("f"),), choice="required", allowed=("f",))


ALLOWED: dict[str, Any] = {"tools": [tool("g"), {"type": "web_search"}, tool("g")]}


@pytest.mark.parametrize(
    ("choice", "kind", "allowed"),
    [
        (None, "auto", None),
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        ("any", "required", None),
        ({"type": "function", "function": {"name": "g"}}, "required", ("g",)),
        ({"type": "function", "name": "g"}, "required", ("g",)),
        ({"function": {"name": "g"}}, "required", ("g",)),
        ({"type": "custom", "custom": {"name": "g"}}, "required", ("g",)),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", **ALLOWED}}, "auto", ("g",)),
        ({"type": "allowed_tools", "mode": "required", **ALLOWED}, "required", ("g",)),
        ({"type": "allowed_tools", "tools": []}, "none", ()),
    ],
)
def test_choices(choice: Any, kind: str, allowed: tuple[str, ...] | None) -> None:
    parsed = rules(tool("f"), tool("g"), tool_choice=choice)
    assert (parsed.choice, parsed.allowed, parsed.parallel) == (kind, allowed, True)


@pytest.mark.parametrize(("value", "parallel"), [(False, False), (True, True), (None, True)])
def test_parallel_calls(value: bool | None, parallel: bool) -> None:
    assert rules(tool("f"), parallel_tool_calls=value).parallel is parallel


def test_nothing_to_call() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert parse(**fields) == ChatTools()
    assert parse({"type": "web_search"}) == ChatTools()


def test_grammar_of_a_custom_tool_is_told_and_cannot_be_demanded() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    patch = {"type": "custom", "custom": {"name": "patch", "format": form}}
    (item,) = parse(patch).objects
    assert item["function"]["description"] == "The input must match this regex grammar:\na+"
    with pytest.raises(RequestError) as caught:
        parse(patch, tool_choice="required")
    assert (caught.value.code, caught.value.param) == ("unsupported_value", "tool_choice")
    assert rules(patch, tool("f"), tool_choice="required").choice == "required"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "invalid_value", "tool_choice"),
        ({"function_call": {"name": "f"}}, "invalid_value", "function_call"),
        ({"functions": [{"name": "f"}] * 2}, "invalid_value", "functions"),
        (
            {"functions": [{"name": f"f{index}"} for index in range(513)]},
            "invalid_value",
            "functions",
        ),
        ({"tools": [tool("f")] * 2}, "invalid_value", "tools"),
        ({"tools": [tool("a b")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "invalid_value", "tools[0].function.name"),
        (
            {"tools": [{"type": "function"}]},
            "missing_required_parameter",
            "tools[0].name",
        ),
        (
            {"tools": [tool("f", parameters=[])]},
            "invalid_type",
            "tools[0].function.parameters",
        ),
        ({"tools": [tool("f", strict="yes")]}, "invalid_type", "tools[0].function.strict"),
        ({"tools": "f"}, "invalid_type", "tools"),
        ({"tools": [5]}, "invalid_type", "tools[0]"),
        ({"tools": [tool("f")], "tool_choice": "g"}, "invalid_value", "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": 5}, "invalid_type", "tool_choice"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function"}},
            "missing_required_parameter",
            "tool_choice.name",
        ),
        (
            {"tools": [tool("f")], "tool_choice": tool("g")},
            "invalid_value",
            "tool_choice.function.name",
        ),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "web_search"}},
            "unsupported_value",
            "tool_choice.type",
        ),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "mode": "none"}},
            "invalid_value",
            "tool_choice.mode",
        ),
        (
            {
                "tools": [tool("f")],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []},
            },
            "invalid_value",
            "tool_choice.tools",
        ),
        (
            {
                "tools": [tool("f")],
                "tool_choice": {"type": "allowed_tools", "tools": [tool("f"), tool("g")]},
            },
            "invalid_value",
            "tool_choice.tools[1].function.name",
        ),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}},
            "missing_required_parameter",
            "tool_choice.tools",
        ),
        (
            {
                "tools": [tool("f")],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"a": 1}},
            },
            "missing_required_parameter",
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": [tool("f")], "parallel_tool_calls": "no"},
            "invalid_type",
            "parallel_tool_calls",
        ),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat_tools(Fields(fields))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_as_many_tools_as_agents_send() -> None:
    names = [f"{index:03d}_{'n' * 36}" for index in range(512)]
    assert len(rules(*(tool(name) for name in names)).tools) == 512


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["f", "function", "auto", "custom"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "custom", "tools", "mode", "format", "strict"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(tools=JSON_VALUES, choice=JSON_VALUES, functions=JSON_VALUES, call=JSON_VALUES)
def test_anything_is_taken_or_refused(tools: Any, choice: Any, functions: Any, call: Any) -> None:
    fields = {
        "tools": tools,
        "tool_choice": choice,
        "functions": functions,
        "function_call": call,
    }
    param: str | None = "tools"
    try:
        parsed = parse_chat_tools(Fields(fields))
    except RequestError as error:
        param = error.param
    else:
        assert (parsed.rules is None) == (not parsed.objects)
    assert param is not None
    assert re.split(r"[.\[]", param)[0] in fields
