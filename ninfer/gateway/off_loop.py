"""Work that is short for most requests, and for some so long that the event loop must not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

MANY_TOKENS: Final = 8_192
"""Looking up so many one by one takes some 10 ms."""
T = TypeVar("T")


async def off_the_loop(work: Callable[[], T], *, is_long: bool) -> T:
    """`work()`, in a thread when it is long. It must have no business with anything that goes on
    meanwhile."""
    return await asyncio.to_thread(work) if is_long else work()
