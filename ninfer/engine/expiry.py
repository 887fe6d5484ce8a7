"""ExpiryQueue: which tickets' times have come. Times are seconds of whoever asks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from enum import IntEnum

_SLACK = 64


class Expiry(IntEnum):
    QUEUE_TIMEOUT = 0
    DEADLINE = 1


class ExpiryQueue:
    """A heap of (time, ticket, kind).

    Entries of tickets that ended earlier stay until their time comes or `prune` finds them; whoever
    takes due entries looks up whether they still mean something.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expiry]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time_s: float, ticket: int, kind: Expiry) -> None:
        heapq.heappush(self._heap, (time_s, ticket, kind))

    def take_due(self, now: float) -> Iterator[tuple[int, Expiry]]:
        """Remove and yield (ticket, kind) of every entry with time <= now, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            _, ticket, kind = heapq.heappop(self._heap)
            yield ticket, kind

    def prune(self, num_live: int, is_live: Callable[[int], bool]) -> None:
        """Drop entries of ended tickets once they outnumber those of `num_live` live ones."""
        if len(self._heap) <= 4 * num_live + _SLACK:
            return
        self._heap = [entry for entry in self._heap if is_live(entry[1])]
        heapq.heapify(self._heap)
