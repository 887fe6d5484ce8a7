"""Lets long work in a thread see that nobody waits for it any more.

with watching(flag): work()        in the thread; whoever leaves sets the flag
stop_if_abandoned()                in the work, every now and then
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import Final

_FLAG: Final[ContextVar[Event | None]] = ContextVar("abandoned", default=None)


class WorkAbandoned(Exception):
    """Nobody waits for the result."""


@contextmanager
def watching(flag: Event) -> Iterator[None]:
    """Inside, `stop_if_abandoned` looks at `flag`."""
    token = _FLAG.set(flag)
    try:
        yield
    finally:
        _FLAG.reset(token)


def stop_if_abandoned() -> None:
    """Raises WorkAbandoned."""
    flag = _FLAG.get()
    if flag is not None and flag.is_set():
        raise WorkAbandoned
