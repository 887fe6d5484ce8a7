"""dflash_selector: of the best tokens of each place in a block, the one that follows the chosen
one before it best.

    candidates of place i: the K tokens with the largest logits, best first, ties to the earlier row
    score_i[c] = logit_i[c] + sum_r predecessors[a_(i-1), r] * gates[i, r] * successors[token_c, r]
    a_i = sampling.among(score_i, tokens_i);   a_0 = the anchor

Shapes     logits [T, Vd] of places 1 .. T, token_ids [Vd] the token of each column, gates [T, R];
           predecessors and successors [V, R] -> T token ids; 1 <= K <= Vd
           launch: SelectorInputs, DeviceCodebooks; 2 <= W <= MAX_COLUMNS of dflash_block,
           K <= MAX_TOP, R <= 1024, R % 8 == 0 -> proposals [B, P]
Dtypes     logits, gates and codebooks the same floating dtype; token_ids integer
           launch: bf16; log probabilities f32, their sums with f32 sums of exact products; indices
           int32; rows of the sampler uint8 [B * device_sampling.ROW.itemsize]
Units      position: cache ordinal of the anchor; place i is drawn with the noise of position + i;
           launch: a row's position is that of place 1. Log probabilities stand for logits: they
           differ by a number a place, which no choice sees
Effects    none; greedy ties go to the better candidate; ends before a place whose scores are not
           finite. launch writes every element of proposals, -1 from the place on where the walk
           ends: padding, logits or scores that are not finite, an id outside [0, V), column W
Errors     OpContractError for a shape, dtype or token id outside the above; launch: for a shape,
           dtype, stride or alignment
Tolerance  EXACT; launch: but for scores that differ by roundings of f32
Source     DFlash2, its authors' reference model; config keys selector_rank, selector_top_k
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.sampling import SamplingParams
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import sampling
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape
from ninfer.ops.device_checks import require_view
from ninfer.ops.device_sampling import MAX_TOP, ROW
from ninfer.ops.dflash_block import MAX_COLUMNS

_OP: Final = "dflash_selector"

MAX_RANK: Final = 1024
_PARAMS: Final = np.dtype(
    [
        ("top_ids", "<u8"), ("top_logprobs", "<u8"), ("is_finite", "<u8"), ("gates", "<u8"),
        ("predecessors", "<u8"), ("successors", "<u8"), ("token_ids", "<u8"), ("ordinals", "<u8"),
        ("rows", "<u8"), ("proposals", "<u8"), ("columns", "<i4"), ("candidates", "<i4"),
        ("rank", "<i4"), ("gate_stride", "<i4"), ("num_ids", "<i4"), ("num_proposals", "<i4"),
    ]
)  # fmt: skip
TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Codebooks:
    """predecessors and successors [V, R]; top_k candidates of a place."""

    predecessors: FloatArray
    successors: FloatArray
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCodebooks:
    """predecessors and successors bf16 [V, R]; top_k candidates of a place."""

    predecessors: DeviceArray
    successors: DeviceArray
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class SelectorInputs:
    """A block of B rows of W columns, and what was found behind its columns.

    top_ids, top_logprobs [B * W, MAX_TOP] and is_finite [B * W] of the sampler, which listed top_k;
    gates [B * W, R], rows may have gaps; token_ids and ordinals [B * W] of the block: column 0 is
    the anchor; rows of the sampler [B]
    """

    top_ids: DeviceArray
    top_logprobs: DeviceArray
    is_finite: DeviceArray
    gates: DeviceArray
    token_ids: DeviceArray
    ordinals: DeviceArray
    rows: DeviceArray


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


def launch(
    kernels: KernelLibrary,
    inputs: SelectorInputs,
    codebooks: DeviceCodebooks,
    proposals: DeviceArray,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the walks on `stream`; returns before they have run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    num_rows, num_proposals = view_of(_OP, "proposals", proposals, "int32", 2).shape
    (num_columns,) = view_of(_OP, "token_ids", inputs.token_ids, "int32", 1).shape
    num_ids, rank = view_of(_OP, "predecessors", codebooks.predecessors, "uint16", 2).shape
    if num_rows < 1 or num_proposals < 1 or num_columns % num_rows:
        fail(_OP, f"{num_columns} columns of {num_rows} rows, {num_proposals} proposals each")
    columns = num_columns // num_rows
    if not 2 <= columns <= MAX_COLUMNS or not 1 <= codebooks.top_k <= MAX_TOP:
        fail(_OP, f"{codebooks.top_k} candidates in {columns} columns a row")
    if num_ids < 1 or not 8 <= rank <= MAX_RANK or rank % 8:
        fail(_OP, f"codebooks have shape {(num_ids, rank)}: needs a multiple of 8 to {MAX_RANK}")
    params = np.zeros((), _PARAMS)
    params["columns"], params["candidates"] = columns, codebooks.top_k
    params["rank"], params["num_ids"], params["num_proposals"] = rank, num_ids, num_proposals
    _set_inputs(params, inputs, num_rows, num_columns)
    for name, table in (
        ("predecessors", codebooks.predecessors),
        ("successors", codebooks.successors),
    ):
        params[name] = require_view(
            _OP, name, table, "uint16", (num_ids, rank), alignment_bytes=16
        ).address
    outputs = require_view(_OP, "proposals", proposals, "int32", (num_rows, num_proposals))
    params["proposals"] = outputs.address
    vectors = 1 if rank <= 256 else 2 if rank <= 512 else 4
    kernels.function("dflash_selector", f"dflash_selector_{vectors}").launch(
        (num_rows, 1, 1), (32 * codebooks.top_k, 1, 1), params,
        stream=stream, programmatic=is_chained,
    )  # fmt: skip


def _set_inputs(
    params: NDArray[np.void], inputs: SelectorInputs, num_rows: int, num_columns: int
) -> None:
    for name, array, dtype, shape in (
        ("top_ids", inputs.top_ids, "int32", (num_columns, MAX_TOP)),
        ("top_logprobs", inputs.top_logprobs, "float32", (num_columns, MAX_TOP)),
        ("is_finite", inputs.is_finite, "int32", (num_columns,)),
        ("token_ids", inputs.token_ids, "int32", (num_columns,)),
        ("ordinals", inputs.ordinals, "int32", (num_columns,)),
    ):
        params[name] = require_view(_OP, name, array, dtype, shape).address
    rows_bytes = (num_rows * ROW.itemsize,)
    rows = require_view(_OP, "rows", inputs.rows, "uint8", rows_bytes, alignment_bytes=8)
    params["rows"] = rows.address
    gates = require_view(
        _OP, "gates", inputs.gates, "uint16", (num_columns, int(params["rank"])),
        alignment_bytes=16, allows_row_stride=True,
    )  # fmt: skip
    params["gates"], params["gate_stride"] = gates.address, gates.row_stride
