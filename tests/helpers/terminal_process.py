"""TerminalProcess: a program on a pseudo-terminal, typed at and read like a user would."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

PATIENCE_S = 60.0
_LAUNCHER = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes the terminal the controlling one, so that Ctrl-C becomes SIGINT, and lets SIGINT act where
the tests were started with it ignored."""
_CURSOR_OR_MODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
"""Escape sequences other than colours (SGR, which ends in m)."""


class TerminalProcess:
    """`text` is everything written so far, without cursor movement and carriage returns."""

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        columns: int = 200,
        term: str = "xterm-256color",
    ) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, columns))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environ, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
        )
        os.close(slave)
        self._raw = b""
        self._seen = 0

    @property
    def text(self) -> str:
        decoded = self._raw.decode("utf-8", "replace").replace("\r", "")
        return _CURSOR_OR_MODE.sub("", decoded)

    @property
    def raw(self) -> bytes:
        return self._raw

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, wanted: str, timeout_s: float = PATIENCE_S) -> str:
        """Read until `wanted` follows what was expected before; returns what lay between."""
        end_s = time.monotonic() + timeout_s
        while (position := self.text.find(wanted, self._seen)) < 0:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._read(left_s):
                raise AssertionError(f"{wanted!r} did not come; there was {self.text!r}")
        between = self.text[self._seen : position]
        self._seen = position + len(wanted)
        return between

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, with all output read."""
        end_s = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < end_s:
            self._read(0.05)
        return self._process.wait(timeout=0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if not ready:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:
            # Linux says EIO when the other side is closed.
            return False
        self._raw += piece
        return bool(piece)
