"""Where rendering and tokenising run, so that neither the event loop nor a small prompt waits.

short   at once, on the loop
longer  in the threads that all slow host work shares
large   in two threads of their own: more at once would only cost memory, a hundred bytes for each
        byte of text
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ninfer.contract.abandonment import run_abandonable

MAX_INLINE_CHARACTERS: Final = 2_000
"""Takes well under 2 ms."""
MAX_SHARED_CHARACTERS: Final = 262_144
"""Takes a tenth of a second or so."""
MAX_LARGE_AT_ONCE: Final = 2
T = TypeVar("T")


class HostWork:
    """Runs the work of one frontend."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(MAX_LARGE_AT_ONCE, thread_name_prefix="large-prompt")

    async def run(self, work: Callable[[], T], num_characters: int) -> T:
        """`work()`, where work on so many characters belongs.

        Cancelled while it waits for a thread, it never runs; later it goes on until it calls
        `stop_if_abandoned` or ends, and keeps its place till then, so that no row of cancelled
        requests can have more at once.
        """
        if num_characters <= MAX_INLINE_CHARACTERS:
            return work()
        executor = self._large if num_characters > MAX_SHARED_CHARACTERS else None
        return await run_abandonable(executor, work)
