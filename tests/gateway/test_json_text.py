"""Strict JSON with one mercy: lone surrogates."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.contract.errors import RequestError
from ninfer.gateway.json_text import MAX_DEPTH, parse_json


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xef\xbb\xbf{}", {}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"a":"\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a":"x\\u0000y"}', {"a": "x\0y"}),
    ],
)
def test_accepted(data: bytes, expected: object) -> None:
    assert parse_json(data).value == expected
    assert parse_json(data).surrogates_replaced == 0


@pytest.mark.parametrize(
    ("data", "expected", "count"),
    [
        (b'"cut \\ud83d"', "cut \ufffd", 1),
        (b'"\\udc00\\ud83dx"', "\ufffd\ufffdx", 2),
        (b'{"k\\ud800":["\\udfff",{"a":1}]}', {"k\ufffd": ["\ufffd", {"a": 1}]}, 2),
        (b'"\\ud83d\\ud83d\\ude00"', "\ufffd\U0001f600", 1),
    ],
)
def test_lone_surrogates_are_replaced(data: bytes, expected: object, count: int) -> None:
    parsed = parse_json(data)
    assert parsed.value == expected
    assert parsed.surrogates_replaced == count


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  \n",
        b"{",
        b"nope",
        b'{"a":1}x',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'["\\ud83d",1e999]',
        b'["\\ud83d",NaN]',
        b'{"a":' + b"9" * 5000 + b"}",
        b'["\\ud83d",' + b"9" * 5000 + b"]",
        b'"\xff\xfe"',
        b'"\xed\xa0\xbd"',
        b'"a\nb"',
        b"[" * 129 + b"]" * 129,
        b"[" * 2000 + b"]" * 2000,
        b'["\\ud83d",' + b"[" * 2000 + b"]" * 2001,
        b'{"a":' * 100_000,
    ],
)
def test_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(data)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 120
    assert "at at" not in caught.value.message


def test_depth_limit_is_exact() -> None:
    parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    parse_json(b'["\\ud83d",' + b"[" * (MAX_DEPTH - 1) + b"]" * MAX_DEPTH)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda children: st.lists(children) | st.dictionaries(st.text(st.characters()), children),
    max_leaves=20,
)


def replaced(value: Any) -> Any:
    if isinstance(value, str):
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
    if isinstance(value, list):
        return [replaced(item) for item in value]
    if isinstance(value, dict):
        return {replaced(key): replaced(item) for key, item in value.items()}
    return value


@given(JSON_VALUES)
@example("\ud83d\ude00")
def test_what_the_standard_library_writes_is_read_back(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text.encode()).value == replaced(json.loads(text))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with suppress(RequestError):
        parse_json(data)


@given(st.integers(-(2**70), 2**70))
def test_both_parsers_read_integers_alike(number: int) -> None:
    plain = parse_json(b"[%d]" % number).value
    mended = parse_json(b'[%d,"\\ud83d"]' % number).value
    assert mended == [*plain, "\ufffd"]
    assert type(mended[0]) is type(plain[0])
