"""The scanner against Python's own parser."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.frontend.tool_calls.json_scanner import (
    MAX_DEPTH,
    MAX_NUMBER_LENGTH,
    Expects,
    JsonScanner,
    Step,
    is_json,
    whole_characters_end,
    without_lone_surrogates,
)

ALPHABET = st.sampled_from(
    [*'{}[]",: \n-+.eE0129\\/bu', "true", "false", "null", '"a"', '":', "\\ud83d", "1.5"]
)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _parses(text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return "Infinity" not in json.dumps(value)


@given(st.lists(ALPHABET, max_size=12).map("".join))
@example('{"a":[1,-0,0.5e-3,"\\u00e9\\n",true,null,{}]}')
@example("01")
@example("-")
@example('"\t"')
@example("1e999")
@example("")
def test_passes_what_the_parser_of_python_passes(text: str) -> None:
    assert is_json(text) == _parses(text)


@given(st.lists(ALPHABET, max_size=12).map("".join))
def test_cuts_change_nothing(text: str) -> None:
    whole, cut = JsonScanner(0), JsonScanner(0)
    steps = []
    for scanner, stops in ((whole, [len(text)]), (cut, range(1, len(text) + 1))):
        step = Step.WAITS
        for stop in stops:
            while (step := scanner.step(text[:stop])) is Step.MOVED:
                pass
            if step is Step.WRONG:
                break
        steps.append(step)
    assert steps[0] is steps[1]
    assert (whole.place, whole.expects, whole.opened) == (cut.place, cut.expects, cut.opened)


def test_bounds() -> None:
    assert is_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not is_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert is_json("1" * 300)
    assert not is_json("1" * (MAX_NUMBER_LENGTH + 1))


def test_end_is_known_at_the_last_bracket() -> None:
    scanner = JsonScanner(0)
    while scanner.step('{"a": 1} rest') is Step.MOVED:
        pass
    assert (scanner.expects, scanner.place) == (Expects.END, 8)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),
        (r'"\ud83d"', r'"\ufffd"'),
        (r'"\ude00\ud83d"', r'"\ufffd\ufffd"'),
        (r'"\\ud83d"', r'"\\ud83d"'),
        (r'"\\\ud83d"', r'"\\\ufffd"'),
        (r'"é\u00e9"', r'"é\u00e9"'),
    ],
)
def test_lone_surrogates_are_replaced(text: str, clean: str) -> None:
    assert without_lone_surrogates(text) == clean


@pytest.mark.parametrize(
    ("text", "end"),
    [(r"a\ud83d", 1), (r"a\\ud83d", 8), (r"a\\\ud83d", 3), (r"a\ude00", 7), ("a", 1), ("", 0)],
)
def test_half_a_pair_waits(text: str, end: int) -> None:
    assert whole_characters_end(text, len(text)) == end
