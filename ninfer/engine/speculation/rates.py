"""Rates: smoothed shares of right guesses, of several kinds of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Final

WEIGHT: Final = 0.15
"""Of the newest guess in a share."""


PARENT_PACE: Final = 0.1
"""What one text learns counts so much in what others begin with."""


class Rates:
    """`first` has what each kind is credited with before anything is known of it."""

    def __init__(self, first: Sequence[float], parent: Rates | None = None) -> None:
        self._rates = list(first)
        self._parent = parent

    def child(self) -> Rates:
        """Of another text, which begins with these and tells them what it learns."""
        return Rates(self._rates, self)

    def worths(self, kinds: Sequence[int]) -> tuple[float, ...]:
        """How probably guesses of these kinds, one behind another, are right together with all
        before them."""
        return tuple(accumulate((self._rates[kind] for kind in kinds), mul))

    def note(self, kind: int, *, is_right: bool, weight: float = WEIGHT) -> None:
        """What became of a guess whose predecessors were right."""
        self._rates[kind] += weight * (is_right - self._rates[kind])
        if self._parent is not None:
            self._parent.note(kind, is_right=is_right, weight=weight * PARENT_PACE)
