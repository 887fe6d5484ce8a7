"""What schemas mean together: unions that exclude, members that are counted, merged and named."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from ninfer.contract.chat import ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.call_grammar import CallGrammars
from ninfer.frontend.constraints.json_grammar import json_lark
from ninfer.frontend.tool_calls.call_format import JsonCallFormat
from tests.helpers.grammar_rig import (
    PARAM,
    accepts,
    matcher_of,
    refusal,
    schema_matcher,
    vocabulary,
    walk,
)

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "tricks": {"type": "integer"}}}


def check(schema: Any, good: list[str], bad: list[str], *, is_strict: bool = True) -> None:
    start = schema_matcher(schema, is_strict=is_strict)
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
        ({"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}]}, ['"a"', '"c"'], ['"d"']),
        (
            {"oneOf": [{**CAT, "required": ["kind"]}, {**DOG, "required": ["kind"]}]},
            ['{"kind":"cat","lives":9}', '{"kind":"dog"}'],
            ['{"kind":"cow"}', '{"lives":9}', "{}"],
        ),
        # A member that would tell them apart is demanded.
        ({"oneOf": [CAT, DOG]}, ['{"kind":"cat"}', '{"kind":"dog"}'], ["{}", '{"lives":1}']),
        (
            {
                "$defs": {"cat": CAT, "dog": DOG},
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            },
            ['{"kind":"cat"}'],
            ["{}"],
        ),
        # The other one is denied.
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a":1}', '{"b":1}'],
            ["{}", '{"a":1,"b":1}'],
        ),
        (
            {"type": "integer", "oneOf": [{"minimum": 5}, {"maximum": 9}]},
            ["4", "10"],
            ["5", "7", "9"],
        ),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "null"}]}, ['"a"'], ["null"]),
        (
            {
                "oneOf": [
                    {"type": "string", "pattern": "^a"},
                    {"type": "string", "pattern": "^b"},
                ],
                "anyOf": [{"maxLength": 2}],
            },
            ['"ab"', '"b"'],
            ['"abc"', '"c"'],
        ),
    ],
)
def test_exactly_one_of_them_holds(schema: Any, good: list[str], bad: list[str]) -> None:
    check(schema, good, bad)


OVERLAP = {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}


def test_one_of_what_cannot_be_told_apart_is_refused_when_strict() -> None:
    assert refusal("json_schema", OVERLAP) == ("invalid_json_schema", f"{PARAM}.oneOf")
    nested = {"properties": {"x": {"items": OVERLAP}}}
    place = f"{PARAM}.properties.x.items.oneOf"
    assert refusal("json_schema", nested) == ("invalid_json_schema", place)


def test_it_counts_as_any_of_when_not_strict() -> None:
    check(OVERLAP, ['"a"', '"b"', '"ab"'], ['"c"'], is_strict=False)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"not": {"type": ["object", "array"]}}, ["1", '"a"', "null"], ["{}", "[]"]),
        ({"type": "number", "not": {"minimum": 3}}, ["2.5", "-7"], ["3", "4"]),
        (
            {"type": "object", "not": {"required": ["a", "b"]}},
            ['{"a":1}', '{"b":1}', "{}"],
            ['{"a":1,"b":1}'],
        ),
        (
            {"type": "object", "not": {"properties": {"a": {"type": "string"}}}},
            ['{"a":1}'],
            ["{}", '{"a":"x"}'],
        ),
        ({"not": {"anyOf": [{"type": "string"}, {"maximum": 3}]}}, ["4"], ['"a"', "3", "null"]),
        ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
        ({"type": "string", "not": {"maxLength": 1}}, ['"ab"'], ['"a"', '""']),
    ],
)
def test_what_is_denied(schema: Any, good: list[str], bad: list[str]) -> None:
    check(schema, good, bad)


COUNTED = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in "abcd"},
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"minProperties": 2, "additionalProperties": False}, ['{"a":1,"b":1}'], ['{"b":1}']),
        (
            {"maxProperties": 2, "additionalProperties": False},
            ['{"b":1}', '{"b":1,"d":1}'],
            ['{"a":1,"b":1,"c":1}'],
        ),
        ({"maxProperties": 1}, ['{"b":1}'], ['{"b":1,"x":1}', "{}"]),
        (
            {"minProperties": 3},
            ['{"a":1,"b":1,"x":1}', '{"a":1,"b":1,"c":1}', '{"b":1,"c":1,"x":1,"x":2}'],
            ['{"b":1,"x":1}', '{"b":1,"x":1,"x":2}', '{"b":1,"x":1,"x":2,"x":3}'],
        ),
        (
            {"minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "null"}},
            ['{"b":1,"x":null}', '{"a":1,"b":1,"c":1}'],
            ['{"b":1}', '{"a":1,"b":1,"c":1,"x":null}', '{"b":1,"x":1}'],
        ),
    ],
)
def test_members_are_counted(bounds: Any, good: list[str], bad: list[str]) -> None:
    check({**COUNTED, **bounds}, good, bad)


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"enum": ["a", "b", "c"]}, ['{"a":1,"c":1}', '{"a":1,"b":1,"c":1}'], ['{"a":1,"a":2}']),
        ({"enum": ["a", "b", "c"]}, [], ['{"a":1}', '{"a":1,"d":1}', "{}"]),
    ],
)
def test_listed_names_are_different_members(names: Any, good: list[str], bad: list[str]) -> None:
    integers = {"additionalProperties": {"type": "integer"}}
    check({"type": "object", "propertyNames": names, "minProperties": 2, **integers}, good, bad)


@pytest.mark.parametrize(
    "rules",
    [
        {"minProperties": 3, "maxProperties": 3, "propertyNames": {"maxLength": 2}},
        {"minProperties": 2, "propertyNames": {"pattern": "^a"}},
        {"minProperties": 3, "patternProperties": {"^a$": {}}, "additionalProperties": False},
        {"minProperties": 2},
        {"minProperties": 3, "properties": {"a": {}}},
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_members_that_would_need_different_names_are_refused(rules: Any, is_strict: bool) -> None:
    refused = ("invalid_json_schema", f"{PARAM}.minProperties")
    assert refusal("json_schema", {"type": "object", **rules}, is_strict=is_strict) == refused
    nested = {"type": "object", "properties": {"m": {"type": "object", **rules}}}
    place = f"{PARAM}.properties.m.minProperties"
    assert refusal("json_schema", nested, is_strict=is_strict) == ("invalid_json_schema", place)


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("most", [3, 4, None])
def test_what_is_written_has_as_many_different_members(least: int, most: int | None) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": digit, "b": digit},
        "patternProperties": {"^c?$": digit},
        "additionalProperties": False,
        "minProperties": least,
        **({} if most is None else {"maxProperties": most}),
    }
    start, num_whole = schema_matcher(schema), 0
    for seed in range(30):
        answer = walk(start, random.Random(seed), patience=10, limit=60)
        if answer.is_whole:
            num_whole += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    assert num_whole > 5


def test_more_members_than_listed_names_are_no_value() -> None:
    schema = {"type": "object", "minProperties": 5, "propertyNames": {"enum": ["a", "b"]}}
    assert refusal("json_schema", schema) == ("invalid_json_schema", PARAM)


def test_the_order_of_members_is_that_of_the_schema_in_blocks_of_any_size() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(40)}
    required = ["p3", "p20", "z"]
    start = schema_matcher({"type": "object", "properties": properties, "required": required})
    for names in (required, ["p0", "p3", "p15", "p16", "p20", "p39", "z", "x"]):
        assert accepts(start, "{" + ",".join(f'"{name}":1' for name in names) + "}")
    for names in (["p3", "z"], ["p20", "p3", "z"], ["p3", "p20"], ["p3", "p20", "z", "p21"]):
        assert not accepts(start, "{" + ",".join(f'"{name}":1' for name in names) + "}")


@pytest.mark.parametrize("spelling", ["a", "\\u0061"])
def test_a_name_in_another_spelling_is_no_other_name(spelling: str) -> None:
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    start = schema_matcher({"type": "object", **schema})
    assert not accepts(start, f'{{"{spelling}":1}}')
    assert not accepts(start, f'{{"a":"x","{spelling}":1}}')
    assert accepts(start, '{"é\\n\\u0001":1}')


@pytest.mark.parametrize(
    ("parts", "good", "bad"),
    [
        (
            [
                {"properties": {"a": {"type": "integer"}}, "additionalProperties": False},
                {"properties": {"b": {"type": "integer"}}},
            ],
            ['{"a":1}', "{}"],
            ['{"b":1}', '{"c":1}'],
        ),
        (
            [{"patternProperties": {"^a": {"minimum": 3}}}, {"properties": {"ab": {"maximum": 5}}}],
            ['{"ab":4}', '{"ac":9}', '{"b":0}'],
            ['{"ab":2}', '{"ab":6}', '{"ac":1}'],
        ),
        (
            [{"type": "array", "items": {"type": "integer"}}, {"prefixItems": [{"minimum": 2}]}],
            ["[2,1]", "[]"],
            ["[1]", '["a"]'],
        ),
        ([{"multipleOf": 4, "type": "integer"}, {"multipleOf": 6}], ["12", "0"], ["4", "6"]),
        ([{"type": ["string", "integer"]}, {"enum": ["a", 1, None]}], ['"a"', "1"], ["null"]),
        ([{"enum": [{"a": 1}, {"a": 2}]}, {"properties": {"a": {"minimum": 2}}}],
         ['{"a":2}'], ['{"a":1}']),
    ],
)  # fmt: skip
def test_all_of_them_hold(parts: list[Any], good: list[str], bad: list[str]) -> None:
    check({"allOf": parts}, good, bad)


def test_schemas_that_contain_one_another_are_merged_where_they_meet() -> None:
    trees = {
        "one": {"type": "object", "properties": {"in": {"$ref": "#/$defs/one"}}},
        "two": {
            "type": "object",
            "properties": {"in": {"$ref": "#/$defs/two"}, "n": {"type": "null"}},
            "required": ["n"],
        },
    }
    both = {"allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}], "$defs": trees}
    check(both, ['{"in":{"n":null},"n":null}'], ['{"in":{},"n":null}', '{"in":{"n":null}}'])


def test_a_member_without_a_value_that_ends_is_left_out() -> None:
    endless = {"type": "object", "properties": {"in": {"$ref": "#/$defs/e"}}, "required": ["in"]}
    schema = {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "$defs": {"e": endless}}
    start = schema_matcher(schema)
    assert accepts(start, "{}")
    assert not accepts(start, '{"e":{}}')
    assert '"\\"e\\"" ":"' not in (json_lark(schema, schema) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "minProperties": 3, "maxProperties": 2},
        {"type": "object", "properties": {"a": {"enum": [1], "type": "string"}}, "required": ["a"]},
        {"$defs": {"n": {"type": "integer", "minimum": 2, "maximum": 1}}, "$ref": "#/$defs/n"},
        {"type": "object", "maxProperties": 0, "required": ["a"]},
    ],
)
def test_what_nothing_keeps_to_is_refused(schema: Any) -> None:
    assert refusal("json_schema", schema) == ("invalid_json_schema", PARAM)


def test_a_long_chain_of_references_is_followed() -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1500)}
    start = schema_matcher({"$defs": {**chain, "a1500": {"type": "null"}}, "$ref": "#/$defs/a0"})
    assert accepts(start, "null")
    assert not accepts(start, "1")


def _kinds(count: int, **fields: Any) -> list[Any]:
    return [
        {"type": "object", "properties": {"kind": {"const": f"k{i}"}, **fields}}
        for i in range(count)
    ]


def test_many_kinds_are_told_by_their_names_at_once() -> None:
    fields = {f"p{i}": {"type": "string", "pattern": "^a+$"} for i in range(10)}
    start = schema_matcher({"oneOf": _kinds(60, **fields)})
    assert accepts(start, '{"kind":"k59","p3":"aa"}')
    assert not accepts(start, '{"p3":"aa"}')


@pytest.mark.parametrize("base", [{}, {"type": "object"}])
@pytest.mark.parametrize("convert", [str, int])
def test_hundreds_of_kinds_with_or_without_types(base: Any, convert: Any) -> None:
    branches = [
        {
            **base,
            "properties": {"t": {"const": convert(index)}, "v": {"type": "boolean"}},
            "required": ["t", "v"],
            "additionalProperties": False,
        }
        for index in range(200)
    ]
    tag = json.dumps(convert(199))
    for outer in ({}, {"type": "object"}):
        check(
            {"oneOf": branches, **outer},
            [f'{{"t":{tag},"v":true}}'],
            [f'{{"t":{tag}}}', "5", '{"t":200,"v":true}'],
        )


def test_one_number_in_two_spellings_tells_nothing_apart() -> None:
    branches = [{"type": "object", "properties": {"t": {"const": tag}}} for tag in (1, 1.0)]
    assert refusal("json_schema", {"oneOf": branches}) == ("invalid_json_schema", f"{PARAM}.oneOf")
    truth = [{"type": "object", "properties": {"t": {"const": tag}}} for tag in (1, True)]
    check({"oneOf": truth}, ['{"t":1}', '{"t":true}'], ["{}"])


def test_too_many_that_are_not_are_refused_without_a_search() -> None:
    untold = [{"type": "object", "properties": {f"p{i}": {"pattern": "a"}}} for i in range(60)]
    with pytest.raises(RequestError, match="more than 20 schemas and no member") as caught:
        schema_matcher({"oneOf": untold})
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", f"{PARAM}.oneOf")


@pytest.mark.parametrize(("num_tools", "num_members"), [(24, 60), (160, 6)])
def test_tools_together_stay_within_what_the_library_holds(
    num_tools: int, num_members: int
) -> None:
    names = [f"p{index}" for index in range(num_members)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    tools = [ToolSpec(f"tool{index}", schema, is_strict=True) for index in range(num_tools)]
    start = matcher_of(CallGrammars(JsonCallFormat(), vocabulary()).calls(tools, "t", several=True))
    call = f'<tool_call>\n{{"name": "tool{num_tools - 1}", "arguments": {{"{names[-1]}":1}}}}'
    assert accepts(start, f"{call}\n</tool_call>")


def test_what_the_library_has_no_room_for_is_too_complex() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(300)}
    counted = {"type": "object", "properties": properties, "minProperties": 40, "maxProperties": 60}
    with pytest.raises(RequestError, match="too many rules") as caught:
        schema_matcher(counted)
    assert (caught.value.code, caught.value.param) == ("schema_too_complex", PARAM)
