"""prompt_logprobs: how likely given tokens were, and which would have been the likeliest.

    logprobs[t] = log softmax(logits[t])[targets[t]], and the num_top largest of each row

Shapes     logits [T, V], targets [T] -> PromptScores of T tokens; T >= 1, 0 <= num_top <= V
Dtypes     logits floating, widened to float64 row by row; targets int32
Effects    none
Errors     OpContractError for other ranks and lengths, a target outside [0, V) or num_top above V
Tolerance  EXACT
Source     the definition; order of ties as in sampling
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.sampling import PromptScores
from ninfer.ops import sampling
from ninfer.ops.checks import fail, require_rank

_OP = "prompt_logprobs"


def reference(
    logits: FloatArray, targets: IntArray, *, first: int, num_top: int
) -> PromptScores | None:
    """Scores of the tokens from index `first` of their prompt on; None when a logit is not
    finite."""
    require_rank(_OP, "logits", logits, 2)
    num_tokens, vocab_size = logits.shape
    if targets.shape != (num_tokens,) or num_tokens == 0:
        fail(_OP, f"targets {targets.shape} for logits {logits.shape}")
    if targets.min() < 0 or targets.max() >= vocab_size:
        fail(_OP, f"a target is outside [0, {vocab_size})")
    if not np.isfinite(logits).all():
        return None
    scores = empty(first, num_tokens, num_top)
    for index, (row, target) in enumerate(zip(logits, targets.tolist(), strict=True)):
        found = sampling.logprobs(row, target, num_top)
        scores.logprobs[index] = found.logprob
        scores.top_ids[index] = [token_id for token_id, _ in found.top]
        scores.top_logprobs[index] = [logprob for _, logprob in found.top]
    return scores


def empty(first: int, num_tokens: int, num_top: int) -> PromptScores:
    """Scores to be filled in."""
    shape = (num_tokens, num_top)
    return PromptScores(
        first, np.empty(num_tokens), np.empty(shape, np.int32), np.empty(shape, np.float64)
    )


def joined(parts: list[PromptScores]) -> PromptScores:
    """Neighbouring stretches of a prompt, at least one, as one."""
    if len(parts) == 1:
        return parts[0]
    return PromptScores(
        parts[0].first,
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )
