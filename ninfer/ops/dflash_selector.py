"""dflash_selector: of the best tokens of each place in a block, the one that follows the chosen
one before it best.

    candidates of place i: the K tokens with the largest logits, best first, ties to the earlier row
    score_i[c] = logit_i[c] + sum_r predecessors[a_(i-1), r] * gates[i, r] * successors[token_c, r]
    a_i = sampling.among(score_i, tokens_i);   a_0 = the anchor

Shapes     logits [T, Vd] of places 1 .. T, token_ids [Vd] the token of each column, gates [T, R];
           predecessors and successors [V, R] -> T token ids; 1 <= K <= Vd
Dtypes     logits, gates and codebooks the same floating dtype; token_ids integer
Units      position: cache ordinal of the anchor; place i is drawn with the noise of position + i
Effects    none; greedy ties go to the better candidate; ends before a place whose scores are not
           finite
Errors     OpContractError for a shape, dtype or token id outside the above
Tolerance  EXACT
Source     DFlash2, its authors' reference model; config keys selector_rank, selector_top_k
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.sampling import SamplingParams
from ninfer.ops import sampling
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "dflash_selector"

TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Codebooks:
    """predecessors and successors [V, R]; top_k candidates of a place."""

    predecessors: FloatArray
    successors: FloatArray
    top_k: int


def reference(
    logits: FloatArray,
    token_ids: NDArray[np.int64],
    gates: FloatArray,
    codebooks: Codebooks,
    anchor: int,
    params: SamplingParams,
    position: int,
) -> tuple[int, ...]:
    """The walk along a block, greedy or drawn as `params` say."""
    _check(logits, token_ids, gates, codebooks, anchor)
    return tuple(_walk(logits, token_ids, gates, codebooks, anchor, params, position))


def _walk(
    logits: FloatArray,
    token_ids: NDArray[np.int64],
    gates: FloatArray,
    codebooks: Codebooks,
    anchor: int,
    params: SamplingParams,
    position: int,
) -> Iterator[int]:
    before = anchor
    for place, (row, gate) in enumerate(zip(logits, gates, strict=True), start=1):
        if not np.isfinite(row).all():
            return
        columns = sampling.largest(row, codebooks.top_k)
        candidates = token_ids[columns]
        scores = row[columns] + codebooks.successors[candidates] @ (
            codebooks.predecessors[before] * gate
        )
        if not np.isfinite(scores).all():
            return
        before = sampling.among(scores, candidates, params, position + place)
        yield before


def _check(
    logits: FloatArray,
    token_ids: TokenIds,
    gates: FloatArray,
    codebooks: Codebooks,
    anchor: int,
) -> None:
    require_rank(_OP, "logits", logits, 2)
    require_rank(_OP, "predecessors", codebooks.predecessors, 2)
    num_places, num_columns = logits.shape
    num_tokens, rank = codebooks.predecessors.shape
    require_shape(_OP, "token_ids", token_ids, (num_columns,))
    require_shape(_OP, "gates", gates, (num_places, rank))
    require_shape(_OP, "successors", codebooks.successors, (num_tokens, rank))
    require_same_dtype(_OP, logits, gates, codebooks.predecessors, codebooks.successors)
    if not 1 <= codebooks.top_k <= num_columns:
        fail(_OP, f"{codebooks.top_k} candidates of {num_columns} columns")
    if not 0 <= anchor < num_tokens or not 0 <= token_ids.min() <= token_ids.max() < num_tokens:
        fail(_OP, f"a token id is outside [0, {num_tokens})")
