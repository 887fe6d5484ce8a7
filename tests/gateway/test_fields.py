"""Typed reads: what is a number, what is absent, and that errors name the path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import INT64_MAX, INT64_MIN, Fields


def test_null_is_absent_for_every_reader() -> None:
    fields = Fields({"x": None})
    assert not fields.has("x")
    assert fields.boolean("x") is None
    assert fields.integer("x") is None
    assert fields.number("x", 0, 1) is None
    assert fields.string("x") is None
    assert fields.choice("x", ("a",)) is None
    assert fields.sequence("x") is None
    assert fields.child("x") is None
    assert list(fields.children("x")) == []
    assert fields.first_of(("x", "y")) is None


@pytest.mark.parametrize("value", [0, 5, 5.0, -3.0, INT64_MAX, INT64_MIN])
def test_integers(value: float) -> None:
    result = Fields({"x": value}).integer("x")
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (True, "invalid_type"),
        ("5", "invalid_type"),
        (5.5, "invalid_type"),
        ([5], "invalid_type"),
        (INT64_MAX + 1, "invalid_value"),
        (INT64_MIN - 1, "invalid_value"),
        (1e20, "invalid_value"),
    ],
)
def test_what_is_no_integer(value: object, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        Fields({"x": value}, "a[1]").integer("x")
    assert caught.value.code == code
    assert caught.value.param == "a[1].x"


@pytest.mark.parametrize(
    ("value", "rule"),
    [(-2, "at least -1"), (2**63, "a 64-bit integer"), (1e30, "a 64-bit integer")],
)
def test_a_refused_integer_does_not_break_the_rule_that_it_is_told(value: float, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        Fields({"x": value}).integer("x", -1)
    assert caught.value.message == f"'x' must be {rule}."


@pytest.mark.parametrize("value", [False, "0.5", {}, []])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        Fields({"x": value}).number("x", 0, 1)
    assert caught.value.code == "invalid_type"


@pytest.mark.parametrize(
    ("value", "above", "is_good"),
    [
        (0, False, True),
        (0, True, False),
        (1, False, True),
        (1.01, False, False),
        (-1, False, False),
    ],
)
def test_number_ranges(value: float, above: bool, is_good: bool) -> None:
    fields = Fields({"x": value})
    if is_good:
        assert fields.number("x", 0, 1, above=above) == value
        return
    with pytest.raises(RequestError) as caught:
        fields.number("x", 0, 1, above=above)
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize(
    "read",
    [
        lambda fields: fields.boolean("x"),
        lambda fields: fields.string("x"),
        lambda fields: fields.sequence("x"),
        lambda fields: fields.child("x"),
    ],
)
def test_wrong_types_name_the_types_and_not_the_value(read: Callable[[Fields], Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read(Fields({"x": 42.25}))
    assert caught.value.code == "invalid_type"
    assert "a number" in caught.value.message
    assert "42" not in caught.value.message


def test_paths_go_through_objects_and_lists() -> None:
    root = Fields({"messages": [{}, {"content": {"parts": "no list"}}]})
    content = list(root.children("messages"))[1].child("content")
    assert content is not None
    with pytest.raises(RequestError) as caught:
        content.sequence("parts")
    assert caught.value.param == "messages[1].content.parts"
