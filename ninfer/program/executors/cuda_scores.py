"""Scores of given tokens by way of the sampler: rows that can choose nothing else.

Log probabilities are those of the raw logits, so a bias that settles the choice changes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import PromptScores, SamplingParams
from ninfer.contract.units import RowOutput, SampleRow

_SETTLING_BIAS: Final = 1e30
"""Beside it any finite logit of a model is nothing, in float32 as well."""


def scoring_sample(target: int, num_top: int) -> SampleRow:
    """A row that chooses `target` and reports its log probability and the `num_top` best."""
    nothing = np.empty(0, np.int32)
    params = SamplingParams(logit_bias=((target, _SETTLING_BIAS),), top_logprobs=num_top)
    return SampleRow(params, 0, nothing, nothing, nothing)


def fill_scores(
    scores: PromptScores, first: int, targets: Sequence[int], outputs: Sequence[RowOutput]
) -> bool:
    """Enter what the rows of `targets` gave at places [first, ...); False when a row's logits were
    not finite."""
    for index, (target, output) in enumerate(zip(targets, outputs, strict=True), first):
        token = output.token
        if token is None:
            return False
        if token.token_id != target or token.logprobs is None:
            raise InvariantError(f"the device scored token {token.token_id}, not {target}")
        scores.logprobs[index] = token.logprobs.logprob
        scores.top_ids[index] = [token_id for token_id, _ in token.logprobs.top]
        scores.top_logprobs[index] = [logprob for _, logprob in token.logprobs.top]
    return True
