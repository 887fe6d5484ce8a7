"""How lines are laid out: two-column tables, words kept whole, counted nouns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

_NARROWEST: Final = 8
"""Columns; on anything narrower the terminal may break what it likes."""


def table(rows: Sequence[tuple[str, str]]) -> str:
    """One line a row, the right column aligned."""
    width = max(len(left) for left, _ in rows)
    return "".join(f"{left:<{width}}  {right}\n" for left, right in rows)


def wrapped(text: str, columns: int | None) -> str:
    """Every line broken between words to fit in `columns`; None breaks nothing.

    What is broken goes on under the line's right column, or else under its first word. A word that
    is longer than a line stays whole.
    """
    if columns is None or columns < _NARROWEST:
        return text
    return "\n".join(_wrapped_line(line, columns) for line in text.split("\n"))


def _wrapped_line(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    indent = _indent_of(line, columns)
    # The leading part is kept as it is: its blanks align it with its neighbours.
    parts = textwrap.wrap(
        line[indent:],
        width=columns - indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return line[:indent] + ("\n" + " " * indent).join(parts)


def _indent_of(line: str, columns: int) -> int:
    """Where the right column begins, if at least half of the line is left for it."""
    margin = len(line) - len(line.lstrip())
    gap = line.find("  ", margin)
    start = margin if gap < 0 else gap + len(line[gap:]) - len(line[gap:].lstrip())
    return start if 2 * start <= columns else min(margin, columns // 2)


def count(number: int, noun: str) -> str:
    """`1 layer`, `3 layers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
