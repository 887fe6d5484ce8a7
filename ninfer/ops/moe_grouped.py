"""moe_grouped: the routed experts' MLPs for many tokens, on pairs sorted by expert.

    inner[i] = bf16(silu(a[gate]) * a[up]),  a = gate_up[e] x[sorted_tokens[i]]
    y[i] = bf16(down[e] inner[i]),           e the expert of sorted position i

Shapes     gate_up: E images of one ImageLayout [2 I, C], rows interleaved by 8; down: of one [C, I]
           x [T, C] -> y [P, C], P = T * k; C % 8 == 0, I % 8 == 0
Dtypes     x, inner values and y bf16, each rounded once; f32 accumulation; fp8_block's weights are
           rounded to bf16 once scaled, those of other formats are exact
Effects    writes every element of y
Order      which products are added in which order depends on the shapes and formats alone: a pair's
           bits do not depend on other pairs, nor on how many there are. They are not the bits of
           moe_small_t, which splits columns among warps: a prompt's border between chunks of up to
           16 tokens and longer ones shows in roundings, other borders do not
Workspace  uint8 of `workspace_bytes` elements; its contents before do not matter
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  BF16_REDUCTION
Source     ninfer/ops/moe_experts.py, moe_pairs.py; ninfer/ops/linear_packing.py
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import DeviceLimits, KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.expert_weights import MATRIX_PARAMS, ExpertWeights, expert_matrices
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.moe_pairs import TILE_TOKENS, SortedPairs, max_tiles

_OP: Final = "moe_grouped"

_WGMMA_ARCHITECTURE: Final = "sm_90a"
_STAGE_COLUMNS: Final = 64
_X_BYTES: Final = TILE_TOKENS * _STAGE_COLUMNS * 2
"""Of a tile's rows in a stage."""
_PORTABLE_THREADS: Final = 256
_PORTABLE_ROWS: Final = 128
_PORTABLE_STAGES: Final = MappingProxyType(
    {
        WeightFormat.BF16: (3, 16384),
        WeightFormat.FP8_ROW: (4, 8192),
        WeightFormat.FP8_BLOCK: (4, 8192 + 128),
        WeightFormat.NVFP4: (4, 4096 + 1024),
    }
)
"""Stages in shared memory of moe_grouped.cu, and a stage's bytes of weights with their scales."""
_WGMMA_THREADS: Final = 384
_WGMMA_ROWS: Final = 256
_WGMMA_STAGES: Final = MappingProxyType(
    {
        WeightFormat.BF16: (4, 3, 49152),
        WeightFormat.FP8_ROW: (6, 5, 32768),
        WeightFormat.FP8_BLOCK: (5, 4, 33792),
        WeightFormat.NVFP4: (6, 6, 26624),
    }
)
"""Stages of moe_grouped_wgmma.cu for gate_up and for down, and a stage's bytes with x."""
_PARAMS: Final = np.dtype(
    [
        ("experts", MATRIX_PARAMS), ("x", "<u8"), ("y", "<u8"), ("rows", "<u8"), ("tiles", "<u8"),
        ("num_tiles", "<u8"), ("x_stride", "<i4"), ("y_run", "<i4"),
    ]
)  # fmt: skip
_GATHER_PARAMS: Final = np.dtype(
    [
        ("x", "<u8"), ("images", "<u8"), ("rows", "<u8"), ("tiles", "<u8"), ("num_tiles", "<u8"),
        ("x_stride", "<i4"), ("columns", "<i4"), ("run", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


def workspace_bytes(
    limits: DeviceLimits, num_pairs: int, num_experts: int, hidden: int, inner: int
) -> int:
    """Of launches with up to so many pairs."""
    if limits.architecture != _WGMMA_ARCHITECTURE:
        return 2 * num_pairs * inner
    return sum(_image_bytes(num_pairs, num_experts, columns) for columns in (hidden, inner))


def launch(
    kernels: KernelLibrary,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    pairs: SortedPairs,
    x: DeviceArray,
    y: DeviceArray,
    *,
    workspace: DeviceArray,
    stream: int,
    is_chained: bool = False,
    is_portable: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_chained    may start while the kernel ahead of it in the stream still runs
    is_portable   for tests: the kernels of other architectures, where this one has its own
    """
    num_experts = view_of(_OP, "gate_up", gate_up.images, "uint8", 2).shape[0]
    num_pairs = view_of(_OP, "sorted_tokens", pairs.sorted_tokens, "int32", 1).shape[0]
    source = view_of(_OP, "x", x, "uint16", 2)
    _check_sizes(gate_up, down, source.shape, num_pairs)
    require_alignment(_OP, "x", source, "uint16", 16)
    columns, inner = source.shape[1], down.layout.columns
    space = view_of(_OP, "workspace", workspace, "uint8", 1)
    needed = workspace_bytes(kernels.limits, num_pairs, num_experts, columns, inner)
    if space.shape[0] < needed or space.address % 256:
        fail(_OP, f"workspace has {space.shape[0]} bytes at {space.address:#x}, needs {needed}")
    params = np.zeros((), _PARAMS)
    tiles = max_tiles(num_pairs, num_experts)
    for name, array, shape in (
        ("rows", pairs.sorted_tokens, (num_pairs,)),
        ("tiles", pairs.tiles, (tiles, 4)),
        ("num_tiles", pairs.num_tiles, (1,)),
    ):
        alignment = 16 if name == "tiles" else 4
        view = require_view(_OP, name, array, "int32", shape, alignment_bytes=alignment)
        params[name] = view.address
    first, second = params.copy(), params
    first["experts"] = expert_matrices(_OP, "gate_up", gate_up)
    second["experts"] = expert_matrices(_OP, "down", down)
    first["x"], first["x_stride"] = source.address, source.row_stride
    second["y"] = require_view(
        _OP, "y", y, "uint16", (num_pairs, columns), alignment_bytes=16
    ).address
    has_own = kernels.limits.architecture == _WGMMA_ARCHITECTURE and not is_portable
    if has_own and all(_has_images(weights.layout) for weights in (gate_up, down)):
        _launch_gather(kernels, first, gate_up.layout, space.address, tiles, stream)
        first["y_run"] = _run(down.layout)
        first["y"] = second["x"] = space.address + _image_bytes(num_pairs, num_experts, columns)
        _launch_wgmma(kernels, gate_up.layout, first, tiles, True, stream)
        _launch_wgmma(kernels, down.layout, second, tiles, False, stream)
        return
    first["y"] = second["x"] = space.address
    second["rows"], second["x_stride"] = 0, inner
    _launch_portable(kernels, gate_up.layout, first, tiles, True, stream, is_chained)
    _launch_portable(kernels, down.layout, second, tiles, False, stream, True)


def _check_sizes(
    gate_up: ExpertWeights, down: ExpertWeights, x_shape: tuple[int, ...], num_pairs: int
) -> None:
    tokens, columns = x_shape
    inner = down.layout.columns
    expected = ((2 * inner, columns), (columns, inner))
    found = tuple((layout.rows, layout.columns) for layout in (gate_up.layout, down.layout))
    if found != expected:
        fail(_OP, f"gate_up and down are {found} for x of {columns} columns, expected {expected}")
    if tokens < 1 or num_pairs < tokens or num_pairs % tokens:
        fail(_OP, f"x has shape {x_shape} for {num_pairs} pairs")


def _image_bytes(num_pairs: int, num_experts: int, columns: int) -> int:
    """Of images of sorted rows (moe_tiles.cuh)."""
    return max_tiles(num_pairs, num_experts) * -(-columns // _STAGE_COLUMNS) * _X_BYTES


def _has_images(layout: ImageLayout) -> bool:
    """Whether a stage's parts are always there: bf16 takes two at a time."""
    return layout.format is not WeightFormat.BF16 or layout.slices >= 2


def _run(layout: ImageLayout) -> int:
    """Columns in a row that a lane multiplies."""
    return 16 if layout.format is WeightFormat.NVFP4 else 8


def _launch_gather(
    kernels: KernelLibrary,
    products: NDArray[np.void],
    layout: ImageLayout,
    images: int,
    tiles: int,
    stream: int,
) -> None:
    """x of `products` becomes images. Not chained: it reads x through the first-level cache."""
    params = np.zeros((), _GATHER_PARAMS)
    for name in ("x", "x_stride", "rows", "tiles", "num_tiles"):
        params[name] = products[name]
    params["columns"], params["run"] = layout.columns, _run(layout)
    params["images"] = products["x"] = images
    stages = -(-layout.columns // _STAGE_COLUMNS)
    kernels.function("moe_grouped_wgmma", "moe_gather_images").launch(
        (-(-stages // 4), tiles, 1), (256, 1, 1), params, stream=stream
    )


def _launch_wgmma(
    kernels: KernelLibrary,
    layout: ImageLayout,
    params: NDArray[np.void],
    tiles: int,
    is_gated: bool,
    stream: int,
) -> None:
    gated_stages, down_stages, stage_bytes = _WGMMA_STAGES[layout.format]
    stages = gated_stages if is_gated else down_stages
    width = _WGMMA_ROWS // 2 if is_gated else _WGMMA_ROWS
    shared_bytes = stages * (stage_bytes + 16) + TILE_TOKENS * 2 * (width + 8)
    blocks = min(kernels.limits.num_multiprocessors, tiles * -(-layout.rows // _WGMMA_ROWS))
    name = "gate_up" if is_gated else "down"
    function = kernels.function(
        "moe_grouped_wgmma", f"moe_grouped_wgmma_{name}_{layout.format.value}"
    )
    function.reserve_shared(shared_bytes)
    function.launch(
        (blocks, 1, 1), (_WGMMA_THREADS, 1, 1), params, stream=stream, shared_bytes=shared_bytes,
        programmatic=True,
    )  # fmt: skip


def _launch_portable(
    kernels: KernelLibrary,
    layout: ImageLayout,
    params: NDArray[np.void],
    tiles: int,
    is_gated: bool,
    stream: int,
    is_chained: bool,
) -> None:
    stages, weight_bytes = _PORTABLE_STAGES[layout.format]
    shared_bytes = stages * (_X_BYTES + weight_bytes)
    name = "gate_up" if is_gated else "down"
    function = kernels.function("moe_grouped", f"moe_grouped_{name}_{layout.format.value}")
    function.reserve_shared(shared_bytes)
    function.launch(
        (-(-layout.rows // _PORTABLE_ROWS), tiles, 1), (_PORTABLE_THREADS, 1, 1), params,
        stream=stream, shared_bytes=shared_bytes, programmatic=is_chained,
    )  # fmt: skip
