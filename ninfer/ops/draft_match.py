"""draft_match: how many drafts of each row are right, and what the draft model is to read next.

A unit has R rows of T columns, column j of row b at b T + j. Columns 0 .. n of a row are real,
n = counts[b] - 1: its newest token, then n drafts.

    A = the first j with j == n or chosen[j] != token_ids[j + 1];
        max(j - 1, 0) where a column j before has no choice (chosen < 0, or not finite)

The draft model reads pairs of a token and the target's output in front of it, at the token's own
ordinal: R rows of T + 1 columns, of which 0 .. A + 1 are real, E = ordinals[b T]:

    column   token            source               ordinal
    0        token_ids[b T]   -1 - read_slots[b]   E          (what a StateImage keeps)
    j        chosen[j - 1]    b T + j - 1          E + j      (a row of the unit's output)

Shapes     MatchInputs, MatchOutputs; R >= 1, 1 <= T <= MAX_COLUMNS
Dtypes     int32; rows of the sampler uint8 [n * device_sampling.ROW.itemsize]
Units      row_ends is for gdn_fold, kept_columns for copy_rows. Columns of padding, and those at
           ordinals from limits[b] on, have ordinal -1, token 0 and source 0; so has every column of
           a row with E < 0. A choice that is none is token 0. rope_positions go on from those of
           the row's column 0 by 1 a column. `chain` is as of the last real column
Effects    writes every element of the outputs, which overlap no input. A sampler's row is that of
           the row's column 0, at position E + A + 2, without log probabilities, mask, lists and
           penalties
Errors     OpContractError for a shape, dtype or alignment outside the above
Tolerance  EXACT
Source     docs/speculation.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.device_sampling import ROW, plain_rows
from ninfer.ops.draft_step import DraftChain

_OP: Final = "draft_match"
Array_co = TypeVar("Array_co", covariant=True)

MAX_COLUMNS: Final = 31
"""Most columns of a row: with the one behind them, a lane each."""
_PARAMS: Final = np.dtype(
    [
        ("token_ids", "<u8"), ("counts", "<u8"), ("ordinals", "<u8"), ("rope_positions", "<u8"),
        ("read_slots", "<u8"), ("limits", "<u8"), ("rows", "<u8"), ("chosen", "<u8"),
        ("is_finite", "<u8"), ("accepted", "<u8"), ("row_ends", "<u8"), ("kept_columns", "<u8"),
        ("pair_token_ids", "<u8"), ("pair_sources", "<u8"), ("pair_ordinals", "<u8"),
        ("pair_rope_positions", "<u8"), ("pair_column_rows", "<u8"), ("pair_row_starts", "<u8"),
        ("last_columns", "<u8"), ("chain_ordinals", "<u8"), ("chain_rope_positions", "<u8"),
        ("chain_rows", "<u8"), ("num_rows", "<i4"), ("columns", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class MatchInputs(Generic[Array_co]):
    """What the unit read and what was chosen behind its columns.

    token_ids, ordinals, chosen, is_finite [R * T], rope_positions [3, R * T], rows of the sampler
    [R * T]; counts, read_slots and limits [R]: ordinals from limits[b] on have no page
    """

    token_ids: Array_co
    counts: Array_co
    ordinals: Array_co
    rope_positions: Array_co
    read_slots: Array_co
    limits: Array_co
    rows: Array_co
    chosen: Array_co
    is_finite: Array_co


@dataclass(frozen=True, slots=True, eq=False)
class PairColumns(Generic[Array_co]):
    """The columns of the draft model's pass.

    token_ids, sources, ordinals, column_rows [R * (T + 1)], rope_positions [3, R * (T + 1)],
    row_starts [R + 1], last_columns [R]: the last real column of each row
    """

    token_ids: Array_co
    sources: Array_co
    ordinals: Array_co
    rope_positions: Array_co
    column_rows: Array_co
    row_starts: Array_co
    last_columns: Array_co


@dataclass(frozen=True, slots=True, eq=False)
class MatchOutputs(Generic[Array_co]):
    """accepted (A), row_ends (b T + A + 1) and kept_columns (b T + A) [R]."""

    accepted: Array_co
    row_ends: Array_co
    kept_columns: Array_co
    pairs: PairColumns[Array_co]
    chain: DraftChain[Array_co]


def reference(inputs: MatchInputs[NDArray[Any]]) -> MatchOutputs[NDArray[Any]]:
    """The outputs as new arrays."""
    num_rows = inputs.counts.size
    columns = inputs.token_ids.size // num_rows
    firsts = np.arange(num_rows) * columns
    accepted = np.array([_num_right(inputs, row, columns) for row in range(num_rows)], np.int32)
    starts, limits = inputs.ordinals[firsts], inputs.limits
    behind = np.arange(columns + 1)
    ordinals = starts[:, None] + behind
    is_real = (behind <= accepted[:, None] + 1) & (ordinals < limits[:, None])
    is_real &= starts[:, None] >= 0
    tokens = np.empty((num_rows, columns + 1), np.int32)
    tokens[:, 0] = inputs.token_ids[firsts]
    tokens[:, 1:] = np.maximum(inputs.chosen, 0).reshape(num_rows, columns)
    sources = firsts[:, None] + behind - 1
    sources[:, 0] = -1 - inputs.read_slots
    positions = inputs.rope_positions[:, firsts]
    pairs: PairColumns[NDArray[Any]] = PairColumns(
        token_ids=_flat(np.where(is_real, tokens, 0)),
        sources=_flat(np.where(is_real, sources, 0)),
        ordinals=_flat(np.where(is_real, ordinals, -1)),
        rope_positions=_flat(positions[:, :, None] + behind).reshape(3, -1),
        column_rows=np.repeat(np.arange(num_rows, dtype=np.int32), columns + 1),
        row_starts=(np.arange(num_rows + 1) * (columns + 1)).astype(np.int32),
        last_columns=(firsts + np.arange(num_rows) + accepted + 1).astype(np.int32),
    )
    chain: DraftChain[NDArray[Any]] = DraftChain(
        ordinals=pairs.ordinals[pairs.last_columns],
        rope_positions=positions + accepted + 1,
        rows=plain_rows(inputs.rows.view(ROW)[firsts], starts + accepted + 2).view(np.uint8),
    )
    kept = (firsts + accepted).astype(np.int32)
    return MatchOutputs(accepted, kept + 1, kept, pairs, chain)


def _num_right(inputs: MatchInputs[NDArray[Any]], row: int, columns: int) -> int:
    first, drafts = row * columns, int(inputs.counts[row]) - 1
    for column in range(drafts + 1):
        chosen = inputs.chosen[first + column]
        if chosen < 0 or not inputs.is_finite[first + column]:
            return max(column - 1, 0)
        if column < drafts and chosen != inputs.token_ids[first + column + 1]:
            return column
    return drafts


def _flat(values: NDArray[Any]) -> IntArray:
    return values.astype(np.int32).reshape(-1)


def launch(
    kernels: KernelLibrary,
    inputs: MatchInputs[DeviceArray],
    outputs: MatchOutputs[DeviceArray],
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the match on `stream`; returns before it has run.

    Some launches read ordinals and row_starts of theirs before they wait for the kernel ahead
    (paged_attention_decode): between this and the first of those, one launch must not be chained.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    (num_rows,) = view_of(_OP, "counts", inputs.counts, "int32", 1).shape
    (num_columns,) = view_of(_OP, "token_ids", inputs.token_ids, "int32", 1).shape
    if num_rows < 1 or num_columns % num_rows:
        fail(_OP, f"{num_columns} columns of {num_rows} rows")
    columns = num_columns // num_rows
    if not 1 <= columns <= MAX_COLUMNS:
        fail(_OP, f"{columns} columns a row, expected 1 to {MAX_COLUMNS}")
    params = np.zeros((), _PARAMS)
    params["num_rows"], params["columns"] = num_rows, columns
    row_bytes = ROW.itemsize
    for name, array, shape in (
        ("token_ids", inputs.token_ids, (num_columns,)),
        ("counts", inputs.counts, (num_rows,)),
        ("ordinals", inputs.ordinals, (num_columns,)),
        ("rope_positions", inputs.rope_positions, (3, num_columns)),
        ("read_slots", inputs.read_slots, (num_rows,)),
        ("limits", inputs.limits, (num_rows,)),
        ("chosen", inputs.chosen, (num_columns,)),
        ("is_finite", inputs.is_finite, (num_columns,)),
        ("accepted", outputs.accepted, (num_rows,)),
        ("row_ends", outputs.row_ends, (num_rows,)),
        ("kept_columns", outputs.kept_columns, (num_rows,)),
        ("pair_token_ids", outputs.pairs.token_ids, (num_columns + num_rows,)),
        ("pair_sources", outputs.pairs.sources, (num_columns + num_rows,)),
        ("pair_ordinals", outputs.pairs.ordinals, (num_columns + num_rows,)),
        ("pair_rope_positions", outputs.pairs.rope_positions, (3, num_columns + num_rows)),
        ("pair_column_rows", outputs.pairs.column_rows, (num_columns + num_rows,)),
        ("pair_row_starts", outputs.pairs.row_starts, (num_rows + 1,)),
        ("last_columns", outputs.pairs.last_columns, (num_rows,)),
        ("chain_ordinals", outputs.chain.ordinals, (num_rows,)),
        ("chain_rope_positions", outputs.chain.rope_positions, (3, num_rows)),
    ):
        params[name] = require_view(_OP, name, array, "int32", shape).address
    for name, array, count in (
        ("rows", inputs.rows, num_columns),
        ("chain_rows", outputs.chain.rows, num_rows),
    ):
        params[name] = require_view(
            _OP, name, array, "uint8", (count * row_bytes,), alignment_bytes=8
        ).address
    kernels.function("draft_rounds", "draft_match").launch(
        (num_rows, 1, 1), (32, 1, 1), params, stream=stream, programmatic=is_chained
    )
