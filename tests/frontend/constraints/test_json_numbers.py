"""Numbers: finite for every reader, within their bounds, and never longer than they need to be."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.frontend.constraints.json_numbers import (
    LARGEST_INTEGER,
    NUMBER,
    decimal_places,
    integer_bounds,
    integers,
    is_within,
    listed_multiples,
    numbers,
)
from tests.helpers.grammar_rig import PARAM, accepts, matcher, refusal, schema_matcher, walk

INTEGERS = st.integers(-(10**20), 10**20) | st.integers(-1200, 1200)
BOUNDS = st.integers(-300, 300) | st.floats(-50, 50).map(lambda value: round(value, 2))
TEXTS = st.from_regex(r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,4})?", fullmatch=True)


def every(expressions: list[str], text: str) -> bool:
    return all(re.fullmatch(part, text) for part in expressions)


@settings(max_examples=200)
@given(INTEGERS, INTEGERS, st.lists(INTEGERS, max_size=20), st.integers(-3, 3))
def test_integers_of_a_range(one: int, other: int, others: list[int], near: int) -> None:
    low, high = min(one, other), max(one, other)
    expression = re.compile(integers(low, high) or "")
    for value in (*others, 0, low + near, high + near, (low + high) // 2):
        assert bool(expression.fullmatch(str(value))) == (low <= value <= high)


def test_integers_without_leading_zeros_and_none_at_all() -> None:
    assert integers(3, 2) is None
    assert not re.fullmatch(integers(-100, 100) or "", "007")
    assert integer_bounds({}) == (-LARGEST_INTEGER, LARGEST_INTEGER)
    assert integer_bounds({"exclusiveMinimum": 1.5, "maximum": 7.5}) == (2, 7)
    assert integer_bounds({"exclusiveMaximum": 3, "maximum": 9}) == (-LARGEST_INTEGER, 2)


@settings(max_examples=300)
@given(
    st.sampled_from(["minimum", "exclusiveMinimum"]), BOUNDS,
    st.sampled_from(["maximum", "exclusiveMaximum"]), BOUNDS, TEXTS,
)  # fmt: skip
def test_numbers_of_a_range(
    low_key: str, low: float, high_key: str, high: float, text: str
) -> None:
    case: dict[str, Any] = {low_key: min(low, high), high_key: max(low, high)}
    is_minus_zero = text.startswith("-") and float(text) == 0
    if not is_minus_zero:
        assert every(numbers(case), text) == is_within(case, float(text))


@given(st.from_regex(NUMBER, fullmatch=True))
def test_every_number_is_finite_and_only_zero_is_read_as_zero(text: str) -> None:
    value = float(text)
    assert math.isfinite(value)
    mantissa = re.split("[eE]", text)[0]
    assert (value == 0) == (not mantissa.strip("-0."))


@pytest.mark.parametrize("bound", [3, 0.5, 1000, 12345678.25])
def test_what_is_less_is_less_as_a_float_too(bound: float) -> None:
    case = {"exclusiveMaximum": bound}
    below = math.ceil(bound) - 1
    for count in range(1, 40):
        text = f"{below}.{'9' * count}"
        if every(numbers(case), text):
            assert float(text) < bound


@pytest.mark.parametrize(
    ("step", "good", "bad"),
    [
        (0.01, ["1", "-0.25", "12.5"], ["0.001"]),
        (1, ["7"], ["7.5"]),
        (0.00000001, ["0.1"], ["1e3"]),
    ],
)
def test_decimal_places(step: float, good: list[str], bad: list[str]) -> None:
    start = schema_matcher({"type": "number", "multipleOf": step})
    assert decimal_places(step) is not None
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []


HUGE = ["1e400", "-1e999", "1E+100", "1e-400", "9" * 400, "0." + "1" * 400, "1" * 41, "1e0000001"]


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "number"},
        {"type": ["number", "string"]},
        {"minimum": 0},
        {"type": "number", "minimum": 2},
        {"type": "number", "exclusiveMaximum": -2.5},
        {"type": "number", "minimum": -1e300, "maximum": 1e300},
        {"type": "integer"},
        {"type": "integer", "minimum": 0},
        {"type": "integer", "multipleOf": 7},
        {"anyOf": [{"type": "number"}, {"type": "null"}]},
    ],
)
def test_no_number_is_beyond_what_readers_hold(schema: Any) -> None:
    start = schema_matcher(schema)
    for text in HUGE:
        if not (isinstance(schema, dict) and schema.get("maximum") == 1e300 and text == "9" * 400):
            assert not accepts(start, text)
    assert accepts(
        start, "-28" if isinstance(schema, dict) and "exclusiveMaximum" in schema else "28"
    )


@pytest.mark.parametrize("text", HUGE)
def test_nor_inside_of_lists_and_objects(text: str) -> None:
    anything = matcher("json_object")
    for shape in ('{"a":%s}', '{"a":[1,%s]}', '{"a":{"b":[[%s]]}}'):
        assert not accepts(anything, shape % text)
        assert accepts(anything, shape % "-6.02214076e23")


def test_bounds_that_are_no_floats_hold_exactly() -> None:
    start = schema_matcher({"type": "integer", "minimum": 2**53 + 1, "maximum": 10**18 + 3})
    assert accepts(start, str(2**53 + 1))
    assert not accepts(start, str(2**53))
    assert accepts(start, str(10**18 + 3))
    assert not accepts(start, str(10**18 + 4))


def test_a_bound_beyond_all_integers_is_kept_to() -> None:
    start = schema_matcher({"type": "integer", "minimum": 10**20})
    assert accepts(start, str(10**20))
    assert not accepts(start, str(10**18))


@given(st.integers(0, 0xFFFF), st.booleans())
def test_escaped_surrogates_come_in_pairs(code: int, is_upper: bool) -> None:
    start, escape = schema_matcher({"type": "string"}), f"\\u{code:04x}"
    text = f'"{escape.upper().replace("U", "u") if is_upper else escape}"'
    is_surrogate = 0xD800 <= code < 0xE000
    assert accepts(start, text) is not is_surrogate
    assert json.loads(text) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 2},
        {"type": "number", "multipleOf": 3},
        {"type": "integer", "multipleOf": 7},
        {"type": "integer", "multipleOf": 60, "minimum": 0, "maximum": 100_000},
        {"type": "number", "multipleOf": 0.5},
        {"type": "number", "multipleOf": 0.25, "minimum": 1, "maximum": 9},
        {"type": "integer", "multipleOf": 4999},
        {"type": "integer", "multipleOf": 100_000, "minimum": -5},
    ],
)
def test_multiples_are_found_from_every_beginning(schema: Any) -> None:
    start = schema_matcher({**schema, "type": schema.get("type", "number")})
    for seed in range(40):
        answer = walk(start, random.Random(seed), limit=60)
        assert answer.is_whole
        assert float(answer.text) % schema["multipleOf"] == 0


@pytest.mark.parametrize("step", [99_991, 999.9, 250_000])
def test_multiples_with_too_many_remainders_are_refused(step: float) -> None:
    schema = {"properties": {"n": {"multipleOf": step}}}
    place = f"{PARAM}.properties.n.multipleOf"
    assert refusal("json_schema", schema) == ("invalid_json_schema", place)


def test_few_multiples_are_listed() -> None:
    assert listed_multiples(5, -7, 11) == [-5, 0, 5, 10]
    assert listed_multiples(5, 1, 4) == []
    assert listed_multiples(5, 0, 10**6) is None
