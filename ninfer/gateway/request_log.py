"""The request log: a line of JSON for every request, written by a thread of its own.

The event loop never waits for the file. A file that is too slow loses lines rather than memory,
and says so.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import orjson

from ninfer.contract.errors import OutputError

MAX_WAITING: Final = 10_000
_FLAG: Final = "--request-log"
_logger = logging.getLogger(__name__)


class RequestLog:
    """Adds lines to a file; use it as a context manager. Writing is safe from any thread."""

    def __init__(self, name: str) -> None:
        """`-` is stdout. Raises OutputError when the file cannot be opened."""
        self._file, self._is_own = _open(name)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._has_lost = False
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """All lines are in the file then."""
        self._lines.put(None)
        self._thread.join()
        if self._is_own:
            try:
                self._file.close()
            except OSError as error:
                self._lose(str(error))

    def write(self, entry: Mapping[str, Any]) -> None:
        """Never blocks."""
        if self._lines.qsize() >= MAX_WAITING:
            self._lose("its file is too slow")
        else:
            self._lines.put(_line(entry))

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
                if self._lines.empty():
                    self._file.flush()
            except (OSError, ValueError) as error:
                self._lose(str(error))

    def _lose(self, why: str) -> None:
        """Said once."""
        if not self._has_lost:
            self._has_lost = True
            _logger.warning("%s: lines are lost: %s", _FLAG, why)


def _line(entry: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(entry) + b"\n"
    except TypeError:  # integers of more than 64 bits, in a body that is logged as it came
        return json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _open(name: str) -> tuple[BinaryIO, bool]:
    if name == "-":
        return sys.stdout.buffer, False
    try:
        return Path(name).open("ab"), True
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else None
        raise OutputError(_FLAG, f"cannot write {name}: {text or error}") from error
