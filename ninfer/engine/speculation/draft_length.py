"""DraftLength: how many tokens are worth drafting for one row, by its recent luck."""

from __future__ import annotations

from typing import Final

COLUMN_COST: Final = 0.08
"""What one more column adds to a step of one row, as a share of it."""
FIRST_RATE: Final = 0.7
"""Share of right guesses that a new row is credited with."""
WEIGHT: Final = 0.15
"""Of the newest guess in the share."""
PROBE_ROUNDS: Final = 8
"""Steps after which a row that drafts nothing tries one token."""


class DraftLength:
    """Draft token number i is right with all before it in rate ** i of the rounds. It is drafted
    while that is more than the column costs: in a batch each row's column slows all rows down."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._rate = FIRST_RATE
        self._num_idle = 0

    @property
    def rate(self) -> float:
        """Smoothed share of guesses that were right, of those that were looked at."""
        return self._rate

    def next(self, num_rows: int) -> int:
        """The most tokens to draft in a batch of so many rows."""
        cost = COLUMN_COST * num_rows
        length, worth = 0, self._rate
        while length < self._max_tokens and worth > cost:
            length += 1
            worth *= self._rate
        if length:
            return length
        self._num_idle += 1
        if self._num_idle < PROBE_ROUNDS:
            return 0
        self._num_idle = 0
        return min(1, self._max_tokens)

    def note(self, num_drafted: int, num_right: int) -> None:
        """A round ended; guesses behind a wrong one were not looked at."""
        for _ in range(num_right):
            self._rate += WEIGHT * (1.0 - self._rate)
        if num_right < num_drafted:
            self._rate -= WEIGHT * self._rate
