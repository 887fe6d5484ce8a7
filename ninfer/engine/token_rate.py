"""TokenRate: tokens a second, over the last whole seconds. The worker writes, everyone may read."""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 10


class TokenRate:
    """A ring of seconds: those of the window, and the one that is not over yet."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._seconds = [-1] * (WINDOW_S + 1)
        self._counts = [0] * (WINDOW_S + 1)

    def note(self, count: int, now: float) -> None:
        second = int(now)
        place = second % len(self._seconds)
        if self._seconds[place] != second:
            self._seconds[place], self._counts[place] = second, 0
        self._counts[place] += count

    def per_second(self, now: float) -> float:
        """The mean of the WINDOW_S seconds before the present one."""
        end = int(now)
        counted = (
            count
            for second, count in zip(self._seconds, self._counts, strict=True)
            if end - WINDOW_S <= second < end
        )
        return sum(counted) / WINDOW_S
