"""Scores of given tokens by way of the sampler: rows that can choose nothing else.

Log probabilities are those of the raw logits, so a bias that settles the choice changes none. What
leaves the device is what was asked for, not the logits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import PromptScores, SamplingParams
from ninfer.contract.units import RowOutput, SampleRow, ScoreRow
from ninfer.ops import prompt_logprobs
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS
from ninfer.program.executors.cuda_tensor import DeviceTensor

_SETTLING_BIAS: Final = 1e30
"""Beside it any finite logit of a model is nothing, in float32 as well."""


async def score_inputs(
    score: ScoreRow,
    start: int,
    queue_logits: Callable[[int, int], DeviceTensor],
    choose: Callable[[tuple[SampleRow, ...], DeviceTensor], Awaitable[tuple[RowOutput, ...]]],
    *,
    max_rows: int,
) -> PromptScores | None:
    """Of a unit that begins at `start`; None when logits are not finite.

    queue_logits   logits [n, V] of the unit's inputs [first, last), at most SMALL_TOKENS of them
    choose         what the sampler makes of at most `max_rows` rows
    """
    num_targets = score.targets.size
    scores = prompt_logprobs.empty(start + score.first + 1, num_targets, score.num_top)
    for done in range(0, num_targets, SMALL_TOKENS):
        targets = score.targets[done : done + SMALL_TOKENS].tolist()
        first = score.first + done
        logits = queue_logits(first, first + len(targets))
        for row in range(0, len(targets), max_rows):
            part = targets[row : row + max_rows]
            samples = tuple(_scoring_sample(target, score.num_top) for target in part)
            outputs = await choose(samples, logits.rows(row, row + len(part)))
            if not _fill(scores, done + row, part, outputs):
                return None
    return scores


def _scoring_sample(target: int, num_top: int) -> SampleRow:
    """A row that chooses `target` and reports its log probability and the `num_top` best."""
    nothing = np.empty(0, np.int32)
    params = SamplingParams(logit_bias=((target, _SETTLING_BIAS),), top_logprobs=num_top)
    return SampleRow(params, 0, nothing, nothing, nothing)


def _fill(
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
