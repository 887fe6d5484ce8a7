"""moe_experts_small_t: the routed experts' products for few pairs, weights read once an expert.

    gate_up  y[pair] = bf16(silu(a[gate]) * a[up]),  a = W[e] x[pair // k], rows interleaved by 8
    down     y[pair] = f32 W[e] x[pair]

Shapes     W: E images of one ImageLayout [N, K], one after another; row_scales [E, N];
           gate_up: x [T, K] -> y [P, N / 2]; down: x [P, K] -> y [P, N]; P = T * k <= MAX_PAIRS
Dtypes     x bf16; y bf16 (gate_up) or f32 (down); f32 accumulation
Effects    writes every element of y. Which products are added in which order depends on W's shape
           and format alone: a pair's bits do not depend on other pairs
Workspace  none
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  BF16_REDUCTION
Source     ninfer/ops/moe_experts.py; ninfer/ops/linear_packing.py
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.expert_weights import ExpertWeights
from ninfer.ops.moe_pairs import SortedPairs

_OP: Final = "moe_experts_small_t"

MAX_PAIRS: Final = 1024
_THREADS: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("images", "<u8"), ("row_scales", "<u8"), ("x", "<u8"), ("y", "<u8"), ("order", "<u8"),
        ("sorted_experts", "<u8"), ("offsets", "<u8"), ("image_bytes", "<u8"), ("rows", "<i4"),
        ("columns", "<i4"), ("units_per_block", "<i4"), ("row_blocks", "<i4"),
        ("strips_per_block", "<i4"), ("last_strips", "<i4"), ("pairs_per_row", "<i4"),
        ("x_stride", "<i4"), ("y_stride", "<i4"), ("is_gated", "<i4"),
    ]
)  # fmt: skip


def launch(
    kernels: KernelLibrary,
    weights: ExpertWeights,
    pairs: SortedPairs,
    x: DeviceArray,
    y: DeviceArray,
    *,
    is_gated: bool,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_gated     gate_up, with rows of x by token; otherwise down, with rows of x by pair
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    layout = weights.layout
    num_pairs = view_of(_OP, "order", pairs.order, "int32", 1).shape[0]
    source = view_of(_OP, "x", x, "uint16", 2)
    num_rows, columns = source.shape
    is_whole = num_rows >= 1 and num_pairs % num_rows == 0 and (is_gated or num_rows == num_pairs)
    if not 1 <= num_pairs <= MAX_PAIRS or columns != layout.columns or not is_whole:
        fail(_OP, f"x has shape {source.shape} for {num_pairs} pairs and K = {layout.columns}")
    if is_gated and layout.rows % 16:
        fail(_OP, f"{layout.rows} gate and up rows are not a multiple of 16")
    require_alignment(_OP, "x", source, "uint16", 16)
    params = np.zeros((), _PARAMS)
    num_experts = view_of(_OP, "images", weights.images, "uint8", 2).shape[0]
    images = require_view(
        _OP, "images", weights.images, "uint8", (num_experts, layout.image_bytes),
        alignment_bytes=16,
    )  # fmt: skip
    params["images"], params["image_bytes"] = images.address, layout.image_bytes
    if (weights.row_scales is not None) != layout.format.has_row_scale:
        fail(_OP, f"row_scales are for fp8_row and nvfp4, the weight is {layout.format.value}")
    if weights.row_scales is not None:
        shape = (num_experts, layout.rows)
        scales = require_view(_OP, "row_scales", weights.row_scales, "float32", shape)
        params["row_scales"] = scales.address
    outputs = (num_pairs, layout.rows // 2 if is_gated else layout.rows)
    output = require_view(_OP, "y", y, "uint16" if is_gated else "float32", outputs)
    params["x"], params["x_stride"] = source.address, source.row_stride
    params["y"], params["y_stride"] = output.address, output.row_stride
    for name, array, size in (
        ("order", pairs.order, num_pairs),
        ("sorted_experts", pairs.sorted_experts, num_pairs),
        ("offsets", pairs.offsets, num_experts + 1),
    ):
        params[name] = require_view(_OP, name, array, "int32", (size,)).address
    params["rows"], params["columns"] = layout.rows, layout.columns
    params["units_per_block"], params["row_blocks"] = layout.units_per_block, layout.row_blocks
    params["strips_per_block"] = layout.strips_per_block
    params["last_strips"] = layout.last_strips
    params["pairs_per_row"], params["is_gated"] = num_pairs // num_rows, is_gated
    kernels.function("moe_experts_small_t", f"moe_experts_small_t_{layout.format.value}").launch(
        (layout.strips, num_pairs, 1), (_THREADS, 1, 1), params, stream=stream,
        programmatic=is_chained,
    )  # fmt: skip
