"""Structured output in all spellings, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import Constraint
from ninfer.contract.errors import RequestError
from ninfer.gateway.constraint_fields import parse_constraint
from ninfer.gateway.fields import Fields

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = '{"type": "object", "properties": {"b": {}, "a": {}}}'


def schema(param: str, *, is_strict: bool = False) -> Constraint:
    return Constraint("json_schema", TEXT, param, is_strict)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Constraint("json_object", "", "response_format.type"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            schema("response_format.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
            schema("response_format.schema", is_strict=True),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            schema("response_format.json_schema.schema"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            schema("response_format.json_schema.schema", is_strict=True),
        ),
        ({"guided_json": SCHEMA}, schema("guided_json")),
        ({"guided_json": TEXT}, schema("guided_json")),
        ({"json_schema": TEXT}, schema("json_schema")),
        ({"guided_json": None, "guided_regex": None, "grammar": None, "json_schema": None}, None),
        ({"grammar": ""}, None),
        ({"json_schema": False}, Constraint("json_schema", "false", "json_schema", False)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            Constraint("json_schema", "false", "response_format.json_schema.schema", False),
        ),
        ({"guided_regex": "a+"}, Constraint("regex", "a+", "guided_regex")),
        ({"regex": "a+"}, Constraint("regex", "a+", "regex")),
        ({"guided_choice": ["a", "é"]}, Constraint("choice", '["a", "é"]', "guided_choice")),
        ({"grammar": 'root ::= "a"'}, Constraint("gbnf", 'root ::= "a"', "grammar")),
        ({"ebnf": 'root ::= "a"'}, Constraint("gbnf", 'root ::= "a"', "ebnf")),
        ({"guided_grammar": 'start: "a"'}, Constraint("lark", 'start: "a"', "guided_grammar")),
        ({"structured_outputs": {"json": SCHEMA}}, schema("structured_outputs.json")),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint("json_object", "", "structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"json_object": False, "disable_any_whitespace": True}}, None),
        (
            {"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}},
            Constraint("regex", "a+", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[\\n\\t ]*"}},
            schema("structured_outputs.json"),
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "\\s*"},
            schema("guided_json"),
        ),
        ({"guided_whitespace_pattern": ""}, None),
    ],
)
def test_spellings(fields: dict[str, Any], expected: Constraint | None) -> None:
    assert parse_constraint(Fields(fields)) == expected


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": "json"}, "invalid_type", "response_format"),
        ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        (
            {"response_format": {"type": "structural_tag"}},
            "unsupported_value",
            "response_format.type",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "missing_required_parameter",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        ({"guided_json": 5}, "invalid_type", "guided_json"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_choice": ["a", 1]}, "invalid_type", "guided_choice[1]"),
        ({"guided_choice": "a"}, "invalid_type", "guided_choice"),
        ({"regex": 5}, "invalid_type", "regex"),
        ({"regex": "a", "guided_choice": ["a"]}, "invalid_value", "regex"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "invalid_value",
            "guided_regex",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "invalid_value",
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"josn": {}}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "invalid_value", "structured_outputs"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}},
            "unsupported_value",
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "unsupported_value",
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "unsupported_value",
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            "unsupported_value",
            "guided_whitespace_pattern",
        ),
        ({"guided_whitespace_pattern": 5}, "invalid_type", "guided_whitespace_pattern"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "description": 5},
                }
            },
            "invalid_type",
            "response_format.json_schema.description",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "unsupported_value",
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_constraint(Fields(fields))
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    "name",
    ["guided_json", "guided_regex", "guided_grammar", "json_schema", "regex", "ebnf"],
)
def test_an_empty_text_is_no_constraint_and_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_constraint(Fields({name: ""}))
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)
    for inner in ("json", "regex", "grammar"):
        with pytest.raises(RequestError):
            parse_constraint(Fields({"structured_outputs": {inner: ""}}))
