"""sampling: choose one token from the logits of one row, with log probabilities on request.

In this order: logprobs of the raw logits; logit_bias; suppressed ids, and those that a mask does
not allow, to -inf; repetition penalty (prompt and generated: x / r if x > 0 else x r); presence and
frequency penalties (generated: x - presence - frequency * count); then greedy: the largest, lowest
id on ties. Otherwise, sorted by (logit descending, id ascending): top_k; weights
w = exp((x - max) / T); keep w >= min_p; keep the shortest prefix whose mass reaches top_p of the
mass before the min_p cut, at least one token; draw argmax of log w + G, where G = -log(-log(u)) and
u = philox uniform of (seed, position, token id).

Shapes     logits [V]; mask [ceil(V / 32)] uint32, bit id & 31 of word id >> 5 allows id
Dtypes     adjusted in the dtype of the logits; weights, masses and noise in float64
Units      temperature divides logits; log probabilities are natural
Effects    none; a pure function of its arguments, so batch mates and order do not matter
Errors     OpContractError for another rank, a token id outside [0, V) or top_logprobs above V
Tolerance  EXACT
Source     Gumbel-max trick; top_p Holtzman et al. 2019 (arXiv:1904.09751); min_p Nguyen et al. 2024
           (arXiv:2407.01082); repetition penalty Keskar et al. 2019 (arXiv:1909.05858)
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.sampling import DrawPurpose, GeneratedToken, SamplingParams, TokenLogprobs
from ninfer.contract.units import SampleRow
from ninfer.ops import philox
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "sampling"
_FIRST_PREFIX: Final = 512
"""Tokens looked at first when top_p is on and top_k is off; grows until the mass is reached."""

TokenIds = NDArray[np.int64]


def reference(
    logits: FloatArray, row: SampleRow, mask: NDArray[np.uint32] | None = None
) -> GeneratedToken | None:
    """The row's token, or None when logits are not finite or nothing may be drawn."""
    require_rank(_OP, "logits", logits, 1)
    require_same_dtype(_OP, logits)
    if not np.isfinite(logits).all():
        return None
    scores = _adjusted(logits, row, mask)
    best = int(scores.argmax())
    if scores[best] == -np.inf:
        return None
    token_id = best
    if not row.params.is_greedy:
        token_id = _draw(scores, None, row.params, row.position, row.purpose)
    top = row.params.top_logprobs
    return GeneratedToken(token_id, None if top is None else logprobs(logits, token_id, top))


def logprobs(logits: FloatArray, token_id: int, num_top: int) -> TokenLogprobs:
    """Log softmax at `token_id` and at the `num_top` best tokens."""
    if not 0 <= num_top <= logits.size:
        fail(_OP, f"top_logprobs {num_top} outside [0, {logits.size}]")
    values = logits.astype(np.float64)
    peak = values.max()
    values -= peak + np.log(np.exp(values - peak).sum())
    best = largest(logits, num_top) if num_top else ()
    top = tuple((int(index), float(values[index])) for index in best)
    return TokenLogprobs(float(values[token_id]), top)


def largest(scores: FloatArray, count: int) -> TokenIds:
    """Indices of the `count` largest, best first, ties to the lower index."""
    if count < scores.size:
        threshold = np.partition(scores, scores.size - count)[scores.size - count]
        ids = np.flatnonzero(scores > threshold)
        ties = np.flatnonzero(scores == threshold)[: count - ids.size]
        ids = np.union1d(ids, ties)
    else:
        ids = np.arange(scores.size)
    return ids[np.argsort(-scores[ids], kind="stable")]


def among(scores: FloatArray, token_ids: TokenIds, params: SamplingParams, position: int) -> int:
    """One of `token_ids` [n] by their finite scores [n]: chosen as `reference` does behind all that
    changes logits, with each token's own noise; ties go to the earlier in the list."""
    require_shape(_OP, "token_ids", token_ids, scores.shape)
    if params.is_greedy:
        return int(token_ids[scores.argmax()])
    return _draw(scores, token_ids, params, position, DrawPurpose.TARGET)


def filled_mask(row: SampleRow, vocab_size: int) -> NDArray[np.uint32] | None:
    """The packed bits of the row's mask, None for a row that may draw any token."""
    if row.mask is None:
        return None
    words: NDArray[np.uint32] = np.zeros(-(-vocab_size // 32), np.uint32)
    row.mask.fill(words)
    return words


def _adjusted(logits: FloatArray, row: SampleRow, mask: NDArray[np.uint32] | None) -> FloatArray:
    """Bias, suppression, the mask and penalties; the logits themselves when there are none."""
    params = row.params
    is_changed = params.logit_bias or row.suppressed_ids or params.counts_tokens
    if not is_changed and mask is None:
        return logits
    scores = logits.copy()
    if params.logit_bias:
        ids = _checked([token for token, _ in params.logit_bias], logits.size)
        np.add.at(scores, ids, np.array([bias for _, bias in params.logit_bias], scores.dtype))
    if row.suppressed_ids:
        scores[_checked(row.suppressed_ids, logits.size)] = -np.inf
    if mask is not None:
        scores[~_allowed(mask, logits.size)] = -np.inf
    if params.repetition_penalty != 1.0:
        ids = _checked(np.union1d(row.prompt_ids, row.generated_ids), logits.size)
        seen, penalty = scores[ids], params.repetition_penalty
        scores[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        ids = _checked(row.generated_ids, logits.size)
        counts = row.generated_counts.astype(scores.dtype)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _allowed(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    num_words = -(-vocab_size // 32)
    if mask.shape != (num_words,) or mask.dtype != np.uint32:
        fail(_OP, f"a mask {mask.dtype} {mask.shape}, not {num_words} words")
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def _checked(token_ids: Any, vocab_size: int) -> TokenIds:
    ids = np.asarray(token_ids, np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        fail(_OP, f"a token id is outside [0, {vocab_size})")
    return ids


def _draw(
    scores: FloatArray,
    token_ids: TokenIds | None,
    params: SamplingParams,
    position: int,
    purpose: DrawPurpose,
) -> int:
    """A token of `token_ids`, or of the whole vocabulary."""
    survivors, log_weights = _survivors(scores, params)
    ids = survivors if token_ids is None else token_ids[survivors]
    uniforms = philox.token_uniforms(params.seed, position, ids, int(purpose))
    return int(ids[(log_weights - np.log(-np.log(uniforms))).argmax()])


def _survivors(scores: FloatArray, params: SamplingParams) -> tuple[TokenIds, NDArray[np.float64]]:
    """Indices that may be drawn and their log weights (unnormalised, 0 for the best)."""
    if 0 < params.top_k < scores.size:
        ids = largest(scores, params.top_k)
        return _cut(ids, _log_weights(scores[ids], params), params, None)
    if params.top_p < 1.0:
        return _grown_prefix(scores, params)
    log_weights = _log_weights(scores, params)
    kept = np.exp(log_weights) >= params.min_p if params.min_p > 0.0 else log_weights > -np.inf
    ids = np.flatnonzero(kept)
    return ids, log_weights[ids]


def _log_weights(scores: FloatArray, params: SamplingParams) -> NDArray[np.float64]:
    values = scores.astype(np.float64)
    values -= values.max()
    values /= params.temperature
    return values


def _grown_prefix(
    scores: FloatArray, params: SamplingParams
) -> tuple[TokenIds, NDArray[np.float64]]:
    """The same survivors as sorting the whole vocabulary, for the price of the part that counts."""
    everything = _log_weights(scores, params)
    mass = float(np.exp(everything).sum())
    size = _FIRST_PREFIX
    while True:
        ids = largest(scores, min(size, scores.size))
        reached = np.cumsum(np.exp(everything[ids]))[-1] >= params.top_p * mass
        if reached or ids.size == scores.size:
            return _cut(ids, everything[ids], params, mass)
        size *= 8


def _cut(
    ids: TokenIds, log_weights: NDArray[np.float64], params: SamplingParams, mass: float | None
) -> tuple[TokenIds, NDArray[np.float64]]:
    """Apply min_p and top_p to sorted tokens; `mass` is given when `ids` are only a prefix."""
    weights = np.exp(log_weights)
    count = weights.size
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights)
        target = params.top_p * (float(cumulative[-1]) if mass is None else mass)
        count = min(int(np.searchsorted(cumulative, target)) + 1, count)
    if params.min_p > 0.0:
        count = min(count, int(np.count_nonzero(weights >= params.min_p)))
    return ids[:count], log_weights[:count]
