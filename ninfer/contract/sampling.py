"""How one token is chosen. Filled by the Frontend, read by the Program; immutable for a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ninfer.contract.arrays import Float64Array, IntArray

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


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Log probabilities of a prompt's own tokens are asked for.

    first     index of the first token to be scored, at least 1: nothing predicts token 0
    num_top   how many of the best tokens in its place each is reported with
    """

    first: int
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Log probabilities of the prompt tokens [first, first + n), as in TokenLogprobs.

    logprobs       [n] of the tokens themselves
    top_ids, top_logprobs   [n, k] of the best in their place, best first, ties to the lower id
    """

    first: int
    logprobs: Float64Array
    top_ids: IntArray
    top_logprobs: Float64Array

    @property
    def stop(self) -> int:
        return self.first + int(self.logprobs.shape[0])

    def since(self, first: int) -> PromptScores:
        """Those of the tokens from `first` on."""
        cut = min(max(0, first - self.first), self.logprobs.shape[0])
        return PromptScores(
            self.first + cut, self.logprobs[cut:], self.top_ids[cut:], self.top_logprobs[cut:]
        )
