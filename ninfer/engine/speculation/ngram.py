"""NgramDrafter: what came next where a text last ended the way it ends now.

Pure and incremental: a token costs constant time and memory, and the oldest are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SIZES: Final = (4, 3, 2)
"""Tokens that must agree; the longest that is found wins."""
MAX_PLACES: Final = 16_384
"""Places that are remembered for each size, and tokens that can be copied."""
LONGEST_AGREEMENT: Final = 16
"""Tokens that are compared, at most."""


class NgramDraft(NamedTuple):
    """What came next in another place. `agreement`: so many tokens before it are the same here."""

    token_ids: tuple[int, ...]
    agreement: int


NO_DRAFT: Final = NgramDraft((), 0)


class NgramDrafter:
    """The text of one sequence, prompt and answer."""

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._tokens: list[int] = []
        self._num_forgotten = 0
        self._places: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in SIZES}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text."""
        for token_id in token_ids[-self._max_places :]:
            self._append(token_id)

    def draft(self, num_tokens: int) -> NgramDraft:
        """At most so many tokens that may come next; none when the end of the text is new."""
        place = self._newest_place()
        if place is None or num_tokens < 1:
            return NO_DRAFT
        source = self._tokens[place : place + num_tokens]
        # A text that repeats itself runs into its own end and goes on with what is drafted.
        while len(source) < num_tokens:
            source += source[: num_tokens - len(source)]
        return NgramDraft(tuple(source), self._agreement(place))

    def _agreement(self, place: int) -> int:
        """Tokens before the place that are those at the end of the text."""
        length, most = 0, min(place, LONGEST_AGREEMENT)
        while length < most and self._tokens[place - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length

    def _newest_place(self) -> int | None:
        """Index of the token behind the newest earlier occurrence of the end."""
        for size in SIZES:
            place = self._places[size].get(tuple(self._tokens[-size:]))
            if place is not None and place >= self._num_forgotten:
                return place - self._num_forgotten
        return None

    def _append(self, token_id: int) -> None:
        """What ended before this token goes on with it."""
        place = self._num_forgotten + len(self._tokens)
        for size, places in self._places.items():
            if len(self._tokens) >= size:
                key = tuple(self._tokens[-size:])
                places.pop(key, None)
                places[key] = place
                if len(places) > self._max_places:
                    del places[next(iter(places))]
        self._tokens.append(token_id)
        if len(self._tokens) > 2 * self._max_places:
            num_old = len(self._tokens) - self._max_places
            del self._tokens[:num_old]
            self._num_forgotten += num_old
