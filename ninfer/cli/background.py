"""Blocking work beside the event loop, for a program that a user may interrupt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_background(function: Callable[[], T]) -> T:
    """Run `function` in a thread of its own. Cancelling leaves the thread to itself.

    Unlike with `asyncio.to_thread`, neither the loop's end nor the program's waits for it: a read
    that never returns must not keep Ctrl-C from ending the program.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the waiting side raises it
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(outcome)
