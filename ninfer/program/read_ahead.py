"""read_ahead: an iterator whose next item is made in a thread while the present one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")


class _End:
    pass


_END: Final = _End()


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, one of them ahead of the caller. What making one raises comes out in its place.
    Who stops early waits for the one that is being made."""
    with ThreadPoolExecutor(1, thread_name_prefix="ninfer-read-ahead") as thread:
        pending = thread.submit(next, items, _END)
        while not isinstance(item := pending.result(), _End):
            pending = thread.submit(next, items, _END)
            yield item
