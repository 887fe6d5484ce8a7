"""Console: where the command line writes, and how much a reader of it can take.

stdout carries answers and what was asked for. Secondary text (thoughts, reports, notices) stands
between them in an interactive chat and goes to stderr everywhere else; progress is for terminals.
Escape codes are written to terminals only (not to a dumb one), and colours not under NO_COLOR.

stdout that cannot be written ends the program (OutputError), and so does a reader that went away
(ReaderGone). stderr that cannot be written is given up: there is nowhere else to say so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

from ninfer.cli.layout import wrapped
from ninfer.contract.errors import OutputError

_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"
_CLEAR_LINE: Final = "\r\x1b[K"
_UNSAFE: Final = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}
"""Control characters in a model's text could move the cursor or retitle the terminal."""


class ReaderGone(Exception):
    """Nobody reads stdout any more."""


@dataclass(frozen=True, slots=True)
class Console:
    """Two text streams.

    is_interactive   a person at a terminal on both stdin and stdout
    has_colour       the terminal shows colours and the user wants them
    moves_cursor     the terminal understands cursor movement
    """

    out: TextIO
    err: TextIO
    is_interactive: bool
    has_colour: bool
    moves_cursor: bool = True

    @classmethod
    def of_process(
        cls, stdin: TextIO, out: TextIO, err: TextIO, environ: Mapping[str, str]
    ) -> Console:
        is_interactive = stdin.isatty() and out.isatty()
        moves_cursor = environ.get("TERM") != "dumb"
        has_colour = moves_cursor and not environ.get("NO_COLOR")
        return cls(out, err, is_interactive, has_colour, moves_cursor)

    def write(self, text: str) -> None:
        """Text to stdout at once; made harmless for a terminal. Raises OutputError."""
        self._put(self.out, text.translate(_UNSAFE) if self.out.isatty() else text)

    def write_lines(self, text: str) -> None:
        """`write` with long lines broken between words where stdout is a terminal."""
        self.write(wrapped(text, columns_of(self.out)))

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
        self._put(stream, f"{_DIM}{text}{_RESET}" if self.dims_secondary and text else text)

    def notice(self, text: str) -> None:
        """A secondary line."""
        stream = self._secondary
        self.write_secondary(wrapped(text, columns_of(stream)))
        self._put(stream, "\n")

    def report(self, text: str) -> None:
        """A line on stderr, broken between words on a terminal."""
        self._put(self.err, wrapped(text, columns_of(self.err)) + "\n")

    def error(self, text: str) -> None:
        self.report(f"ninfer: error: {text}")

    @property
    def shows_progress(self) -> bool:
        """Whether stderr is a terminal with a cursor, where a line can be replaced."""
        return self.moves_cursor and self.err.isatty()

    def progress(self, text: str) -> None:
        """Replace the progress line on stderr; nothing where none is shown."""
        if self.shows_progress:
            self._put(self.err, _CLEAR_LINE + text)

    def _put(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            silence(stream)
            if stream is self.err:
                return
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            raise OutputError("stdout", f"cannot write: {error.strerror or error}") from error


def columns_of(stream: TextIO) -> int | None:
    """The width of a terminal; None for anything else, and for a terminal that does not know."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:
        return None


def silence(stream: TextIO) -> None:
    """Point a stream that fails at nothing, so that no later flush of what it holds fails too."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):
            os.dup2(nothing, stream.fileno())
    finally:
        os.close(nothing)
