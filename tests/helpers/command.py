"""Runs of the real program in a process of its own."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from typing import IO, TypeAlias

Stream: TypeAlias = IO[bytes] | int | None

PATIENCE_S = 100.0
"""Longest wait for what a working program does at once, on a machine that is busy with others."""


def clean_environ(**extra: str) -> dict[str, str]:
    """This environment without settings of the program, plus `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NINFER_")}
    kept.pop("NO_COLOR", None)
    return {**kept, **extra}


def argv_of(*arguments: str) -> list[str]:
    return [sys.executable, "-X", "utf8", "-m", "ninfer", *arguments]


def take_signals() -> None:
    """In a child, before it runs: SIGINT acts again where a shell in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_ninfer(
    *arguments: str,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = subprocess.PIPE,
    stderr: Stream = subprocess.PIPE,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start and leave running; signals reach it however the tests themselves were started."""
    return subprocess.Popen(
        argv_of(*arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=clean_environ(**(environ or {})),
        preexec_fn=take_signals,
    )


def ninfer(
    *arguments: str, stdin: str | bytes = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end; `stdout` and `stderr` are text."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        argv_of(*arguments),
        input=data,
        capture_output=True,
        env=clean_environ(**(environ or {})),
        timeout=PATIENCE_S,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def wait_until_read(pipe: IO[bytes]) -> None:
    """Until the other side has taken everything written to `pipe`: it waits for more of it now."""
    end_s = time.monotonic() + PATIENCE_S
    unread = array.array("i", [0])
    while fcntl.ioctl(pipe.fileno(), termios.FIONREAD, unread) or unread[0]:
        assert time.monotonic() < end_s, f"{unread[0]} bytes were not read"
        time.sleep(0.01)
