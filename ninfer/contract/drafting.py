"""Speculative decoding: who guesses, what that costs, what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Final, Protocol

MAX_DRAFT_TOKENS: Final = 15
"""Most drafted tokens of a row that can be asked for."""


class DraftSource(Enum):
    NGRAM = "ngram"
    """What followed the same words earlier in prompt and answer."""
    MODEL = "model"
    """The draft model."""


class DraftCosts(Protocol):
    """Times of decode steps, in any unit. They decide how much is drafted, never what comes out."""

    def step(self, num_rows: int, num_columns: int, width: int) -> float:
        """A step of so many rows, one at least, with so many inputs in all of them together and
        `width` in the longest."""

    def proposals(self, num_rows: int, num_tokens: int) -> float:
        """What it adds that the draft model guesses so many tokens for each row."""


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Tokens drafted by one source, and those of them that became part of an answer."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Speculative decoding of one request.

    rounds     decode steps that checked a draft
    drafted    tokens in these drafts
    accepted   of them, those that became part of the answer
    accepted_at   [i] rounds in which draft token number i, from 0, did
    ngram, model  the same by source
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    ngram: SourceCounts = field(default_factory=SourceCounts)
    model: SourceCounts = field(default_factory=SourceCounts)

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            tuple(map(sum, zip_longest(self.accepted_at, other.accepted_at, fillvalue=0))),
            self.ngram + other.ngram,
            self.model + other.model,
        )

    @classmethod
    def of_round(cls, source: DraftSource, num_drafted: int, num_accepted: int) -> DraftCounts:
        """One round with a draft of one source."""
        counts = SourceCounts(num_drafted, num_accepted)
        is_model = source is DraftSource.MODEL
        return cls(
            1,
            num_drafted,
            num_accepted,
            (1,) * num_accepted,
            ngram=SourceCounts() if is_model else counts,
            model=counts if is_model else SourceCounts(),
        )
