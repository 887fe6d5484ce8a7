"""A few steps into a new grammar: what would fail in every answer is known before there is one."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.frontend.constraints.matcher import Matcher

_NUM_WALKS: Final = 3
_LONGEST_WALK: Final = 8
"""In tokens; bounds of the library that a grammar exceeds are mostly met at the first or second."""
MOST_FORCED: Final = 32_768
"""Tokens that must come one behind the other. They are found out anew at each step."""
_FORCES_TOO_MUCH: Final = "too many tokens must come one behind the other, or they have no end"


def fault_of(start: Matcher, vocab_size: int) -> str | None:
    """What goes wrong in some short beginnings of answers, None when nothing does. The matcher
    stays where it is."""
    words: NDArray[np.uint32] = np.zeros(-(-vocab_size // 32), np.uint32)
    for seed in range(_NUM_WALKS):
        fault = _fault_in_walk(start.copy(), words, random.Random(seed))
        if fault is not None:
            return fault
    return None


def _fault_in_walk(place: Matcher, words: NDArray[np.uint32], rng: random.Random) -> str | None:
    for _ in range(_LONGEST_WALK):
        if place.is_complete:
            return None
        place.fill(words)
        if place.is_failed:
            return place.complaint
        forced = place.forced()
        if len(forced) > MOST_FORCED or not place.accepts(forced):
            return _FORCES_TOO_MUCH
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not allowed.size:
            return None if place.is_accepting else "nothing can follow some of its beginnings"
        token_ids = forced or [int(rng.choice(allowed))]
        if place.completes_with(token_ids) is None or not place.consume(token_ids):
            return _FORCES_TOO_MUCH if forced else place.complaint
    return place.complaint if place.is_failed else None
