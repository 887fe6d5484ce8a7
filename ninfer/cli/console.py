"""Console: where the command line writes, and how much a reader of it can take.

stdout carries answers and what was asked for. Secondary text (thoughts, reports, notices) stands
between them in an interactive chat and goes to stderr everywhere else; progress is for terminals.
Escape codes are written to terminals only, and colours not under NO_COLOR.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"
_CLEAR_LINE: Final = "\r\x1b[K"
_UNSAFE: Final = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}
"""Control characters in a model's text could move the cursor or retitle the terminal."""


@dataclass(frozen=True, slots=True)
class Console:
    """Two text streams. `is_interactive`: a person at a terminal on both stdin and stdout."""

    out: TextIO
    err: TextIO
    is_interactive: bool
    has_colour: bool

    @classmethod
    def of_process(
        cls, stdin: TextIO, out: TextIO, err: TextIO, environ: Mapping[str, str]
    ) -> Console:
        is_interactive = stdin.isatty() and out.isatty()
        has_colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        return cls(out, err, is_interactive, has_colour)

    def write(self, text: str) -> None:
        """Text to stdout at once; made harmless for a terminal."""
        self.out.write(text.translate(_UNSAFE) if self.out.isatty() else text)
        self.out.flush()

    @property
    def _secondary(self) -> TextIO:
        return self.out if self.is_interactive else self.err

    @property
    def dims_secondary(self) -> bool:
        """Whether secondary text can be told apart by its look."""
        return self.has_colour and self._secondary.isatty()

    def write_secondary(self, text: str) -> None:
        """Thoughts and reports: dimmed between the answers on a terminal, else on stderr."""
        stream = self._secondary
        if stream.isatty():
            text = text.translate(_UNSAFE)
        stream.write(f"{_DIM}{text}{_RESET}" if self.dims_secondary and text else text)
        stream.flush()

    def notice(self, text: str) -> None:
        """A secondary line."""
        self.write_secondary(text)
        self._secondary.write("\n")
        self._secondary.flush()

    def report(self, text: str) -> None:
        """A line on stderr."""
        self.err.write(text + "\n")
        self.err.flush()

    def error(self, text: str) -> None:
        self.report(f"ninfer: error: {text}")

    def progress(self, text: str) -> None:
        """Replace the progress line on stderr; nothing when that is no terminal."""
        if self.err.isatty():
            self.err.write(_CLEAR_LINE + text)
            self.err.flush()


def silence_stdout() -> None:
    """The reader is gone: point stdout at nothing, so that no later flush fails either."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
