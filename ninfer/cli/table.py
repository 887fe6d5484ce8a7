"""Two-column tables of the command line."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, str]]) -> str:
    """One line a row, the right column aligned."""
    width = max(len(left) for left, _ in rows)
    return "".join(f"{left:<{width}}  {right}\n" for left, right in rows)
