"""moe_grouped: the routed experts' products for many tokens, on pairs sorted by expert.

    gate_up  y[i] = bf16(silu(a[gate]) * a[up]),  a = W[e] x[sorted_tokens[i]]
    down     y[i] = bf16(W[e] x[i])
    e        the expert of sorted position i

Shapes     W: E images of one ImageLayout [N, K], one after another; P = T * k
           gate_up: x [T, K] -> y [P, N / 2], N % 16 == 0, rows interleaved by 8
           down: x [P, K] -> y [P, N], N % 8 == 0
Dtypes     x and y bf16; f32 accumulation; fp8_block's W is rounded to bf16 once scaled, W of other
           formats is exact
Effects    writes every element of y
Order      which products are added in which order depends on W's shape and format alone: a pair's
           bits do not depend on other pairs, nor on how many there are. They are not the bits of
           moe_small_t, which splits K among warps: a prompt's border between chunks of up to 16
           tokens and longer ones shows in roundings, other borders do not
Workspace  none
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  BF16_REDUCTION
Source     ninfer/ops/moe_experts.py, moe_pairs.py; ninfer/ops/linear_packing.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.expert_weights import MATRIX_PARAMS, ExpertWeights, expert_matrices
from ninfer.ops.linear_packing import WeightFormat
from ninfer.ops.moe_pairs import TILE_TOKENS, SortedPairs, max_tiles

_OP: Final = "moe_grouped"

_X_BYTES: Final = TILE_TOKENS * 128
_BYTES_A_ROW: Final = {
    WeightFormat.BF16: 128.0,
    WeightFormat.FP8_ROW: 64.0,
    WeightFormat.FP8_BLOCK: 64.25,
    WeightFormat.NVFP4: 40.0,
}
"""Of a stage's weights with their scales."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """How a kernel family cuts the work, as its source says.

    stages         in shared memory: bf16, other formats
    alignment      of stages, in bytes
    slack          bytes to align the first stage
    starts_early   whether it may start before the kernel ahead has ended: not where x goes through
                   the first-level cache, which only the end of a kernel makes sure to be clean
    """

    family: str
    threads: int
    tile_rows: int
    stages: tuple[int, int]
    alignment: int
    slack: int
    starts_early: bool

    def shared_bytes(self, fmt: WeightFormat) -> int:
        scaled = -(-int(self.tile_rows * _BYTES_A_ROW[fmt]) // 128) * 128
        stage = -(-(_X_BYTES + scaled) // self.alignment) * self.alignment
        return self.stages[fmt is not WeightFormat.BF16] * stage + self.slack


_PORTABLE: Final = _Variant("moe_grouped", 256, 128, (3, 4), 128, 0, True)
_WGMMA: Final = _Variant("moe_grouped_wgmma", 512, 256, (4, 6), 1024, 1024, False)
_WGMMA_ARCHITECTURE: Final = "sm_90a"
_PARAMS: Final = np.dtype(
    [
        ("experts", MATRIX_PARAMS), ("x", "<u8"), ("y", "<u8"), ("rows", "<u8"),
        ("offsets", "<u8"), ("tiles", "<u8"), ("num_tiles", "<u8"), ("x_stride", "<i4"),
        ("padding", "<i4"),
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
    is_portable: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_gated      gate_up, with rows of x by token; otherwise down, with rows of x in sorted order
    is_chained    may start while the kernel ahead of it in the stream still runs
    is_portable   for tests: the kernel of other architectures, where this one has its own
    """
    layout = weights.layout
    num_experts = view_of(_OP, "images", weights.images, "uint8", 2).shape[0]
    num_pairs = view_of(_OP, "sorted_tokens", pairs.sorted_tokens, "int32", 1).shape[0]
    source = view_of(_OP, "x", x, "uint16", 2)
    num_rows, columns = source.shape
    is_whole = num_rows >= 1 and num_pairs % num_rows == 0 and (is_gated or num_rows == num_pairs)
    if columns != layout.columns or not is_whole:
        fail(_OP, f"x has shape {source.shape} for {num_pairs} pairs and K = {layout.columns}")
    if layout.rows % (16 if is_gated else 8):
        fail(_OP, f"{layout.rows} rows are not a multiple of {16 if is_gated else 8}")
    require_alignment(_OP, "x", source, "uint16", 16)
    params = np.zeros((), _PARAMS)
    params["experts"] = expert_matrices(_OP, "images", weights)
    params["x"], params["x_stride"] = source.address, source.row_stride
    outputs = (num_pairs, layout.rows // 2 if is_gated else layout.rows)
    params["y"] = require_view(_OP, "y", y, "uint16", outputs, alignment_bytes=16).address
    tiles = max_tiles(num_pairs, num_experts)
    for name, array, shape in (
        ("rows", pairs.sorted_tokens, (num_pairs,)),
        ("offsets", pairs.offsets, (num_experts + 1,)),
        ("tiles", pairs.tiles, (tiles, 2)),
        ("num_tiles", pairs.num_tiles, (1,)),
    ):
        params[name] = require_view(_OP, name, array, "int32", shape, alignment_bytes=4).address
    if not is_gated:
        params["rows"] = 0
    has_own = kernels.limits.architecture == _WGMMA_ARCHITECTURE and not is_portable
    variant = _WGMMA if has_own else _PORTABLE
    shared_bytes = variant.shared_bytes(layout.format)
    entry = f"{variant.family}_{'gate_up' if is_gated else 'down'}_{layout.format.value}"
    function = kernels.function(variant.family, entry)
    function.reserve_shared(shared_bytes)
    function.launch(
        (-(-layout.rows // variant.tile_rows), tiles, 1), (variant.threads, 1, 1), params,
        stream=stream, shared_bytes=shared_bytes, programmatic=is_chained and variant.starts_early,
    )  # fmt: skip
