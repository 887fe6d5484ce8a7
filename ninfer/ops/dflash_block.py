"""dflash_block: the inputs of a block of guesses, from where a draft model stands.

A block has R rows of W columns, column i of row b at b W + i: the newest token at ordinal
E = ordinals[b], then masks, whose outputs are guesses of the tokens there.

    n = 0 where E < 0 or a rotary position is not E;
        else min(proposed[b], W - 1, limits[b] - E - 1), at least 0

Columns 0 .. n are real when n > 0; all others are padding. In layers of a kind (window, is_causal)
column i sees the keys first .. last:

    first = max(0, E + i - window + 1), or 0
    last  = E + i if causal, else min(E + n, E + i + window - 1), or E + n

Shapes     BlockInputs, BlockColumns; R >= 1, 2 <= W <= MAX_COLUMNS, 1 to MAX_KINDS kinds
Dtypes     int32; rows of the sampler uint8 [R * device_sampling.ROW.itemsize], [R * W * ..]
Units      padding has the newest token (0 for none), ordinal -1, first 0 and last -1.
           rope_positions are max(E, 0) + i. A sampler's row is the chain's at position
           (of the chain's row) + i - 1, without lists, mask and penalties; with num_candidates
           greedy, listing so many, else without log probabilities
Effects    writes every element of the outputs, which overlap no input
Errors     OpContractError for a shape, dtype, alignment or rule outside the above
Tolerance  EXACT
Source     DFlash, its authors' reference model; docs/dflash.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import BoolArray, ByteArray, IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.device_sampling import MAX_TOP, ROW, plain_rows
from ninfer.ops.draft_step import DraftChain

_OP: Final = "dflash_block"
Array_co = TypeVar("Array_co", covariant=True)
LayerKind: TypeAlias = tuple[int | None, bool]
"""How layers see keys: (window in tokens or None, whether a block is causal)."""

MAX_COLUMNS: Final = 64
MAX_KINDS: Final = 4
_THREADS: Final = 128
_WIDEST: Final = 1 << 30
"""A window of this many tokens is none."""
_PARAMS: Final = np.dtype(
    [
        ("chain_ordinals", "<u8"), ("chain_rope_positions", "<u8"), ("chain_rows", "<u8"),
        ("newest_tokens", "<u8"), ("last_columns", "<u8"), ("proposed", "<u8"), ("limits", "<u8"),
        ("token_ids", "<u8"), ("ordinals", "<u8"), ("rope_positions", "<u8"),
        ("column_rows", "<u8"), ("row_starts", "<u8"), ("firsts", "<u8"), ("lasts", "<u8"),
        ("rows", "<u8"), ("num_rows", "<i4"), ("columns", "<i4"), ("mask_token_id", "<i4"),
        ("num_candidates", "<i4"), ("num_kinds", "<i4"), ("windows", "<i4", (MAX_KINDS,)),
        ("is_causal", "<i4", (MAX_KINDS,)), ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockRules:
    """What all blocks of a draft model share.

    kinds            of its layers
    num_candidates   tokens that a selector chooses from; 0: each column's token is drawn
    """

    mask_token_id: int
    kinds: tuple[LayerKind, ...]
    num_candidates: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BlockInputs(Generic[Array_co]):
    """Where the rows stand.

    chain of R rows: of the newest token; its rows choose the token behind it. token_ids [P], of
    which row b's newest is at last_columns[b] [R] (draft_match's pairs); proposed [R] guesses asked
    for; limits [R]: ordinals from limits[b] on have no page
    """

    chain: DraftChain[Array_co]
    token_ids: Array_co
    last_columns: Array_co
    proposed: Array_co
    limits: Array_co


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns(Generic[Array_co]):
    """token_ids, ordinals, column_rows [R * W], rope_positions [3, R * W], row_starts [R + 1],
    firsts and lasts [kinds, R * W], rows of the sampler [R * W]."""

    token_ids: Array_co
    ordinals: Array_co
    rope_positions: Array_co
    column_rows: Array_co
    row_starts: Array_co
    firsts: Array_co
    lasts: Array_co
    rows: Array_co


def reference(
    inputs: BlockInputs[NDArray[Any]], rules: BlockRules, *, columns: int
) -> BlockColumns[NDArray[Any]]:
    """The columns as new arrays."""
    _check_rules(rules, columns)
    starts = inputs.chain.ordinals
    num_rows, places = starts.size, np.arange(columns)
    guesses = _num_guesses(inputs, columns)
    is_real = (places <= guesses[:, None]) & (guesses[:, None] > 0)
    newest = np.maximum(inputs.token_ids[inputs.last_columns], 0)
    ordinals = starts[:, None] + places
    positions = _flat(np.maximum(starts, 0)[:, None] + places)
    keys = [_keys(kind, ordinals, starts + guesses, is_real) for kind in rules.kinds]
    return BlockColumns(
        token_ids=_flat(np.where(is_real & (places > 0), rules.mask_token_id, newest[:, None])),
        ordinals=_flat(np.where(is_real, ordinals, -1)),
        rope_positions=np.stack((positions, positions, positions)),
        column_rows=np.repeat(np.arange(num_rows, dtype=np.int32), columns),
        row_starts=(np.arange(num_rows + 1) * columns).astype(np.int32),
        firsts=np.stack([_flat(first) for first, _ in keys]),
        lasts=np.stack([_flat(last) for _, last in keys]),
        rows=_column_rows(inputs.chain.rows, rules, columns),
    )


def _num_guesses(inputs: BlockInputs[NDArray[Any]], columns: int) -> NDArray[Any]:
    starts = inputs.chain.ordinals
    room = np.minimum(np.minimum(inputs.proposed, columns - 1), inputs.limits - starts - 1)
    has_room = (starts >= 0) & (inputs.chain.rope_positions == starts).all(axis=0)
    guesses: NDArray[Any] = np.where(has_room, np.maximum(room, 0), 0)
    return guesses


def _keys(
    kind: LayerKind, ordinals: NDArray[Any], ends: NDArray[Any], is_real: BoolArray
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first and the last key of every column in layers of one kind."""
    window, is_causal = kind
    firsts = np.zeros_like(ordinals)
    lasts = ordinals if is_causal else np.broadcast_to(ends[:, None], ordinals.shape)
    if window is not None:
        firsts = np.maximum(ordinals - window + 1, 0)
        lasts = np.minimum(lasts, ordinals + window - 1)
    return np.where(is_real, firsts, 0), np.where(is_real, lasts, -1)


def _column_rows(chain_rows: ByteArray, rules: BlockRules, columns: int) -> NDArray[Any]:
    chain = chain_rows.view(ROW)
    positions = (chain["position"][:, None] + np.arange(columns) - 1).reshape(-1)
    rows = plain_rows(np.repeat(chain, columns), positions)
    if rules.num_candidates:
        rows["is_greedy"], rows["num_top"] = 1, rules.num_candidates
    return rows.view(np.uint8)


def _flat(values: NDArray[Any]) -> IntArray:
    return values.astype(np.int32).reshape(-1)


def _check_rules(rules: BlockRules, columns: int) -> None:
    if not 2 <= columns <= MAX_COLUMNS:
        fail(_OP, f"{columns} columns a row, expected 2 to {MAX_COLUMNS}")
    if not 1 <= len(rules.kinds) <= MAX_KINDS:
        fail(_OP, f"{len(rules.kinds)} kinds of layers, expected 1 to {MAX_KINDS}")
    for window, _ in rules.kinds:
        if window is not None and window < 1:
            fail(_OP, f"a window of {window} tokens")
    if rules.mask_token_id < 0 or not 0 <= rules.num_candidates <= MAX_TOP:
        fail(
            _OP, f"mask token {rules.mask_token_id}, {rules.num_candidates} of {MAX_TOP} candidates"
        )


def launch(
    kernels: KernelLibrary,
    inputs: BlockInputs[DeviceArray],
    outputs: BlockColumns[DeviceArray],
    rules: BlockRules,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the block on `stream`; returns before it has run.

    Some launches read ordinals and row_starts of theirs before they wait for the kernel ahead
    (paged_attention_decode): between this and the first of those, one launch must not be chained.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    (num_rows,) = view_of(_OP, "ordinals", inputs.chain.ordinals, "int32", 1).shape
    (num_columns,) = view_of(_OP, "token_ids", outputs.token_ids, "int32", 1).shape
    (num_tokens,) = view_of(_OP, "newest_tokens", inputs.token_ids, "int32", 1).shape
    if num_rows < 1 or num_columns % num_rows or num_tokens < 1:
        fail(_OP, f"{num_columns} columns of {num_rows} rows behind {num_tokens} tokens")
    _check_rules(rules, num_columns // num_rows)
    params = np.zeros((), _PARAMS)
    params["num_rows"], params["columns"] = num_rows, num_columns // num_rows
    _set_rules(params, rules)
    keys = (len(rules.kinds), num_columns)
    for name, array, shape in (
        ("chain_ordinals", inputs.chain.ordinals, (num_rows,)),
        ("chain_rope_positions", inputs.chain.rope_positions, (3, num_rows)),
        ("newest_tokens", inputs.token_ids, (num_tokens,)),
        ("last_columns", inputs.last_columns, (num_rows,)),
        ("proposed", inputs.proposed, (num_rows,)),
        ("limits", inputs.limits, (num_rows,)),
        ("token_ids", outputs.token_ids, (num_columns,)),
        ("ordinals", outputs.ordinals, (num_columns,)),
        ("rope_positions", outputs.rope_positions, (3, num_columns)),
        ("column_rows", outputs.column_rows, (num_columns,)),
        ("row_starts", outputs.row_starts, (num_rows + 1,)),
        ("firsts", outputs.firsts, keys),
        ("lasts", outputs.lasts, keys),
    ):
        params[name] = require_view(_OP, name, array, "int32", shape).address
    for name, array, count in (
        ("chain_rows", inputs.chain.rows, num_rows),
        ("rows", outputs.rows, num_columns),
    ):
        params[name] = require_view(
            _OP, name, array, "uint8", (count * ROW.itemsize,), alignment_bytes=8
        ).address
    kernels.function("dflash", "dflash_block").launch(
        (num_rows, 1, 1), (_THREADS, 1, 1), params, stream=stream, programmatic=is_chained
    )


def _set_rules(params: NDArray[np.void], rules: BlockRules) -> None:
    params["mask_token_id"], params["num_candidates"] = rules.mask_token_id, rules.num_candidates
    params["num_kinds"] = len(rules.kinds)
    for index, (window, is_causal) in enumerate(rules.kinds):
        params["windows"][index] = 0 if window is None else min(window, _WIDEST)
        params["is_causal"][index] = is_causal
