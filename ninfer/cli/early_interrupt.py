"""Ctrl-C while modules are imported ends the process at once and without a word.

Inside the import of a C library an interrupt would come out as an error of that library. Imports
next to nothing, so that it can be had first.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Final

INTERRUPTED: Final = 130


class EarlyInterrupt:
    """A context in the main thread; elsewhere, and where SIGINT has another handler, no effect."""

    def __enter__(self) -> None:
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_active = is_default and threading.current_thread() is threading.main_thread()
        if self._is_active:
            signal.signal(signal.SIGINT, _leave)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
