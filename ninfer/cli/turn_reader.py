"""TurnReader: where the REPL's turns come from when that is not a terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TextIO

from ninfer.cli.block_input import is_open_block
from ninfer.cli.input_files import LIMIT_BYTES, too_long


class TurnReader(Protocol):
    """Gives one input after the other: a line, or a block between triple quotes."""

    @property
    def was_interrupted(self) -> bool:
        """Ctrl-C came right behind the last input, before it could become a signal."""

    async def read(self) -> str | None:
        """The next input as it was typed; None at the end."""


class PipeReader:
    """Reads a text stream line by line."""

    was_interrupted: Final = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    async def read(self) -> str | None:
        # Reading blocks the loop on purpose: nothing runs between two turns, and a thread stuck
        # in a read could not be ended by Ctrl-C.
        with _interrupt_raises():
            text = self._read_line(LIMIT_BYTES)
            while is_open_block(text):
                line = self._read_line(LIMIT_BYTES - len(text))
                if not line:
                    break
                text += line
        return text.rstrip("\n") if text else None

    def _read_line(self, limit: int) -> str:
        """Raises OptionError for a turn beyond the limit: the input of a runaway program."""
        line = self._stream.readline(limit + 1)
        if len(line) > limit:
            raise too_long("stdin", "a turn")
        return line


@contextmanager
def _interrupt_raises() -> Iterator[None]:
    """asyncio takes SIGINT as a request to the loop, which is not running during a read."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
