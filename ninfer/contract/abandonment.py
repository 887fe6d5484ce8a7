"""Lets long work in a thread see that nobody waits for it any more.

await run_abandonable(executor, work)   whoever is cancelled here leaves the work alone
stop_if_abandoned()                     in the work, every now and then
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from threading import Event
from typing import Final, TypeVar

T = TypeVar("T")
_FLAG: Final[ContextVar[Event | None]] = ContextVar("abandoned", default=None)


class WorkAbandoned(Exception):
    """Nobody waits for the result."""


async def run_abandonable(executor: Executor | None, work: Callable[[], T]) -> T:
    """`work()` in a thread of `executor`, by default the one that all share.

    Cancelled while it waits for a thread, it never runs; later it goes on until it calls
    `stop_if_abandoned` or ends, and keeps its thread till then.
    """
    flag = Event()
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, _watched, work, flag)
    finally:
        flag.set()


def stop_if_abandoned() -> None:
    """Raises WorkAbandoned when the caller of the work that this is called from has left."""
    flag = _FLAG.get()
    if flag is not None and flag.is_set():
        raise WorkAbandoned


def _watched(work: Callable[[], T], flag: Event) -> T:
    token = _FLAG.set(flag)
    try:
        return work()
    finally:
        _FLAG.reset(token)
