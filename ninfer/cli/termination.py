"""Termination: SIGTERM ends a command as Ctrl-C does, and the process then dies of it.

So the line of an answer is ended, helpers are stopped and nothing is left half-written. `serve` has
a handler of its own, which drains; an editor at a terminal takes Ctrl-C for something else.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class Termination:
    """`was_asked`: SIGTERM came."""

    def __init__(self) -> None:
        self.was_asked = False

    def interrupts(self) -> None:
        """From now on SIGTERM interrupts the program; a second one kills it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._interrupt)

    def restore(self) -> None:
        """SIGTERM acts as if there had been no `interrupts`."""
        if signal.getsignal(signal.SIGTERM) == self._interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def die(self) -> None:
        """Once `restore`d, end as whoever sent the signal expects."""
        os.kill(os.getpid(), signal.SIGTERM)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        self.was_asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt
