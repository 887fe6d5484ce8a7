"""XML parameters by the types of their schema."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools, Types
from ninfer.frontend.tool_calls.parameter_values import MAX_MENDED_LENGTH, json_value

JSON_VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _types(schema: Any, **root: Any) -> Types:
    parameters = {"type": "object", "properties": {"p": schema}, **root}
    tools = DeclaredTools(ToolRules(tools=(ToolSpec("f", parameters),)))
    return tools.types("f", "p")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("123", {"type": "string"}, "123"),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": "string"}, "null"),
        ("", {"type": "string"}, ""),
        (" a ", {"type": "string"}, " a "),
        ("5", {"type": "integer"}, 5),
        (" -5 ", {"type": "integer"}, -5),
        ("5.0", {"type": "integer"}, 5.0),
        ("five", {"type": "integer"}, "five"),
        ("007", {"type": "integer"}, "007"),
        ("", {"type": "integer"}, ""),
        ("1e400", {"type": "number"}, "1e400"),
        ("2.5", {"type": "number"}, 2.5),
        ("TRUE", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": "null"}, None),
        ("None", {"type": "integer", "nullable": True}, None),
        ("None", {"type": "integer"}, "None"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5x", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5x"),
        ("{'a': 1}", {"type": ["string", "object"]}, "{'a': 1}"),
        ('"q"', {"type": ["string", "integer"]}, '"q"'),
        ('{"a": [1, null]}', {"type": "object"}, {"a": [1, None]}),
        ('{"a": "b\nc"}', {"type": "object"}, {"a": "b\nc"}),
        ("{'a': True, 'b': None,}", {"type": "object"}, {"a": True, "b": None}),
        (
            "['it\\'s', \"a 'b'\", 'x\"y', '\\x41']",
            {"type": "array"},
            ["it's", "a 'b'", 'x"y', "A"],
        ),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("5", {"type": "object"}, "5"),
        ("[" * 200 + "]" * 200, {"type": "array"}, "[" * 200 + "]" * 200),
        ("5", {}, 5),
        ("Paris", {}, "Paris"),
        ("True", {}, "True"),
        ('"q"', {}, "q"),
        ("a", {"enum": ["a", "b"]}, "a"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"const": "2"}, "2"),
    ],
)
def test_value_by_its_schema(text: str, schema: Any, value: Any) -> None:
    read = json.loads(json_value(text, _types(schema)))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("null", {"type": ["string", "null"], "enum": ["null", "None"]}, "null"),
        ("None", {"type": ["string", "null"], "enum": ["null", "None"]}, "None"),
        ("null", {"type": ["string", "null"], "enum": ["q", None]}, None),
        ("5", {"type": ["string", "integer"], "enum": ["5", "x"]}, "5"),
        ("6", {"type": ["string", "integer"], "enum": ["5", 6]}, 6),
        ("true", {"anyOf": [{"const": "true"}, {"type": "boolean"}]}, "true"),
        ("5", {"$ref": "#/$defs/five"}, "5"),
    ],
)
def test_a_listed_string_is_that_string(text: str, schema: Any, value: Any) -> None:
    parameters = {"properties": {"p": schema}, "$defs": {"five": {"enum": ["5", 5, None]}}}
    tools = DeclaredTools(ToolRules(tools=(ToolSpec("f", parameters),)))
    read = json.loads(json_value(text, tools.types("f", "p"), tools.texts("f", "p")))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"},
        {"allOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]},
        {"anyOf": [{"properties": {"q": {}}}, {"$ref": "#/$defs/a"}]},
    ],
)
def test_parameters_are_found_wherever_they_are_declared(schema: Any) -> None:
    defs = {"a": {"properties": {"p": {"type": "string"}}}}
    tools = DeclaredTools(ToolRules(tools=(ToolSpec("f", {**schema, "$defs": defs}),)))
    assert tools.types("f", "p") == frozenset({"string"})


def test_parameter_that_is_not_declared_is_json_or_a_string() -> None:
    tools = DeclaredTools(ToolRules(tools=(ToolSpec("f", {"type": "object"}), ToolSpec("g"))))
    assert tools.types("f", "p") is None
    assert tools.types("g", "p") is None


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/a~1b"}, {"string"}),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/missing"}, None),
        ({"$ref": "https://example.org/a"}, None),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/a~1b"}]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}, {}]}, {"string"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"type": 5}, None),
        (True, None),
        ({"enum": "abc"}, None),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str] | None) -> None:
    defs = {"a/b": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    assert _types(schema, **{"$defs": defs}) == types


@given(JSON_VALUES.filter(lambda value: isinstance(value, list | dict)))
def test_python_literals_are_mended(value: Any) -> None:
    schema = {"type": "array" if isinstance(value, list) else "object"}
    text = repr(value)
    if not any(mark in text for mark in ("\\U", "\\u", "\ud800")):
        assert json.loads(json_value(text, _types(schema))) == value


@given(JSON_VALUES)
def test_json_is_passed_on_as_it_is(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert json_value(text, None) == text


@given(st.text(alphabet="[]{}'\"\\,:aTn \n", max_size=40))
def test_anything_becomes_json(text: str) -> None:
    for types in (None, frozenset({"object"}), frozenset({"array", "null"})):
        json.loads(json_value(text, types))


def test_long_text_is_not_mended() -> None:
    text = f"['{'a' * MAX_MENDED_LENGTH}']"
    assert json.loads(json_value(text, frozenset({"array"}))) == text


@given(
    st.recursive(
        JSON_VALUES,
        lambda inner: st.dictionaries(
            st.sampled_from(
                ["type", "anyOf", "allOf", "$ref", "enum", "const", "nullable", "items"]
            ),
            inner
            | st.sampled_from(["string", "#", "#/$defs/a", "#/properties/p"])
            | st.lists(inner),
        ),
        max_leaves=10,
    )
)
def test_any_schema_has_types_or_none(schema: Any) -> None:
    types = _types(schema, **{"$defs": {"a": schema}})
    json.loads(json_value("{'a': 1}", types))
