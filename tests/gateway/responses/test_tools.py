"""Tools of every kind, and every way to say which of them may be called."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.responses.tools import ToolSet, parse_tool_rules, parse_tools
from ninfer.gateway.tool_fields import FREE_FORM, MAX_TOOLS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
HELD = {"type": "custom", "name": "held", "format": GRAMMAR}
BOX = {
    "type": "namespace",
    "name": "box",
    "description": "A box.",
    "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "put"}],
}
ALL = [FUNCTION, PATCH, HELD, BOX]


def tools_of(*entries: Any) -> ToolSet:
    return parse_tools(Fields({"tools": list(entries)}))


def specs_of(tools: ToolSet) -> tuple[ToolSpec, ...]:
    return tuple(tool.function.spec for tool in tools.tools)


def rules(choice: Any = None, tools: Any = ALL, **fields: Any) -> ToolRules | None:
    given = Fields({"tools": tools, "tool_choice": choice, **fields})
    return parse_tool_rules(given, parse_tools(given))


def some_rules(choice: Any = None, **fields: Any) -> ToolRules:
    found = rules(choice, **fields)
    assert found is not None
    return found


def test_a_function() -> None:
    tools = tools_of(FUNCTION)
    function = {"name": "f", "parameters": SCHEMA}
    assert tools.template_objects() == ({"type": "function", "function": function},)
    assert specs_of(tools) == (ToolSpec("f", SCHEMA, is_strict=True),)


def test_a_nested_function_and_one_without_a_type() -> None:
    nested = {"type": "function", "function": {"name": "g", "description": "G."}}
    tools = tools_of(nested, {"name": "h", "parameters": None})
    assert [tool.called for tool in tools.tools] == ["g", "h"]
    assert specs_of(tools)[1] == ToolSpec("h", None)


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    tools = tools_of(PATCH)
    function = {"name": "patch", "description": "Edits.", "parameters": FREE_FORM}
    assert tools.template_objects() == ({"type": "function", "function": function},)
    assert tools.of_call("patch").function.is_custom


def test_a_grammar_is_told_to_the_model() -> None:
    (tool,) = tools_of(HELD).tools
    assert tool.function.description == "The input must match this lark grammar:\nstart: /a/"
    assert tool.function.has_grammar


def test_members_of_a_namespace_lead_back_to_it() -> None:
    tools = tools_of(*ALL)
    assert [tool.called for tool in tools.tools] == ["f", "patch", "held", "box.f", "box.put"]
    tool = tools.of_call("box.put")
    assert (tool.namespace, tool.name, tool.function.is_custom) == ("box", "put", True)
    assert tools.call_name("box", "f") == "box.f"
    assert tools.call_name(None, "f") == "f"


def test_a_joined_name_that_is_taken_gives_way() -> None:
    dotted = {"type": "namespace", "name": "a.b", "tools": [{"name": "c"}]}
    plain = {"type": "namespace", "name": "a", "tools": [{"name": "b.c"}]}
    tools = tools_of(dotted, plain, {"name": "a.b.c"})
    assert [tool.called for tool in tools.tools] == ["a.b.c_", "a.b.c__", "a.b.c"]
    assert len({tools.of_call(tool.called) for tool in tools.tools}) == 3


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview_2025_03_11",
        "image_generation",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "mcp",
        "tool_search",
        "local_shell",
        "apply_patch",
    ],
)
def test_hosted_tools_are_skipped(kind: str) -> None:
    hosted = {"type": kind, "name": "x y", "parameters": 5}
    assert tools_of(hosted, FUNCTION) == tools_of(FUNCTION)
    assert rules(None, [hosted]) is None


@pytest.mark.parametrize(
    ("tools", "code", "path"),
    [
        (5, "invalid_type", "tools"),
        ([5], "invalid_type", "tools[0]"),
        ([{"type": "function"}], "missing_required_parameter", "tools[0].name"),
        ([{"type": "function", "name": "a b"}], "invalid_value", "tools[0].name"),
        ([{**FUNCTION, "parameters": 5}], "invalid_type", "tools[0].parameters"),
        ([{**FUNCTION, "strict": 5}], "invalid_type", "tools[0].strict"),
        ([FUNCTION, FUNCTION], "invalid_value", "tools"),
        ([BOX, BOX], "invalid_value", "tools"),
        ([{**BOX, "tools": [{}]}], "missing_required_parameter", "tools[0].tools[0].name"),
        ([{"name": f"f{index}"} for index in range(MAX_TOOLS + 1)], "invalid_value", "tools"),
        ([{**PATCH, "format": {"type": "x"}}], "invalid_value", "tools[0].format.type"),
        (
            [{**PATCH, "format": {"type": "grammar", "syntax": "x", "definition": "x"}}],
            "invalid_value",
            "tools[0].format.syntax",
        ),
        (
            [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}],
            "missing_required_parameter",
            "tools[0].format.definition",
        ),
    ],
)
def test_bad_tools_are_named(tools: Any, code: str, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(Fields({"tools": tools}))
    assert (caught.value.code, caught.value.param) == (code, path)


def test_many_tools_are_taken() -> None:
    assert len(tools_of(*({"name": f"f{index}"} for index in range(MAX_TOOLS))).tools) == MAX_TOOLS


@pytest.mark.parametrize(
    ("choice", "expected", "allowed"),
    [
        (None, "auto", None),
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        ("any", "required", None),
        ({"type": "function", "name": "f"}, "required", ("f",)),
        ({"type": "function", "function": {"name": "f"}}, "required", ("f",)),
        ({"type": "custom", "name": "patch"}, "required", ("patch",)),
        ({"type": "custom", "name": "put"}, "required", ("box.put",)),
        ({"type": "function", "name": "f", "namespace": "box"}, "required", ("box.f",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "auto",
            ("f",),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "namespace", "name": "box"}, {"name": "patch"}, {"name": "f"}],
            },
            "required",
            ("box.f", "box.put", "patch", "f"),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            "none",
            (),
        ),
    ],
)
def test_choices(choice: Any, expected: str, allowed: tuple[str, ...] | None) -> None:
    found = some_rules(choice)
    assert (found.choice, found.allowed, found.parallel) == (expected, allowed, True)
    assert found.tools == specs_of(tools_of(*ALL))


def test_one_call_at_a_time() -> None:
    assert some_rules(parallel_tool_calls=False).parallel is False
    assert some_rules(parallel_tool_calls=None).parallel is True


@pytest.mark.parametrize("choice", [None, "auto", "none"])
@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search"}]])
def test_nothing_to_call(choice: Any, tools: Any) -> None:
    assert rules(choice, tools) is None


@pytest.mark.parametrize(
    ("choice", "tools", "code", "path"),
    [
        (5, ALL, "invalid_type", "tool_choice"),
        ("sometimes", ALL, "invalid_value", "tool_choice"),
        ("required", [], "invalid_value", "tool_choice"),
        ({}, ALL, "missing_required_parameter", "tool_choice.name"),
        ({"type": "web_search"}, ALL, "unsupported_value", "tool_choice.type"),
        ({"type": "mcp", "server_label": "x"}, ALL, "unsupported_value", "tool_choice.type"),
        ({"type": "function"}, ALL, "missing_required_parameter", "tool_choice.name"),
        ({"type": "function", "name": "g"}, ALL, "invalid_value", "tool_choice.name"),
        ({"type": "function", "name": "f"}, [], "invalid_value", "tool_choice"),
        (
            {"type": "function", "name": "put", "namespace": "bag"},
            ALL,
            "invalid_value",
            "tool_choice.name",
        ),
        (
            {"type": "allowed_tools", "mode": "never", "tools": []},
            ALL,
            "invalid_value",
            "tool_choice.mode",
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            ALL,
            "invalid_value",
            "tool_choice.tools",
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]},
            ALL,
            "invalid_value",
            "tool_choice.tools[0].name",
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "bag"}]},
            ALL,
            "invalid_value",
            "tool_choice.tools[0].name",
        ),
        ({"type": "custom", "name": "held"}, ALL, "unsupported_value", "tool_choice"),
        ("required", [HELD], "unsupported_value", "tool_choice"),
    ],
)
def test_bad_choices_are_named(choice: Any, tools: Any, code: str, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        rules(choice, tools)
    assert (caught.value.code, caught.value.param) == (code, path)


def test_a_grammar_is_no_hindrance_unless_its_call_is_demanded() -> None:
    assert some_rules("required").choice == "required"
    assert some_rules("auto", tools=[HELD]).choice == "auto"
