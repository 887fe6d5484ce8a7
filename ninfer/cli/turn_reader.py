"""TurnReader: where the REPL's turns come from when that is not a terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from ninfer.cli.block_input import is_open_block


class TurnReader(Protocol):
    """Gives one input after the other: a line, or a block between triple quotes."""

    async def read(self) -> str | None:
        """The next input as it was typed; None at the end."""


class PipeReader:
    """Reads a text stream line by line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    async def read(self) -> str | None:
        # Reading blocks the loop on purpose: nothing runs between two turns, and a thread stuck
        # in a read could not be ended by Ctrl-C.
        with _interrupt_raises():
            text = self._stream.readline()
            while is_open_block(text):
                line = self._stream.readline()
                if not line:
                    break
                text += line
        return text.rstrip("\n") if text else None


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
