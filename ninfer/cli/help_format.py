"""HelpFormatter: argparse's help as wide as the terminal, with words and names kept whole."""

from __future__ import annotations

import argparse
import shutil
from typing import Any, Final

from ninfer.cli.layout import wrapped

_WIDEST: Final = 100
"""Columns; longer lines are hard to read."""
_NARROWEST: Final = 40
"""Columns; below, the names of options and variables leave no room for what they mean."""


class HelpFormatter(argparse.HelpFormatter):
    """Lines of a description stay lines. `COLUMNS` overrides the terminal's width."""

    def __init__(self, prog: str, **settings: Any) -> None:
        columns = shutil.get_terminal_size().columns
        settings.setdefault("width", max(_NARROWEST, min(columns, _WIDEST) - 1))
        super().__init__(prog, **settings)

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else wrapped(heading, self._width))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = wrapped(text, width - len(indent))
        return "\n".join(indent + line for line in filled.split("\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), width).split("\n")
