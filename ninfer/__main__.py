"""`python -m ninfer`: chat with a model, serve it, run, score, describe or convert it.

Ctrl-C while Python still imports the program ends it at once and without a word.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def main() -> int:
    """The process's own command line; returns the exit code."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from ninfer.cli.main import main as run_command_line

    try:
        signal.signal(signal.SIGINT, previous)
        return run_command_line()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
