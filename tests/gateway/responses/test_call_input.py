"""The text of a custom call is the same however its arguments are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.gateway.responses.call_input import CallInput, input_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def read(arguments: str, cuts: list[int]) -> tuple[str, str]:
    """(what came before the end, what came at it)."""
    reader = CallInput()
    borders = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    early = "".join(reader.feed(arguments[start:stop]) for start, stop in pairwise(borders))
    return early, reader.end()


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_gives_the_text_before_the_end(text: str, ascii_: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_)
    assert read(arguments, cuts) == (text, "")
    assert read(arguments, list(range(len(arguments)))) == (text, "")
    assert input_of(arguments) == text


def test_text_comes_as_soon_as_it_is_final() -> None:
    reader = CallInput()
    assert [reader.feed(piece) for piece in ('{ "in', 'put" : "a', "b\\", 'n"', "}")] == [
        "",
        "a",
        "b",
        "\n",
        "",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": 1, "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("{}", "{}"),
        ("not json", "not json"),
        ("", ""),
    ],
)
def test_other_layouts_are_settled_at_the_end(arguments: str, text: str) -> None:
    assert read(arguments, list(range(len(arguments)))) == ("", text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d", "\ufffd"),
        (r"\ud83dx", "\ufffdx"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ude00", "\ufffd"),
        (r"\ud83d\u0041", "\ufffdA"),
        (r"\uzzzz", "\ufffd"),
        (r"\q", "\ufffd"),
    ],
)
def test_escapes(body: str, text: str) -> None:
    arguments = '{"input": "' + body + '"}'
    assert read(arguments, list(range(len(arguments)))) == (text, "")
    assert read(arguments, []) == (text, "")


def test_a_cut_call_gives_what_was_final() -> None:
    reader = CallInput()
    assert reader.feed('{"input": "ab\\u00') == "ab"
