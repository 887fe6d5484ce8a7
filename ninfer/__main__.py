"""`python -m ninfer`: chat with a model, serve it, run, score, describe or convert it."""

from __future__ import annotations

import sys

from ninfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
