from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ninfer.artifact.json_document import Fields, parse_object
from ninfer.contract.errors import ModelFileError

PATH = Path("config.json")


def fields(**values: Any) -> Fields:
    return Fields(PATH, values, "text_config.")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}{}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a":' * 5000,
        b'{"a": 1,}',
    ],
)
def test_text_that_is_no_json_is_refused_with_the_path(text: bytes) -> None:
    with pytest.raises(ModelFileError, match="not valid JSON") as caught:
        parse_object(text, PATH)
    assert caught.value.path == PATH


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[]", "an array"),
        (b"null", "null"),
        (b"true", "a boolean"),
        (b"1", "an integer"),
        (b"1.5", "a number"),
        (b'"x"', "a string"),
    ],
)
def test_a_document_that_is_no_object_is_refused(text: bytes, found: str) -> None:
    with pytest.raises(ModelFileError, match=f"found {found}$"):
        parse_object(text, PATH)


def test_values_of_the_right_type_are_read() -> None:
    given = fields(a=3, b=2, c=1.5, d=True, e="x", f=[1, 2], g=["x"], h={"a": 1})
    assert given.integer("a", 0, 3) == 3
    assert given.number("b", 0.0) == 2.0
    assert given.number("c", 0.0) == 1.5
    assert given.flag("d", False) is True
    assert given.text("e") == "x"
    assert given.integers("f", 0, 2) == (1, 2)
    assert given.texts("g") == ("x",)
    assert given.child("h").integer("a", 0) == 1
    assert given.child("h").prefix == "text_config.h."


def test_missing_and_null_keys_take_the_default() -> None:
    given = fields(a=None)
    for key in ("a", "b"):
        assert not given.has(key)
        assert given.integer(key, 1, default=5) == 5
        assert given.number(key, 1.0, default=0.5 + 1) == 1.5
        assert given.flag(key, True) is True
        assert given.text(key, default="x") == "x"
        assert given.integers(key, 0, 1, default=(7,)) == (7,)


@pytest.mark.parametrize(("key", "message"), [("a", "must not be null"), ("b", "missing")])
def test_required_keys_are_named_when_they_are_absent(key: str, message: str) -> None:
    given = fields(a=None)
    for read in (given.text, given.texts, given.child, lambda key: given.integer(key, 0)):
        with pytest.raises(ModelFileError, match=message) as caught:
            read(key)
        assert caught.value.field == f"text_config.{key}"


@pytest.mark.parametrize("value", [True, 1.0, "1", [], {}])
def test_only_integers_are_integers(value: Any) -> None:
    with pytest.raises(ModelFileError, match="expected an integer"):
        fields(a=value).integer("a", 0)
    with pytest.raises(ModelFileError, match="expected an array of integers"):
        fields(a=[0, value]).integers("a", 0, 1)


@pytest.mark.parametrize("value", [0, "ab", {}])
def test_only_arrays_are_arrays(value: Any) -> None:
    with pytest.raises(ModelFileError, match="expected an array, found"):
        fields(a=value).integers("a", 0, 1)
    with pytest.raises(ModelFileError, match="expected an array, found"):
        fields(a=value).texts("a")


@pytest.mark.parametrize("value", [True, "1", [], {}])
def test_other_types_are_refused_where_a_number_is_expected(value: Any) -> None:
    with pytest.raises(ModelFileError, match="expected a number"):
        fields(a=value).number("a", 0.0)


@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_only_booleans_are_booleans(value: Any) -> None:
    with pytest.raises(ModelFileError, match="expected a boolean"):
        fields(a=value).flag("a", False)


@pytest.mark.parametrize("value", [0, True, [], {}])
def test_only_strings_are_strings(value: Any) -> None:
    with pytest.raises(ModelFileError, match="expected a string"):
        fields(a=value).text("a")
    with pytest.raises(ModelFileError, match="expected an array of strings"):
        fields(a=["x", value]).texts("a")


@pytest.mark.parametrize("value", [0, 5, -1, 2**40])
def test_integers_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(ModelFileError, match=r"is not in \[1, 4\]"):
        fields(a=value).integer("a", 1, 4)
    with pytest.raises(ModelFileError, match=r"is not in \[1, 4\]"):
        fields(a=[1, value]).integers("a", 1, 4)


@pytest.mark.parametrize("value", [0.0, -1, 2.5, math.nan, math.inf])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ModelFileError, match=r"is not in \(0, 2\]"):
        fields(a=value).number("a", 0.0, 2.0, above=True)


def test_the_bound_itself_is_legal_unless_excluded() -> None:
    assert fields(a=0).number("a", 0.0, 2.0) == 0.0
