"""Patterns that are searched for, as expressions of the whole text."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ninfer.frontend.constraints.text_patterns import slashed, string_patterns
from ninfer.frontend.constraints.unenforceable import Unenforceable


def matches(text: str, **case: object) -> bool:
    return all(re.fullmatch(pattern, text) for pattern in string_patterns(case))


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of sets within sets
@given(st.text("ab|^$()[]\\/", max_size=9), st.text("ab^$|/", max_size=6))
def test_a_whole_text_matches_where_the_pattern_is_found(pattern: str, text: str) -> None:
    try:
        expected = re.search(pattern, text) is not None
    except re.error:
        assume(False)
        return
    try:
        found = matches(text, pattern=[pattern])
    except Unenforceable:
        assert re.search(r"[\^$]", pattern)
        return
    assert found == expected


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]),
        ("ipv4", ["0.0.0.0", "192.168.10.255"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
        ("ipv6", ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2", ":1", "1::2::3"]),
        ("hostname", ["a", "a-b.example.org"], ["-a", "a..b", "a_b"]),
        ("email", ["a.b@example.org"], ["a@", "@b", "a b@c"]),
        ("duration", ["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P2W"], ["P", "PT", "1D", "P1H"]),
        ("uri", ["https://a.b/c?d=%20", "urn:x:y"], ["a b", "//a", "x:%2"]),
    ],
)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not matches(text, format=name)] == []
    assert [text for text in bad if matches(text, format=name)] == []


def test_slashes_and_line_breaks_are_written_as_lark_has_them() -> None:
    assert slashed("a/b\\/c\n\\\\/") == "/a\\/b\\/c\\n\\\\\\//"
