"""RowDrafter: the text of a request itself, and what the draft model proposes for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from ninfer.contract.drafting import MAX_DRAFT_TOKENS, DraftSource
from ninfer.contract.generation import GenerationRequest
from ninfer.engine.speculation.drafter import NO_GUESS, Guess, Hope
from ninfer.engine.speculation.ngram import NgramDrafter
from ninfer.engine.speculation.rates import WEIGHT, Rates

AGREEMENTS: Final = (2, 3, 4, 8, 16)
"""Kinds of n-gram guesses: by so many tokens at least that are the same before them."""
FIRST_TRUST: Final = (0.3, 0.4, 0.6, 0.8, 0.9)
"""Share of right guesses that each of these is credited with at first."""
FIRST_RATES: Final = (0.7,) * 3 + (0.5,) * (MAX_DRAFT_TOKENS - 3)
"""The same of what the draft model proposes, place by place: long proposals have to show first that
they are worth their time."""
PROBE_ROUNDS: Final = 8
"""Rounds without a proposal after which one is asked for to see how good they are."""


class CommonRates:
    """What requests begin with: at first what is assumed, then what those before them learned."""

    def __init__(self) -> None:
        self.trust: Final = Rates(FIRST_TRUST)
        self.places: Final = Rates(FIRST_RATES)


class _Offer(NamedTuple):
    """A guess that was made, drafted or not, and the kind of each token in `rates`."""

    guess: Guess
    kinds: Sequence[int]
    rates: Rates


class RowDrafter:
    """Implements Drafter. All guesses are compared with what came, so that a source is known also
    while the other one drafts. `common`: of all requests of an engine."""

    def __init__(
        self, request: GenerationRequest, max_tokens: int, common: CommonRates | None = None
    ) -> None:
        self._max_tokens = max_tokens
        self._ngrams = NgramDrafter()
        self._ngrams.extend(request.prompt.token_ids.tolist())
        common = common or CommonRates()
        self._trust = common.trust.child()
        self._places = common.places.child()
        self._offers: list[_Offer] = []
        self._num_seen = 0
        self._num_unproposed = 0

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        self._learn(accepted[self._num_seen :])
        self._num_seen = len(accepted)
        self._num_unproposed = 0 if proposal else self._num_unproposed + 1
        size = max(0, min(room, self._max_tokens))
        self._offers = [self._from_text(size), self._from_model(proposal[:size])]
        best = max((offer.guess for offer in self._offers), key=_worth)
        return best if best.token_ids else NO_GUESS

    def hope(self, room: int) -> Hope:
        places = range(max(0, min(room, self._max_tokens)))
        worths = self._places.worths(places)
        if not worths or (self._offers and _worth(self._offers[0].guess) > sum(worths)):
            return Hope()
        return Hope(worths, is_probe=self._num_unproposed >= PROBE_ROUNDS)

    def _from_text(self, size: int) -> _Offer:
        draft = self._ngrams.draft(size)
        kind = bisect_right(AGREEMENTS, draft.agreement) - 1
        kinds = (kind,) * len(draft.token_ids)
        worths = self._trust.worths(kinds)
        return _Offer(Guess(draft.token_ids, worths, DraftSource.NGRAM), kinds, self._trust)

    def _from_model(self, proposal: tuple[int, ...]) -> _Offer:
        kinds = range(len(proposal))
        worths = self._places.worths(kinds)
        return _Offer(Guess(proposal, worths, DraftSource.MODEL), kinds, self._places)

    def _learn(self, news: list[int]) -> None:
        """These tokens came behind those that were last guessed for."""
        self._ngrams.extend(news)
        for guess, kinds, rates in self._offers:
            is_right, looked_at = True, 0
            for kind, guessed, came in zip(kinds, guess.token_ids, news, strict=False):
                is_right, looked_at = guessed == came, looked_at + 1
                rates.note(kind, is_right=is_right)
                if not is_right:
                    break
            if looked_at and guess.source is DraftSource.MODEL:
                self._follow(looked_at, is_right)

    def _follow(self, first: int, is_right: bool) -> None:
        """Places that were not looked at follow the last that was, at half the pace."""
        for place in range(first, self._max_tokens):
            self._places.note(place, is_right=is_right, weight=WEIGHT / 2)


def _worth(guess: Guess) -> float:
    return sum(guess.worths)
