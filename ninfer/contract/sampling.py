"""How one token is chosen. Filled by the Frontend, read by the Program; immutable for a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
MIN_TEMPERATURE = 0.01
"""Smaller positive temperatures are raised to this; they overflow otherwise."""


class DrawPurpose(IntEnum):
    """Third word of the random counter, so that two uses of one position never share noise."""

    TARGET = 0
    DRAFT = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Ranges are those of the gateway contract; whoever builds one has validated them.

    temperature        0 = greedy; otherwise >= MIN_TEMPERATURE
    top_k              0 = off
    top_p, min_p       1.0 and 0.0 = off
    presence_penalty, frequency_penalty   over generated tokens only
    repetition_penalty over prompt and generated tokens; 1.0 = off
    logit_bias         (token id, additive bias)
    seed               64 bits; with the position and the token id it fixes every draw
    top_logprobs       None = no logprobs; n = the sampled token's and the n best
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    top_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def counts_tokens(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the raw model distribution (before temperature, penalties, bias)."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), best first, ties to the lower id; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token a unit produced, provisional until committed."""

    token_id: int
    logprobs: TokenLogprobs | None = None
