"""paged_attention_decode: attention of up to 32 columns a row over pages, keys split in units.

    y[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) v[j], firsts[t] <= j <= ordinals[t], keys and
              values of head h * Hk // H of the row that column t lies in; without firsts, all are 0
    with a gate: y[t, h] * sigmoid(gate[t, h])

Shapes     q [T, H, S], H % Hk == 0, H / Hk <= 16; pages as in kv_pages; page_tables [R, P];
           row_starts [R + 1], a row has at most `columns_per_row` columns; ordinals and firsts [T];
           gate: the projection [T, 2 * H * D + 2 * Hk * D]; y [T, H * D]; D of kv_pages.HEAD_DIMS,
           S = stored_dim(D), zeros in q and pages behind a head's D numbers
Dtypes     q, gate and y bf16; indices int32; scores and sums f32, probabilities (times the scale of
           8-bit values) bf16 in products, y rounded once
Units      scale usually D ** -0.5
           ordinals and firsts in tokens: the last and the first key that a column sees, wherever
           it stands itself; a negative first counts as 0
Effects    writes every element of y; zeros for a column that sees no key (a negative ordinal, or
           firsts[t] > ordinals[t]). Of a row, reads only the places from the least first to the
           greatest ordinal of the columns that see a key, and their pages' table entries: others
           may hold anything
Order      keys are cut at positions that depend on nothing else (`unit_count`), and units are
           joined in an order of their number: a column's bits depend neither on T nor on the other
           columns
Workspace  f32 of `workspace_size` elements for heads of S, aligned to 16 bytes, any content
Errors     OpContractError for a shape, dtype, stride or alignment outside the above, and for a
           chained launch with firsts
Tolerance  BF16_ATTENTION
Source     Dao et al. 2023, Flash-Decoding; the definition is paged_attention's
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray, IntArray
from ninfer.contract.units import PAGE_TOKENS
from ninfer.kernels.device_array import DeviceArray, DeviceView, view_of
from ninfer.kernels.library import DeviceLimits, KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.kv_pages import HEAD_DIMS, KvPages, KvPagesView, stored_dim, view_pages

_OP: Final = "paged_attention_decode"
_INTERVAL: Final = "paged_attention_interval"

MAX_COLUMNS: Final = 32
"""Most columns of a row."""
MAX_GROUP: Final = 16
MAX_ROWS: Final = 1024
FINE_TOKENS: Final = 64
FINE_UNITS: Final = 32
UNIT_TOKENS: Final = 256
_FINE_END: Final = FINE_TOKENS * FINE_UNITS
_THREADS: Final = 128
_TILE_QUERIES: Final = (8, 16, 32)
_SCORE_PITCH: Final = UNIT_TOKENS + 16
_MAX_STAGES: Final = 8
_BLOCK_RESERVE_BYTES: Final = 1024
_COMBINE_THREADS: Final = 256
_COMBINE_DIMS: Final = 64
_LOG2_E: Final = log2(np.e)
_PARAMS: Final = np.dtype(
    [
        ("q", "<u8"), ("pages", "<u8"), ("scales", "<u8"), ("page_tables", "<u8"),
        ("row_starts", "<u8"), ("ordinals", "<u8"), ("outputs", "<u8"), ("sums", "<u8"),
        ("rows", "<i4"), ("heads", "<i4"), ("kv_heads", "<i4"), ("group", "<i4"),
        ("max_pages", "<i4"), ("max_units", "<i4"), ("row_blocks", "<i4"), ("stages", "<i4"),
        ("scale_log2e", "<f4"), ("padding", "<i4"), ("firsts", "<u8"),
    ]
)  # fmt: skip
_COMBINE_PARAMS: Final = np.dtype(
    [
        ("outputs", "<u8"), ("sums", "<u8"), ("ordinals", "<u8"), ("gate", "<u8"), ("y", "<u8"),
        ("heads", "<i4"), ("max_units", "<i4"), ("gate_stride", "<i4"), ("y_stride", "<i4"),
        ("firsts", "<u8"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How a launch uses a multiprocessor; changes nothing of the result.

    tile_queries   queries (columns x heads of a group) that share one pass over the keys: 8, 16, 32
    """

    tile_queries: int
    stages: int
    shared_bytes: int


def reference(
    q: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    *,
    firsts: IntArray,
    ordinals: IntArray,
    scale: float,
) -> FloatArray:
    """y [T, H, D] of one row's columns q [T, H, D] over its keys and values [L, Hk, D], finite.

    ordinals < L; in the dtype that it is given.
    """
    tokens, heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    grouped = (q * scale).reshape(tokens, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores: FloatArray = grouped @ keys.transpose(1, 2, 0)[:, None]
    ordinal = np.arange(length)
    scores[..., (ordinal < firsts[:, None]) | (ordinal > ordinals[:, None])] = -np.inf
    least = np.finfo(scores.dtype).min
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=least))
    sums = weights.sum(axis=-1, keepdims=True)
    y: FloatArray = weights @ values.transpose(1, 0, 2)[:, None] / np.where(sums > 0.0, sums, 1.0)
    return y.transpose(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def unit_count(length: int) -> int:
    """Units that hold the first `length` keys: 32 of 64 keys, then units of 256."""
    if length <= _FINE_END:
        return -(-length // FINE_TOKENS)
    return FINE_UNITS - (_FINE_END - length) // UNIT_TOKENS


def workspace_size(tokens: int, num_heads: int, head_dim: int, max_pages: int) -> int:
    """Elements (f32) for T columns whose page tables have `max_pages` entries."""
    return tokens * num_heads * unit_count(max_pages * PAGE_TOKENS) * (head_dim + 2)


def decode_shape(pages: KvPagesView, tile_queries: int, stages: int, rows: int) -> DecodeShape:
    """With the shared memory that a launch over so many rows needs."""
    query_bytes = 2 * pages.head_dim + 4 * _SCORE_PITCH + 8
    fixed_bytes = tile_queries * query_bytes + 4 * (3 * rows + 1)
    return DecodeShape(tile_queries, stages, fixed_bytes + stages * _stage_bytes(pages))


def _stage_bytes(pages: KvPagesView) -> int:
    return PAGE_TOKENS * pages.row_bytes + pages.scale_bytes


def shape_decode(pages: KvPagesView, queries: int, rows: int, limits: DeviceLimits) -> DecodeShape:
    """Two blocks a multiprocessor with three stages each, else one with what fits."""
    stage_bytes = _stage_bytes(pages)
    wanted = next((count for count in _TILE_QUERIES if count >= queries), _TILE_QUERIES[-1])
    candidates = [count for count in reversed(_TILE_QUERIES) if count <= wanted]
    for tile, (resident, least) in itertools.product(candidates, ((2, 3), (1, 2))):
        share = limits.shared_bytes_per_multiprocessor // resident - _BLOCK_RESERVE_BYTES
        budget = min(limits.shared_bytes_per_block, share)
        budget -= decode_shape(pages, tile, 0, rows).shared_bytes
        stages = min(_MAX_STAGES, budget // stage_bytes)
        if stages >= least:
            return decode_shape(pages, tile, stages, rows)
    return fail(_OP, f"two pages of {stage_bytes} bytes do not fit a block of {limits.name}")


def launch(
    kernels: KernelLibrary,
    q: DeviceArray,
    kv: KvPages,
    y: DeviceArray,
    *,
    page_tables: DeviceArray,
    row_starts: DeviceArray,
    ordinals: DeviceArray,
    workspace: DeviceArray,
    scale: float,
    columns_per_row: int,
    stream: int,
    firsts: DeviceArray | None = None,
    gate: DeviceArray | None = None,
    is_chained: bool = False,
    shape: DecodeShape | None = None,
) -> None:
    """Queue y on `stream`, two kernels; returns before they have run.

    firsts       the first key that each column sees; the bits of y are those without them where
                 all are 0. Never of a chained launch: the kernel ahead may have written any key
                 from the first on. The second kernel follows the first chained nevertheless
    gate         the projection that q came from, when each query head is followed by its gate
    is_chained   may start while the kernel ahead of it in the stream still runs: that kernel, and
                 all that it did not wait for itself, may write q, the gate and the keys and values
                 of these columns, but no earlier ones, nor rows, ordinals or page tables
    shape        for measurements; by default what shape_decode says
    """
    if firsts is not None and is_chained:
        fail(_OP, "a launch with firsts reads keys of the kernel ahead: it must not be chained")
    pages = view_pages(_OP, kv)
    tokens, heads = _check_queries(q, pages)
    group = heads // pages.num_kv_heads
    tables = view_of(_OP, "page_tables", page_tables, "int32", 2)
    rows, max_pages = tables.shape
    if not 1 <= rows <= MAX_ROWS or max_pages < 1 or not 1 <= columns_per_row <= MAX_COLUMNS:
        fail(_OP, f"{rows} rows of up to {columns_per_row} columns and {max_pages} pages")
    max_units = unit_count(max_pages * PAGE_TOKENS)
    used = shape or shape_decode(pages, columns_per_row * group, rows, kernels.limits)
    needed = decode_shape(pages, used.tile_queries, used.stages, rows)
    if used.tile_queries not in _TILE_QUERIES or used.shared_bytes < needed.shared_bytes:
        fail(_OP, f"{used} for {rows} rows, which needs {needed.shared_bytes} shared bytes")
    params = np.zeros((), _PARAMS)
    params["q"] = view_of(_OP, "q", q, "uint16", 3).address
    params["pages"], params["scales"] = pages.address, pages.scales_address
    params["page_tables"], params["max_pages"] = tables.address, tables.row_stride
    params["row_starts"] = require_view(_OP, "row_starts", row_starts, "int32", (rows + 1,)).address
    params["ordinals"] = require_view(_OP, "ordinals", ordinals, "int32", (tokens,)).address
    if firsts is not None:
        params["firsts"] = require_view(_OP, "firsts", firsts, "int32", (tokens,)).address
    params["outputs"], params["sums"] = _split_workspace(
        workspace, tokens * heads * max_units, pages.head_dim
    )
    params["rows"], params["heads"], params["kv_heads"] = rows, heads, pages.num_kv_heads
    params["group"], params["max_units"], params["stages"] = group, max_units, used.stages
    row_blocks = -(-columns_per_row * group // used.tile_queries)
    params["row_blocks"], params["scale_log2e"] = row_blocks, scale * _LOG2_E
    combine, head_dim = _combine_params(params, pages, tokens, y, gate)
    family = _OP if firsts is None else _INTERVAL
    entry = f"{family}_{pages.format}_{pages.head_dim}_{used.tile_queries}"
    function = kernels.function(family, entry)
    function.reserve_shared(kernels.limits.shared_bytes_per_block)
    resident = max(1, function.resident_blocks(_THREADS, used.shared_bytes))
    items = rows * max_units * pages.num_kv_heads * row_blocks
    function.launch(
        (min(items, resident * kernels.limits.num_multiprocessors), 1, 1), (_THREADS, 1, 1), params,
        stream=stream, shared_bytes=used.shared_bytes, programmatic=is_chained,
    )  # fmt: skip
    combination = "paged_attention_combine" if firsts is None else f"{_INTERVAL}_combine"
    kernels.function(family, f"{combination}_{head_dim}").launch(
        (tokens * heads, pages.head_dim // _COMBINE_DIMS, 1), (_COMBINE_THREADS, 1, 1), combine,
        stream=stream, programmatic=is_chained or firsts is not None,
    )  # fmt: skip


def _check_queries(q: DeviceArray, pages: KvPagesView) -> tuple[int, int]:
    shape = view_of(_OP, "q", q, "uint16", 3).shape
    tokens, heads, head_dim = shape
    if tokens < 1 or head_dim != pages.head_dim or heads < 1 or heads % pages.num_kv_heads:
        fail(_OP, f"q has shape {shape} for {pages.num_kv_heads} heads x {pages.head_dim}")
    if heads // pages.num_kv_heads > MAX_GROUP:
        fail(_OP, f"{heads} query heads of {pages.num_kv_heads}: more than {MAX_GROUP} each")
    require_view(_OP, "q", q, "uint16", shape, alignment_bytes=16)
    return tokens, heads


def _split_workspace(workspace: DeviceArray, slots: int, head_dim: int) -> tuple[int, int]:
    """Addresses of the units' outputs, then of their sums."""
    view = view_of(_OP, "workspace", workspace, "float32", 1)
    size = slots * (head_dim + 2)
    if view.shape[0] < size or view.address % 16:
        fail(_OP, f"workspace holds {view.shape[0]} elements, expected {size}, aligned to 16")
    return view.address, view.address + slots * head_dim * 4


def _combine_params(
    params: NDArray[np.void],
    pages: KvPagesView,
    tokens: int,
    y: DeviceArray,
    gate: DeviceArray | None,
) -> tuple[NDArray[np.void], int]:
    """The combination's struct, and the D of its entry."""
    heads = int(params["heads"])
    combine = np.zeros((), _COMBINE_PARAMS)
    for name in ("outputs", "sums", "ordinals", "firsts", "heads", "max_units"):
        combine[name] = params[name]
    view, head_dim = view_output(_OP, y, pages, tokens, heads)
    combine["y"], combine["y_stride"] = view.address, view.row_stride
    if gate is not None:
        width = 2 * (heads + pages.num_kv_heads) * head_dim
        combine["gate"], combine["gate_stride"] = view_gate(_OP, gate, tokens, width)
    return combine, head_dim


def view_output(
    op: str, y: DeviceArray, pages: KvPagesView, tokens: int, heads: int
) -> tuple[DeviceView, int]:
    """y [T, H * D] and the D that it shows. Raises OpContractError."""
    width = view_of(op, "y", y, "uint16", 2).shape[1]
    head_dim = next((dim for dim in HEAD_DIMS if heads * dim == width), 0)
    if not head_dim or stored_dim(head_dim) != pages.head_dim:
        fail(op, f"y has {width} columns for {heads} heads stored as {pages.head_dim}")
    view = require_view(
        op, "y", y, "uint16", (tokens, width), alignment_bytes=16, allows_row_stride=True
    )
    return view, head_dim


def view_gate(op: str, gate: DeviceArray, tokens: int, width: int) -> tuple[int, int]:
    """Address and row stride of a projection [T, width] with gates. Raises OpContractError."""
    view = view_of(op, "gate", gate, "uint16", 2)
    if view.shape != (tokens, width):
        fail(op, f"gate has shape {view.shape}, expected the projection {(tokens, width)}")
    require_alignment(op, "gate", view, "uint16", 16)
    return view.address, view.row_stride
