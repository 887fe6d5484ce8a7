"""`python -m ninfer`: chat with a model, serve it, run, score, describe or convert it."""

from __future__ import annotations

import os
import sys

from ninfer.cli.early_interrupt import INTERRUPTED, EarlyInterrupt


def main() -> int:
    """The process's own command line; returns the exit code."""
    with EarlyInterrupt():
        from ninfer.cli.main import main as run_command_line

    try:
        return run_command_line()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
