from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.cli.layout import count, table, wrapped

WORDS = st.text(alphabet="ab-/", min_size=1, max_size=30)
LINES = st.lists(st.lists(WORDS, max_size=12).map(" ".join), max_size=4)


@given(LINES, st.integers(8, 60))
def test_words_stay_whole_and_lines_fit(lines: list[str], columns: int) -> None:
    text = "\n".join(lines)
    result = wrapped(text, columns)
    assert result.split() == text.split()
    for line in result.split("\n"):
        assert len(line) <= columns or len(line.split()) == 1


def test_a_long_row_goes_on_in_its_right_column() -> None:
    text = table([("a name", "some words of a meaning"), ("b", "short")])
    assert wrapped(text, 24) == ("a name  some words of a\n        meaning\nb       short\n")
    assert wrapped(text, None) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 messages"), (1, "1 message"), (2, "2 messages")]
)
def test_one_is_singular(number: int, text: str) -> None:
    assert count(number, "message") == text
