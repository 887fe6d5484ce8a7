"""From places of a text to frontiers: numbers of tokens at real token borders.

Control marks split a text before anything else does, so the tokens before the last mark ahead of
a place are as they are, whatever follows; only the stretch behind that mark is tokenised again. A
place is a frontier when the stretch gives the tokens that the whole text has there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ninfer.contract.cache import CheckpointKind
from ninfer.contract.prompt import PromptFrontier
from ninfer.frontend.control_text import GuardedText
from ninfer.frontend.places import TextPlace
from ninfer.frontend.tokenizer import TextTokenizer, UnsplittableText

MAX_STRETCH_CHARACTERS: Final = 16_384
"""A longer stretch without a control mark is not tokenised twice; its place is given up."""
_LASTING: Final = (
    CheckpointKind.STABLE_PREFIX,
    CheckpointKind.TURN_CLOSURE,
    CheckpointKind.RESPONSE_REPLAY,
    CheckpointKind.PROMPT_TAIL,
    CheckpointKind.LONG_ANCHOR,
    CheckpointKind.SESSION_END,
)
"""Of several kinds at one place the first counts."""


def raw_frontiers(num_tokens: int) -> tuple[PromptFrontier, ...]:
    """All but the last token, which is computed in any case."""
    if num_tokens < 2:
        return ()
    return (PromptFrontier(num_tokens - 1, CheckpointKind.PROMPT_TAIL),)


class FrontierFinder:
    """For one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {text: tokenizer.added_id(text) for text in tokenizer.control_texts}
        texts = sorted(self._ids, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._mark_ids = np.array([i for i in self._ids.values() if i is not None], np.int32)

    def find(
        self, text: GuardedText, token_ids: Sequence[int], places: Iterable[TextPlace]
    ) -> tuple[PromptFrontier, ...]:
        """Ascending, one of a kind at each; `token_ids` are those of `text`."""
        wanted = list(places)
        marks = self._marks(text.text, token_ids) if wanted else None
        if marks is None:
            return ()
        found: dict[int, PromptFrontier] = {}
        for place in wanted:
            count = self._num_tokens(text, token_ids, place, marks)
            if count is not None and 0 < count < len(token_ids):
                frontier = PromptFrontier(count, place.kind, place.is_explicit)
                found[count] = _joined(found.get(count), frontier)
        return tuple(found[count] for count in sorted(found))

    def _marks(self, text: str, token_ids: Sequence[int]) -> _Marks | None:
        """Where the control marks are, in the text and among the tokens; None when the two do not
        agree, as when a normaliser makes one."""
        matches = [] if self._mark is None else list(self._mark.finditer(text))
        ids = np.asarray(token_ids, np.int32)
        indices = np.flatnonzero(np.isin(ids, self._mark_ids))
        if ids[indices].tolist() != [self._ids[match.group()] for match in matches]:
            return None
        return _Marks([match.end() for match in matches], indices.tolist())

    def _num_tokens(
        self, text: GuardedText, token_ids: Sequence[int], place: TextPlace, marks: _Marks
    ) -> int | None:
        """Tokens of the text up to a place; None where no token ends there. A mark that a client
        put inside a token stands for the border before it."""
        first, start = marks.last_before(place.end)
        if place.end - start > MAX_STRETCH_CHARACTERS:
            return None
        stretch = self._encode(text.text[start : place.end], text.guard)
        if stretch is None:
            return None
        num_common = _num_common(token_ids[first : first + len(stretch)], stretch)
        if num_common < len(stretch) and not place.is_explicit:
            return None
        return first + num_common

    def _encode(self, stretch: str, guard: str | None) -> list[int] | None:
        if not stretch:
            return []
        try:
            if guard is None:
                return self._tokenizer.encode(stretch)
            return self._tokenizer.encode_guarded(stretch, guard)
        except UnsplittableText:
            return None


class _Marks:
    """Control marks in text order: where each ends in the text, and the index of its token."""

    def __init__(self, ends: list[int], indices: list[int]) -> None:
        self._ends = ends
        self._indices = indices

    def last_before(self, position: int) -> tuple[int, int]:
        """(tokens, characters) up to the end of the last mark that ends at `position` or before."""
        number = bisect_right(self._ends, position)
        return (self._indices[number - 1] + 1, self._ends[number - 1]) if number else (0, 0)


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _joined(known: PromptFrontier | None, other: PromptFrontier) -> PromptFrontier:
    """Two at one place."""
    if known is None:
        return other
    kind = min(known.kind, other.kind, key=_LASTING.index)
    return replace(known, kind=kind, is_explicit=known.is_explicit or other.is_explicit)
