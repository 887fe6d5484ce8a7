"""JSON Schema keyword by keyword: what an answer may be, and what is refused with which place."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.chat import Constraint
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.grammar import build_grammar
from ninfer.frontend.constraints.json_schema import MAX_CHARACTERS
from tests.helpers.grammar_rig import PARAM, accepts, refusal, schema_matcher

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/node"}},
    "required": ["v"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ['{"a":[1,null]}', "1", '"x"'], ["", "nul"]),
        ({"type": "null"}, ["null"], ["1"]),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
        ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
        ({"type": "boolean"}, ["true", "false"], ["True"]),
        ({"type": "integer"}, ["0", "-0", "12", "-7"], ["01", "-01", "1.5", "+1", "1" * 25]),
        ({"type": "number"}, ["0", "-0.5", "1e5", "2.50"], ["01", ".5", "1.", "NaN"]),
        ({"type": "integer", "multipleOf": 3}, ["0", "9", "12"], ["4"]),
        (
            {"type": "string"},
            ['""', '"é😀"', '"\\n\\"\\\\"', '"\\u00e9"', '"\\ud83d\\ude00"'],
            ['"\n"', '"\t"', '"\\ud83d"', '"\\x"', "'a'"],
        ),
        (
            {"type": "string", "minLength": 2, "maxLength": 3},
            ['"ab"', '"éé"', '"😀😀😀"'],
            ['"a"', '"abcd"'],
        ),
        ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
        ({"type": "string", "pattern": "^[a-c]{2}$"}, ['"ab"'], ['"abc"', '"ad"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"enum": [1, "a", None, {"x": [1]}]}, ["1", '"a"', "null", '{"x":[1]}'], ["2", '"b"']),
        ({"const": {"a": 'é"'}}, ['{"a":"é\\""}'], ["{}"]),
        ({"type": "object"}, ["{}", '{"a":1}', '{"a": {"b": []}}'], ["[]", '{"a"}']),
        (
            {
                "type": "object",
                "properties": {"ключ": {"type": "integer"}, "b": {"type": "null"}},
                "required": ["ключ"],
                "additionalProperties": False,
            },
            ['{"ключ":1}', '{"ключ":1,"b":null}'],
            ["{}", '{"b":null,"ключ":1}', '{"ключ":1,"c":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "additionalProperties": {"type": "string"},
            },
            ["{}", '{"a":1,"z":"x"}', '{"z":"x"}'],
            ['{"z":1}', '{"a":"x"}'],
        ),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
            ['{"a1":1}', '{"b":"x"}'],
            ['{"a1":"x"}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^a"}},
            ["{}", '{"ab":1}'],
            ['{"b":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a.b", "c"]}},
            ['{"a.b":1}'],
            ['{"aXb":1}', '{"d":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"const": "k"}},
            ['{"k":1}'],
            ['{"d":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
            ['{"ab":1}', '{"éé\\n":1}'],
            ['{"a":1}', '{"abcd":1}'],
        ),
        (
            {"type": "object", "minProperties": 1, "maxProperties": 2},
            ['{"a":1}'],
            ["{}", '{"a":1,"b":1,"c":1}'],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            ["[1]", "[1, 2]"],
            ["[]", "[1,2,3]", '["a"]'],
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": False,
                "minItems": 2,
            },
            ['[1,"a"]'],
            ["[1]", '[1,"a",2]'],
        ),
        (
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
            ["[]", "[1]"],
            ["[1,2]", '["a"]'],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"a"']),
        ({"oneOf": [{"const": "a"}, {"type": "integer"}]}, ['"a"', "1"], ['"b"']),
        (
            {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
            ["2", "4"],
            ["1", "5"],
        ),
        (
            {"$defs": {"a~b/c%": {"type": "null"}}, "$ref": "#/$defs/a~0b~1c%25"},
            ["null"],
            ["1"],
        ),
        ({"definitions": {"x": {"type": "null"}}, "$ref": "#/definitions/x"}, ["null"], ["1"]),
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, ['{"v":1,"n":{"v":2}}'], ['{"n":{}}']),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, ['{"a":{"a":{}}}'], ['{"a":1}']),
        ({"minimum": 2, "exclusiveMinimum": True, "type": "integer"}, ["3"], ["2"]),
        ({"title": "x", "default": 3, "x-own": {}, "type": "null"}, ["null"], ["3"]),
        ({"uniqueItems": False, "type": "array"}, ["[1,1]"], ["1"]),
    ],
)
def test_keywords(schema: Any, good: list[str], bad: list[str]) -> None:
    start = schema_matcher(schema)
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "0001-01-01", "2000-02-29"],
            ["2023-02-29", "1900-02-29", "0000-01-01", "2024-13-01", "2024-04-31"],
        ),
        (
            "time",
            ["23:59:59Z", "00:00:00.123+01:30"],
            ["24:00:00Z", "10:60:00Z", "10:00:60Z", "10:00:00"],
        ),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-01-01 10:00:00Z"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "x" * 36]),
        ("email", ["a.b@example.org"], ["a b@c", "@x"]),
        ("ipv4", ["255.0.10.1"], ["256.0.0.1", "1.2.3"]),
        ("ipv6", ["::1", "2001:db8::8a2e:370:7334"], ["12345::", "1:2:3", "::g"]),
    ],
)  # fmt: skip
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    start = schema_matcher({"type": "string", "format": name})
    assert [text for text in good if not accepts(start, f'"{text}"')] == []
    assert [text for text in bad if accepts(start, f'"{text}"')] == []


def test_a_format_and_a_pattern_hold_together() -> None:
    start = schema_matcher({"type": "string", "format": "date", "pattern": "^2024"})
    assert accepts(start, '"2024-05-06"')
    assert not accepts(start, '"2023-05-06"')
    assert not accepts(start, '"2024-05-99"')


def _integers(longest: int) -> list[str]:
    alphabet = "-0123456789.e"
    return [
        "".join(parts)
        for length in range(1, longest + 1)
        for parts in itertools.product(alphabet, repeat=length)
    ]


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 3},
        {"minimum": -123, "maximum": 42},
        {"exclusiveMinimum": -3, "exclusiveMaximum": 5},
        {"exclusiveMinimum": 9, "maximum": 100},
        {"maximum": -7},
    ],
)
def test_integer_bounds_hold_for_every_short_text(bounds: dict[str, int]) -> None:
    start = schema_matcher({"type": "integer", **bounds})
    wrong = []
    for text in _integers(3):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        is_integer = isinstance(value, int) and not (text.startswith("-0") and value == 0)
        is_inside = is_integer and (
            value >= bounds.get("minimum", value)
            and value <= bounds.get("maximum", value)
            and value > bounds.get("exclusiveMinimum", value - 1)
            and value < bounds.get("exclusiveMaximum", value + 1)
        )
        if text not in ("-0",) and accepts(start, text) != is_inside:
            wrong.append(text)
    assert wrong == []


def test_a_large_bound_holds() -> None:
    start = schema_matcher({"type": "integer", "minimum": 0, "maximum": 20_000_000_000})
    for value in (0, 2**31, 2**32 + 5, 19_999_999_999, 20_000_000_000):
        assert accepts(start, str(value))
    for value in (-1, 20_000_000_001, 100_000_000_000):
        assert not accepts(start, str(value))


VALUES = (None, -10.25, -3, -0.5, 0, 0.25, 1, 3, 3.25, 10)
TEXTS = [
    f"{sign}{whole}{part}"
    for sign in ("", "-")
    for whole in ("0", "1", "2", "3", "9", "10")
    for part in ("", ".0", ".2", ".25", ".5", ".251", ".999")
]


@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
def test_number_bounds_are_never_exceeded(lower: str, upper: str) -> None:
    outside = []
    for low, high in itertools.product(VALUES, VALUES):
        bounds = {key: value for key, value in ((lower, low), (upper, high)) if value is not None}
        if low is not None and high is not None and low >= high:
            continue
        start = schema_matcher({"type": "number", **bounds})
        for text in TEXTS:
            value = float(text)
            is_low = low is not None and (value < low or (value == low and "ex" in lower))
            is_high = high is not None and (value > high or (value == high and "ex" in upper))
            if (is_low or is_high) and accepts(start, text):
                outside.append((bounds, text))
    assert outside == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, ".properties.a.not"),
        ({"items": {"if": {}}}, ".items.if"),
        ({"anyOf": [True, {"contains": {}}]}, ".anyOf[1].contains"),
        ({"$defs": {"x": {"uniqueItems": True}}}, ".$defs.x.uniqueItems"),
        ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
        ({"unevaluatedProperties": False}, ".unevaluatedProperties"),
        ({"propertyNames": {"format": "date"}}, ".propertyNames"),
        ({"type": "string", "format": "regex"}, ".format"),
        ({"properties": {"a": {"$id": "x"}}}, ".properties.a.$id"),
    ],
)
def test_what_cannot_be_enforced_is_refused_when_strict(schema: Any, place: str) -> None:
    assert refusal("json_schema", schema) == ("invalid_json_schema", PARAM + place)
    schema_matcher(schema, is_strict=False)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ("{", ""),
        ("[]", ""),
        ('{"minimum": 1e999}', ""),
        (False, ""),
        ({"$ref": "https://example.org/x"}, ".$ref"),
        ({"items": {"$ref": "other.json"}}, ".items.$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ".properties.a.$ref"),
        ({"$ref": 5}, ".$ref"),
        ({"$ref": "#/required", "required": []}, ".$ref"),
        ({"enum": []}, ".enum"),
        ({"anyOf": []}, ".anyOf"),
        ({"properties": {"a": 5}}, ".properties.a"),
        ({"properties": []}, ".properties"),
        ({"required": "a"}, ".required"),
        ({"items": {"minLength": -1}}, ".items.minLength"),
        ({"maxItems": "2"}, ".maxItems"),
        ({"pattern": 5}, ".pattern"),
        ({"type": 5}, ".type"),
        ({"minimum": "x"}, ".minimum"),
        ({"maximum": True}, ".maximum"),
        ({"multipleOf": 0}, ".multipleOf"),
        ({"not": {"multipleOf": "a"}}, ".not.multipleOf"),
        ({"not": {"required": 5}}, ".not.required"),
        ({"type": "strin"}, ".type"),
        ({"items": {"pattern": "^a*$", "minLength": 100_000}}, ".items.minLength"),
        ({"additionalProperties": []}, ".additionalProperties"),
        ({"additionalProperties": ["x", 5]}, ".additionalProperties"),
        ({"properties": {"a": {"not": 5}}}, ".properties.a.not"),
        ({"propertyNames": "a"}, ".propertyNames"),
        ({"type": "string", "nullable": "yes"}, ".nullable"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, ""),
        ({"$ref": "#"}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
        ({"items": [{"type": "null"}], "properties": {"a": {"$ref": "#/items/0"}}}, ""),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_bad_schemas(schema: Any, place: str, is_strict: bool) -> None:
    expected = ("invalid_json_schema", PARAM + place)
    assert refusal("json_schema", schema, is_strict=is_strict) == expected


def test_what_contains_itself_is_not_denied_for_ever() -> None:
    tree = {"type": "object", "properties": {"in": {"$ref": "#/$defs/tree"}}}
    schema = {"not": {"properties": {"d": {"$ref": "#/$defs/tree"}}}, "$defs": {"tree": tree}}
    assert refusal("json_schema", schema) == ("invalid_json_schema", f"{PARAM}.not")
    broken = {"anyOf": [schema, {"$ref": "#/x"}], "$defs": {"tree": tree}}
    expected = ("invalid_json_schema", f"{PARAM}.anyOf[1].$ref")
    assert refusal("json_schema", broken, is_strict=False) == expected


def test_size_and_depth_are_bounded() -> None:
    large = {"enum": ["x" * MAX_CHARACTERS]}
    assert refusal("json_schema", large) == ("schema_too_complex", PARAM)
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    assert refusal("json_schema", deep) == ("schema_too_complex", PARAM)
    assert refusal("json_schema", "[" * 100_000) == ("schema_too_complex", PARAM)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{i}": {} for i in range(4000)}},
        {"type": "string", "pattern": "(a|b?)" * 6000},
        {"const": ["a" * 9000]},
        {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4100)} | {"a4100": {}},
         "$ref": "#/$defs/a0"},
    ],
    ids=["properties", "patterns", "values", "references"],
)  # fmt: skip
def test_amounts_are_bounded(schema: Any) -> None:
    assert refusal("json_schema", schema) == ("schema_too_complex", PARAM)


def test_ten_thousand_values() -> None:
    start = schema_matcher({"enum": [f"value {i}" for i in range(10_000)]})
    assert accepts(start, '"value 9999"')
    assert not accepts(start, '"value 10000"')


@pytest.mark.parametrize("start", ["{", "[1,", '{"a":'])
def test_white_space_is_bounded(start: str) -> None:
    place = schema_matcher(True)
    end = {"{": "}", "[1,": "2]", '{"a":': "1}"}[start]
    for good in ("", " ", "\n", "\n\n", "\n\n    "):
        assert accepts(place, start + good + end)
    for bad in ("  ", "\n\n\n", " \n", "\t", "\n" + " " * 40):
        assert not accepts(place, start + bad + end)
    assert not accepts(place, start + end + "\n")


_KEYS = st.sampled_from(
    ["type", "properties", "items", "anyOf", "$ref", "enum", "minimum", "maxLength", "format",
     "required", "propertyNames", "exclusiveMinimum", "nullable", "pattern", "$defs", "const",
     "oneOf", "allOf", "not", "multipleOf", "maximum", "patternProperties", "prefixItems", "title",
     "minProperties", "additionalProperties"]
)  # fmt: skip
_LEAVES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        2.5,
        "integer",
        "object",
        "#",
        "#/$defs/a",
        "#/items/0",
        "date",
        "a(",
    ]
)
_JSON = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4)
)


@settings(max_examples=300)
@given(_JSON, st.booleans())
def test_any_json_is_a_schema_or_a_request_error(value: Any, is_strict: bool) -> None:
    param: str | None = PARAM
    try:
        build_grammar(Constraint("json_schema", json.dumps(value), PARAM, is_strict))
    except RequestError as error:
        param = error.param
    assert str(param).startswith(PARAM)
