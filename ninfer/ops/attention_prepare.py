"""attention_prepare: a projection's queries, keys and values made ready for attention.

    q = rotary(rms_norm(qkv's queries, q_norm));  k = rotary(rms_norm(qkv's keys, k_norm))
    q -> q [T, H, S];  k and value_scale * v -> the page of the column's row at the column's ordinal

Shapes     qkv [T, H * D + 2 * Hk * D], or with an output gate, D numbers behind each query head,
           [T, 2 * H * D + 2 * Hk * D], or of keys and values only, without q, [T, 2 * Hk * D];
           q_norm and k_norm [D]; rope_positions [3, T]; ordinals and column_rows [T]; page_tables
           [R, P]; rotary inverse and axes [half], 2 * half <= D; D of kv_pages.HEAD_DIMS;
           q [T, H, S] and pages as in kv_pages, S = stored_dim(D)
Dtypes     qkv, norms and q bf16; inverse f32; indices int32; sums, angles, cos and sin f32; q, and
           k and v before they are coded, rounded to bf16 once
Units      eps > 0; norm_offset added to the norm weights; rope_positions and ordinals in tokens;
           value_scale finite, 1 leaves every bit of the values
Effects    writes every element of q and one place of the pages for each column, zeros behind the D
           numbers of a head; a column depends on itself alone, bit for bit. A column with a
           negative ordinal is padding: its q is zero and no page is written. Columns lie at
           different places
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  ROTATED_BF16
Source     ops qk_norm, rotary, kv_write
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, DeviceView, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import rms_norm, rotary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.kv_pages import HEAD_DIMS, KvPages, KvPagesView, stored_dim, view_pages

_OP: Final = "attention_prepare"

_WARPS: Final = 8
_PARAMS: Final = np.dtype(
    [
        ("qkv", "<u8"), ("q_norm", "<u8"), ("k_norm", "<u8"), ("inverse", "<u8"), ("axes", "<u8"),
        ("rope_positions", "<u8"), ("ordinals", "<u8"), ("column_rows", "<u8"),
        ("page_tables", "<u8"), ("q", "<u8"), ("pages", "<u8"), ("scales", "<u8"),
        ("tokens", "<i4"), ("heads", "<i4"), ("kv_heads", "<i4"), ("qkv_stride", "<i4"),
        ("has_gate", "<i4"), ("half", "<i4"), ("max_pages", "<i4"), ("eps", "<f4"),
        ("norm_offset", "<f4"), ("rope_scale", "<f4"), ("value_scale", "<f4"), ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTables:
    """rotary.RotaryFrequencies on the device: inverse f32 [half], axes int32 [half]."""

    inverse: DeviceArray
    axes: DeviceArray
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights bf16 [D] of the query and key norms."""

    q_norm: DeviceArray
    k_norm: DeviceArray
    eps: float
    offset: float


def reference(
    heads: FloatArray,
    weight: FloatArray,
    cos: FloatArray,
    sin: FloatArray,
    *,
    eps: float,
    offset: float,
) -> FloatArray:
    """Queries or keys [T, H, D], normed with weight [D] and rotated by cos and sin [T, half]."""
    y = rms_norm.reference(heads, weight, eps=eps, offset=offset)
    rotary.reference(y, cos, sin)
    return y


def launch(
    kernels: KernelLibrary,
    qkv: DeviceArray,
    q: DeviceArray | None,
    kv: KvPages,
    *,
    norms: HeadNorms,
    rotary_tables: RotaryTables,
    rope_positions: DeviceArray,
    ordinals: DeviceArray,
    column_rows: DeviceArray,
    page_tables: DeviceArray,
    stream: int,
    value_scale: float = 1.0,
    is_chained: bool = False,
) -> None:
    """Queue q and the pages' new places on `stream`; returns before it has run.

    q            None: qkv holds keys and values only, and norms.q_norm tells D and nothing else
    value_scale  times every value, before it is rounded to bf16
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    pages = view_pages(_OP, kv)
    source = view_of(_OP, "qkv", qkv, "uint16", 2)
    queries = None if q is None else _view_queries(q, pages)
    tokens, heads = (source.shape[0], 0) if queries is None else queries.shape[:2]
    (head_dim,) = view_of(_OP, "q_norm", norms.q_norm, "uint16", 1).shape
    if head_dim not in HEAD_DIMS or stored_dim(head_dim) != pages.head_dim:
        fail(_OP, f"q_norm has {head_dim} weights for heads stored as {pages.head_dim}")
    params = np.zeros((), _PARAMS)
    params["q"] = 0 if queries is None else queries.address
    params["tokens"], params["heads"], params["kv_heads"] = tokens, heads, pages.num_kv_heads
    params["pages"], params["scales"] = pages.address, pages.scales_address
    params["has_gate"] = _has_gate(source.shape, tokens, head_dim, heads, pages.num_kv_heads)
    require_alignment(_OP, "qkv", source, "uint16", 16)
    params["qkv"], params["qkv_stride"] = source.address, source.row_stride
    if not isfinite(value_scale):
        fail(_OP, f"value_scale {value_scale} is not finite")
    params["value_scale"] = value_scale
    if not norms.eps > 0.0:
        fail(_OP, f"eps {norms.eps} is not positive")
    params["eps"], params["norm_offset"] = norms.eps, norms.offset
    for name, weight in (("q_norm", norms.q_norm), ("k_norm", norms.k_norm)):
        view = require_view(_OP, name, weight, "uint16", (head_dim,), alignment_bytes=16)
        params[name] = view.address
    inverse = view_of(_OP, "inverse", rotary_tables.inverse, "float32", 1)
    half = inverse.shape[0]
    if not 1 <= half <= head_dim // 2:
        fail(_OP, f"{2 * half} rotary dimensions for head_dim {head_dim}")
    params["inverse"], params["half"] = inverse.address, half
    params["axes"] = require_view(_OP, "axes", rotary_tables.axes, "int32", (half,)).address
    params["rope_scale"] = rotary_tables.scale
    tables = view_of(_OP, "page_tables", page_tables, "int32", 2)
    params["page_tables"], params["max_pages"] = tables.address, tables.row_stride
    for name, array, shape in (
        ("rope_positions", rope_positions, (3, tokens)),
        ("ordinals", ordinals, (tokens,)),
        ("column_rows", column_rows, (tokens,)),
    ):
        params[name] = require_view(_OP, name, array, "int32", shape).address
    tasks = tokens * (heads + 2 * pages.num_kv_heads)
    kernels.function("attention_prepare", f"attention_prepare_{pages.format}_{head_dim}").launch(
        (-(-tasks // _WARPS), 1, 1), (32 * _WARPS, 1, 1), params,
        stream=stream, programmatic=is_chained,
    )  # fmt: skip


def _view_queries(q: DeviceArray, pages: KvPagesView) -> DeviceView:
    """q [T, H, S]."""
    shape = view_of(_OP, "q", q, "uint16", 3).shape
    _, heads, width = shape
    if width != pages.head_dim or heads < 1 or heads % pages.num_kv_heads:
        fail(_OP, f"q has shape {shape} for {pages.num_kv_heads} heads x {pages.head_dim}")
    return require_view(_OP, "q", q, "uint16", shape, alignment_bytes=16)


def _has_gate(
    shape: tuple[int, ...], tokens: int, head_dim: int, heads: int, kv_heads: int
) -> bool:
    plain = (heads + 2 * kv_heads) * head_dim
    gated = plain + heads * head_dim
    if tokens < 1 or shape not in ((tokens, plain), (tokens, gated)):
        fail(_OP, f"qkv has shape {shape}, expected {tokens} x {plain}, or {gated} with gates")
    return heads > 0 and shape[1] == gated
