"""Tools: brought to one shape when calls are ruled out, refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.tool_fields import parse_tools


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def parse(*tools: Any, choice: Any = "none", **fields: Any) -> list[dict[str, Any]]:
    values = {"tools": list(tools), "tool_choice": choice, **fields}
    return [dict(item) for item in parse_tools(Fields(values))]


def test_shapes_become_one() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert parse(
        tool("f", description="does f", parameters=parameters, strict=True),
        {"type": "function", "name": "flat", "parameters": None},
        {"type": "custom", "custom": {"name": "patch", "description": "p"}},
        {"type": "web_search"},
    ) == [
        tool("f", description="does f", parameters=parameters),
        tool("flat"),
        tool(
            "patch",
            description="p",
            parameters={
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            },
        ),
    ]


def test_legacy_functions_are_tools() -> None:
    fields = Fields({"functions": [{"name": "f"}], "function_call": "none"})
    assert [dict(item) for item in parse_tools(fields)] == [tool("f")]


@pytest.mark.parametrize(
    "choice",
    [None, "auto", "required", {"type": "function", "function": {"name": "f"}}],
)
def test_possible_calls_are_refused_and_not_dropped(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(tool("f"), choice=choice)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == "tools"


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "name": "f"}])
def test_a_forced_call_needs_tools(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(choice=choice)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "tool_choice")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}] * 2, "function_call": "none"}, "functions"),
        ({"functions": [{"name": f"f{index}"} for index in range(513)]}, "functions"),
    ],
)
def test_legacy_fields_are_named_as_they_were_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(Fields(fields))
    assert caught.value.param == param


@pytest.mark.parametrize("count", [21, 512])
def test_many_tools(count: int) -> None:
    assert len(parse(*(tool(f"{'n' * 40}{index}") for index in range(count)))) == count


@pytest.mark.parametrize(
    ("tools", "code", "param"),
    [
        ([tool("a b")], "invalid_value", "tools[0].function.name"),
        ([tool("x" * 129)], "invalid_value", "tools[0].function.name"),
        ([tool("a"), tool("a")], "invalid_value", "tools"),
        ([tool(f"t{index}") for index in range(513)], "invalid_value", "tools"),
        (
            [{"type": "function", "function": {}}],
            "missing_required_parameter",
            "tools[0].function.name",
        ),
        ([tool("a", parameters=[])], "invalid_type", "tools[0].function.parameters"),
        (["f"], "invalid_type", "tools[0]"),
    ],
)
def test_refusals(tools: list[Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(*tools)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_bad_choices() -> None:
    for choice, code in (("sometimes", "invalid_value"), (5, "invalid_type")):
        with pytest.raises(RequestError) as caught:
            parse(choice=choice)
        assert (caught.value.code, caught.value.param) == (code, "tool_choice")
