"""Grammars of tool calls: which calls, in which form, and when. For arguments see beside."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import ConstraintKind, ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.call_grammar import CallGrammars
from ninfer.frontend.constraints.grammar import build_grammar
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.tool_calls.call_format import CallFormat, JsonCallFormat, XmlCallFormat
from tests.helpers.grammar_rig import accepts, constraint, matcher_of, vocabulary

WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 5},
            "unit": {"enum": ["c", "f"]},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "unit"],
        "$defs": {"place": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
    },
)
NOW = ToolSpec("now")
ANSWERS: tuple[tuple[ConstraintKind, str, str], ...] = (
    ("json_object", "", '{"a": 1}'),
    ("regex", "[0-9]+", "12"),
    ("choice", '["yes", "no"]', "yes"),
    ("lark", 'start: "a" b\nb: "c"', "ac"),
)


def calls(form: CallFormat, *tools: ToolSpec, several: bool = True, answer: Any = None) -> Matcher:
    grammars = CallGrammars(form, vocabulary())
    return matcher_of(grammars.calls(tools, "tools", several=several, answer=answer))


def xml(name: str, **values: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        (xml("get_weather", city="Oslo", unit="c"), True),
        (xml("get_weather", city="A\n</x>  b", days="3", unit="f", where="[1.5, 2]"), True),
        (xml("get_weather", city="", unit="c"), True),
        (xml("now"), True),
        (xml("now") + "\n" + xml("get_weather", city="x", unit="c"), True),
        (xml("get_weather", city="Oslo"), False),
        (xml("get_weather", city="Oslo", unit="k"), False),
        (xml("get_weather", city="Oslo", days="9", unit="c"), False),
        (xml("get_weather", unit="c", city="Oslo"), False),
        (xml("other"), False),
        (xml("now", city="x"), False),
        ("Hello " + xml("now"), False),
        ("", False),
    ],
)
def test_xml_calls(text: str, is_call: bool) -> None:
    assert accepts(calls(XmlCallFormat(), WEATHER, NOW), text) == is_call


@pytest.mark.parametrize(
    ("arguments", "is_call"),
    [
        ('{"city": "Oslo", "unit": "c"}', True),
        ('{"city": "Oslo", "days": 2, "unit": "c", "where": [1]}', True),
        ('{"city": "Oslo"}', False),
        ('{"city": 1, "unit": "c"}', False),
    ],
)
def test_json_calls(arguments: str, is_call: bool) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    start = calls(JsonCallFormat(), WEATHER, NOW)
    assert accepts(start, text) == is_call
    assert accepts(start, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not accepts(start, '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>')


def test_one_call_when_they_may_not_be_parallel() -> None:
    start = calls(XmlCallFormat(), NOW, several=False)
    assert accepts(start, xml("now"))
    assert not accepts(start, xml("now") + "\n" + xml("now"))


def test_an_answer_or_calls() -> None:
    for kind, text, good in ANSWERS:
        answer = build_grammar(constraint(kind, text))
        start = calls(XmlCallFormat(), NOW, answer=answer)
        assert accepts(start, good)
        assert accepts(start, xml("now"))
        assert not accepts(start, good + xml("now"))


def test_strict_and_other_tools_behind_the_mark() -> None:
    strict = ToolSpec("get_weather", WEATHER.parameters, is_strict=True)
    loose = ToolSpec("free", {"type": "object", "properties": {"a": {"not": {}}}})
    start = matcher_of(CallGrammars(XmlCallFormat(), vocabulary()).body([strict, loose], "tools"))
    assert accepts(start, xml("get_weather", city="x", unit="c").removeprefix("<tool_call>"))
    assert not accepts(start, xml("get_weather", city="x").removeprefix("<tool_call>"))
    assert accepts(start, xml("free", anything="[}").removeprefix("<tool_call>"))


def test_a_strict_tool_that_cannot_be_enforced_is_named() -> None:
    tool = ToolSpec(
        "bad", {"type": "object", "properties": {"a": {"contains": {}}}}, is_strict=True
    )
    with pytest.raises(RequestError) as caught:
        calls(XmlCallFormat(), tool)
    assert caught.value.param == "tools.bad.properties.a.contains"
    calls(XmlCallFormat(), ToolSpec("bad", tool.parameters))
