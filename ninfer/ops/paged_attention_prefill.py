"""paged_attention_prefill: causal attention of many columns of one sequence over its pages.

    y[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) v[j], j <= ordinals[t], keys and values of
              head h * Hk // H
    with a gate: y[t, h] * sigmoid(gate[t, h])

Shapes     q [T, H, S], H % Hk == 0; pages as in kv_pages; page_table [P] of the sequence;
           ordinals [T]; gate: the projection [T, 2 * H * D + 2 * Hk * D]; y [T, H * D]; D of
           kv_pages.HEAD_DIMS, S = stored_dim(D), zeros in q and pages behind a head's D numbers
Dtypes     q, gate and y bf16; indices int32; scores and sums f32, probabilities bf16 in products,
           8-bit keys and values scaled and rounded to bf16, y rounded once
Units      scale usually D ** -0.5
Effects    writes every element of y; zeros for a column with a negative ordinal. Reads the places
           of the sequence's keys only: others may hold anything. Equal launches give equal bits
Workspace  none
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  BF16_ATTENTION
Source     Dao 2023 (arXiv:2307.08691); the definition is paged_attention's
"""

from __future__ import annotations

from math import log2
from typing import Final

import numpy as np

from ninfer.contract.units import PAGE_TOKENS
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import DeviceLimits, KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.kv_pages import KvPages, KvPagesView, view_pages
from ninfer.ops.paged_attention_decode import view_gate, view_output

_OP: Final = "paged_attention_prefill"

_TILE_QUERIES: Final = (128, 64)
_THREADS_PER_QUERY: Final = 2
_STATIC_SHARED_BYTES: Final = 64
_LOG2_E: Final = log2(np.e)
_PARAMS: Final = np.dtype(
    [
        ("q", "<u8"), ("pages", "<u8"), ("scales", "<u8"), ("page_table", "<u8"),
        ("ordinals", "<u8"), ("gate", "<u8"), ("y", "<u8"), ("tokens", "<i4"), ("heads", "<i4"),
        ("kv_heads", "<i4"), ("group", "<i4"), ("gate_stride", "<i4"), ("y_stride", "<i4"),
        ("scale_log2e", "<f4"), ("padding", "<i4"),
    ]
)  # fmt: skip


def launch(
    kernels: KernelLibrary,
    q: DeviceArray,
    kv: KvPages,
    y: DeviceArray,
    *,
    page_table: DeviceArray,
    ordinals: DeviceArray,
    scale: float,
    stream: int,
    gate: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    gate         the projection that q came from, when each query head is followed by its gate
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    pages = view_pages(_OP, kv)
    queries = view_of(_OP, "q", q, "uint16", 3)
    tokens, heads, width = queries.shape
    if tokens < 1 or width != pages.head_dim or heads < 1 or heads % pages.num_kv_heads:
        fail(_OP, f"q has shape {queries.shape} for {pages.num_kv_heads} heads x {pages.head_dim}")
    group = heads // pages.num_kv_heads
    table = view_of(_OP, "page_table", page_table, "int32", 1)
    params = np.zeros((), _PARAMS)
    params["q"] = require_view(_OP, "q", q, "uint16", queries.shape, alignment_bytes=16).address
    params["pages"], params["scales"] = pages.address, pages.scales_address
    params["page_table"] = table.address
    params["ordinals"] = require_view(_OP, "ordinals", ordinals, "int32", (tokens,)).address
    output, head_dim = view_output(_OP, y, pages, tokens, heads)
    params["y"], params["y_stride"] = output.address, output.row_stride
    if gate is not None:
        width = 2 * (heads + pages.num_kv_heads) * head_dim
        params["gate"], params["gate_stride"] = view_gate(_OP, gate, tokens, width)
    params["tokens"], params["heads"], params["kv_heads"] = tokens, heads, pages.num_kv_heads
    params["group"], params["scale_log2e"] = group, scale * _LOG2_E
    tile, shared_bytes = _shape_tile(pages, kernels.limits)
    function = kernels.function(_OP, f"{_OP}_{pages.format}_{head_dim}_{tile}")
    function.reserve_shared(shared_bytes)
    blocks = -(-tokens * group // tile) * pages.num_kv_heads
    function.launch(
        (blocks, 1, 1), (_THREADS_PER_QUERY * tile, 1, 1), params,
        stream=stream, shared_bytes=shared_bytes, programmatic=is_chained,
    )  # fmt: skip


def _shape_tile(pages: KvPagesView, limits: DeviceLimits) -> tuple[int, int]:
    """Queries of a block and its shared memory: the larger tile that fits."""
    for tile in _TILE_QUERIES if pages.head_dim == 256 else _TILE_QUERIES[:1]:
        numbers = (tile + 2 * PAGE_TOKENS) * pages.head_dim
        shared_bytes = 2 * numbers + 2 * pages.scale_bytes
        if shared_bytes + _STATIC_SHARED_BYTES <= limits.shared_bytes_per_block:
            return tile, shared_bytes
    return fail(
        _OP, f"64 queries of {pages.head_dim} do not fit the shared memory of {limits.name}"
    )
