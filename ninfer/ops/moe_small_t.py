"""moe_small_t: a mixture-of-experts layer for few tokens, in three launches.

    n = RMSNorm(x); logits = router n; experts and weights as moe_router chooses them
    E(n) = down bf16(silu(gate n) * up n)
    y[t] = bf16(x[t] + sigmoid(gate . n[t]) * E_shared(n[t]) + sum_e weights[t, e] * E_e(n[t]))

    launch_router    n, the logits and the shared expert's gate
    launch_experts   everything else. A shared expert of other formats comes as its output

Shapes     x and y [T, C], 1 <= T <= 16, C % 16 == 0; router [E, C], E <= 512, k <= 16; experts
           gate_up [E][2 I, C], rows interleaved by 8, and down [E][C, I]; I % 8 == 0
           square_sums [T, S] of x; of y [T, ceil(C / 32)]
Dtypes     x, n, the inner values and y bf16, each rounded once; logits, gates and sums f32
Effects    launch_router writes normed, logits and shared_gate of the workspace; launch_experts
           its inner values, every element of y and of its square sums; y may be x
Order      which products are added in which order depends on the shapes and on a token's own
           experts (ascending, the shared one first): its bits do not depend on T or on the others
Workspace  MoeWorkspace; its contents before do not matter
Errors     OpContractError for a shape, dtype, stride, alignment or format outside the above
Tolerance  BF16_REDUCTION
Source     ninfer/ops/moe_router.py, moe_experts.py; ninfer/ops/linear_packing.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.expert_weights import (
    MATRIX_PARAMS,
    ExpertWeights,
    expert_matrices,
    single_matrix,
)
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import InputNorm, PackedLinear
from ninfer.ops.moe_router import MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN

_OP: Final = "moe_small_t"

MAX_TOKENS: Final = 16
MAX_COLUMNS: Final = 12288
TILE_ROWS: Final = 16
_THREADS: Final = 256
_BLOCKS_PER_MULTIPROCESSOR: Final = 2
_RING_STAGES: Final = 6
_PART_BYTES: Final = {
    WeightFormat.BF16: 1024,
    WeightFormat.FP8_ROW: 1024,
    WeightFormat.FP8_BLOCK: 1280,
    WeightFormat.NVFP4: 1280,
}
"""Of a warp's part of weights in shared memory, with what a lane needs to scale it."""
_ROUTER_PARAMS: Final = np.dtype(
    [
        ("router", MATRIX_PARAMS), ("x", "<u8"), ("square_sums", "<u8"), ("norm_weight", "<u8"),
        ("gate", "<u8"), ("y", "<u8"), ("logits", "<u8"), ("shared_gate", "<u8"),
        ("tokens", "<i4"), ("num_square_sums", "<i4"), ("x_stride", "<i4"),
        ("logits_stride", "<i4"), ("norm_eps", "<f4"), ("norm_offset", "<f4"),
    ]
)  # fmt: skip
_EXPERT_PARAMS: Final = np.dtype(
    [
        ("routed", MATRIX_PARAMS), ("shared", MATRIX_PARAMS), ("logits", "<u8"),
        ("logits_stride", "<i4"), ("num_experts", "<i4"), ("experts_per_token", "<i4"),
        ("renormalise", "<i4"), ("x", "<u8"), ("x_shared", "<u8"), ("y", "<u8"),
        ("y_shared", "<u8"), ("residual", "<u8"), ("shared_gate", "<u8"),
        ("shared_output", "<u8"), ("square_sums", "<u8"), ("tokens", "<i4"),
        ("has_shared", "<i4"), ("x_stride", "<i4"), ("y_stride", "<i4"),
        ("residual_stride", "<i4"), ("columns", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """Formats as the routed experts'; the inner size is its own."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """router [E, C] of any format; shared_gate bf16 [C] with a shared expert, however it runs."""

    router: PackedLinear
    gate_up: ExpertWeights
    down: ExpertWeights
    experts_per_token: int
    renormalise: bool
    shared_gate: DeviceArray | None = None
    shared: SharedExpert | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MoeWorkspace:
    """Of exactly T tokens and P = T * k pairs.

    normed       bf16 [T, C]
    logits       f32 [T, E]
    shared_gate  f32 [T]
    inner        bf16 [P, I], pairs sorted by expert and token
    shared       with weights.shared: its inner values, bf16 [T, inner size]
                 for a shared expert that runs apart: its output, bf16 [T, C]
    """

    normed: DeviceArray
    logits: DeviceArray
    shared_gate: DeviceArray
    inner: DeviceArray
    shared: DeviceArray | None = None


def can_fuse(gate_up: ExpertWeights, down: ExpertWeights, shared: SharedExpert) -> bool:
    """Whether a shared expert runs in the launches of the routed ones: formats agree."""
    pairs = ((gate_up, shared.gate_up), (down, shared.down))
    return all(routed.layout.format is one.plan.layout.format for routed, one in pairs)


def launch_router(
    kernels: KernelLibrary,
    weights: MoeWeights,
    x: DeviceArray,
    norm: InputNorm,
    workspace: MoeWorkspace,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue norm, logits and gate on `stream`; returns before they have run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    layout = weights.router.plan.layout
    source = view_of(_OP, "x", x, "uint16", 2)
    tokens, columns = source.shape
    _check_sizes(weights, tokens, columns)
    require_alignment(_OP, "x", source, "uint16", 16)
    params = np.zeros((), _ROUTER_PARAMS)
    params["router"] = single_matrix(_OP, "router", weights.router)
    params["x"], params["x_stride"], params["tokens"] = source.address, source.row_stride, tokens
    sums = view_of(_OP, "norm.square_sums", norm.square_sums, "float32", 2)
    if sums.shape[0] != tokens or sums.row_stride != sums.shape[1] or not norm.eps > 0.0:
        fail(_OP, f"norm.square_sums has shape {sums.shape} for {tokens} tokens, eps {norm.eps}")
    params["square_sums"], params["num_square_sums"] = sums.address, sums.shape[1]
    params["norm_eps"], params["norm_offset"] = norm.eps, norm.offset
    params["norm_weight"] = _vector("norm.weight", norm.weight, columns)
    if weights.shared_gate is not None:
        params["gate"] = _vector("shared_gate", weights.shared_gate, columns)
    params["y"] = require_view(
        _OP, "normed", workspace.normed, "uint16", (tokens, columns), alignment_bytes=16
    ).address
    logits = view_of(_OP, "logits", workspace.logits, "float32", 2)
    if logits.shape != (tokens, layout.rows):
        fail(_OP, f"logits has shape {logits.shape}, expected {(tokens, layout.rows)}")
    params["logits"], params["logits_stride"] = logits.address, logits.row_stride
    params["shared_gate"] = require_view(
        _OP, "shared_gate", workspace.shared_gate, "float32", (tokens,)
    ).address
    tiles = -(-layout.rows // TILE_ROWS)
    kernels.function("moe_small_t", f"moe_router_product_{layout.format.value}").launch(
        (tiles + tokens, 1, 1), (_THREADS, 1, 1), params, stream=stream,
        shared_bytes=2 * columns, programmatic=is_chained,
    )  # fmt: skip


def launch_experts(
    kernels: KernelLibrary,
    weights: MoeWeights,
    residual: DeviceArray,
    y: DeviceArray,
    workspace: MoeWorkspace,
    *,
    stream: int,
    square_sums: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue both products of the experts behind launch_router, whose workspace this is.

    is_chained   may start while the kernel ahead of it in the stream still runs; the kernel
                 ahead waits for launch_router's
    """
    tokens, columns = view_of(_OP, "y", y, "uint16", 2).shape
    _check_sizes(weights, tokens, columns)
    params = np.zeros((), _EXPERT_PARAMS)
    params["tokens"], params["columns"] = tokens, columns
    params["experts_per_token"], params["renormalise"] = (
        weights.experts_per_token, weights.renormalise,
    )  # fmt: skip
    num_experts = weights.router.plan.layout.rows
    params["num_experts"] = num_experts
    logits = view_of(_OP, "logits", workspace.logits, "float32", 2)
    if logits.shape != (tokens, num_experts):
        fail(_OP, f"logits has shape {logits.shape}, expected {(tokens, num_experts)}")
    params["logits"], params["logits_stride"] = logits.address, logits.row_stride
    if square_sums is not None:
        shape = (tokens, -(-columns // 32))
        view = require_view(_OP, "square_sums", square_sums, "float32", shape)
        params["square_sums"] = view.address
    params["has_shared"] = weights.shared is not None
    _launch_gate_up(kernels, weights, params.copy(), workspace, stream, is_chained)
    _launch_down(kernels, weights, params, residual, y, workspace, stream)


def _launch_gate_up(
    kernels: KernelLibrary,
    weights: MoeWeights,
    params: NDArray[np.void],
    workspace: MoeWorkspace,
    stream: int,
    is_chained: bool,
) -> None:
    tokens, columns = int(params["tokens"]), int(params["columns"])
    layout = weights.gate_up.layout
    params["routed"] = expert_matrices(_OP, "gate_up", weights.gate_up)
    params["x"] = require_view(
        _OP, "normed", workspace.normed, "uint16", (tokens, columns), alignment_bytes=16
    ).address
    params["x_stride"] = columns
    num_pairs = tokens * weights.experts_per_token
    shape = (num_pairs, layout.rows // 2)
    params["y"] = require_view(
        _OP, "inner", workspace.inner, "uint16", shape, alignment_bytes=16
    ).address
    shared_tiles = 0
    if weights.shared is not None:
        rows = weights.shared.gate_up.plan.layout.rows
        params["shared"] = single_matrix(_OP, "shared.gate_up", weights.shared.gate_up)
        params["y_shared"] = _shared_inner(workspace, tokens, rows // 2)
        shared_tiles = rows // TILE_ROWS
    most_tiles = (
        shared_tiles + min(int(params["num_experts"]), num_pairs) * layout.rows // TILE_ROWS
    )
    blocks = min(kernels.limits.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR, most_tiles)
    _launch(
        kernels, f"moe_gate_up_{layout.format.value}", blocks, layout, params, stream, is_chained
    )


def _launch_down(
    kernels: KernelLibrary,
    weights: MoeWeights,
    params: NDArray[np.void],
    residual: DeviceArray,
    y: DeviceArray,
    workspace: MoeWorkspace,
    stream: int,
) -> None:
    """Always chained: it orders itself behind the kernel ahead."""
    tokens, columns = int(params["tokens"]), int(params["columns"])
    layout = weights.down.layout
    params["routed"] = expert_matrices(_OP, "down", weights.down)
    shape = (tokens * weights.experts_per_token, layout.columns)
    params["x"] = require_view(
        _OP, "inner", workspace.inner, "uint16", shape, alignment_bytes=16
    ).address
    params["shared_gate"] = require_view(
        _OP, "shared_gate", workspace.shared_gate, "float32", (tokens,)
    ).address
    if weights.shared is not None:
        params["shared"] = single_matrix(_OP, "shared.down", weights.shared.down)
        inner = weights.shared.down.plan.layout.columns
        params["x_shared"] = _shared_inner(workspace, tokens, inner)
    elif workspace.shared is not None:
        params["shared_output"] = require_view(
            _OP, "shared", workspace.shared, "uint16", (tokens, columns)
        ).address
    for name, array in (("residual", residual), ("y", y)):
        view = require_view(
            _OP, name, array, "uint16", (tokens, columns), alignment_bytes=16,
            allows_row_stride=True,
        )  # fmt: skip
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    blocks = columns // TILE_ROWS
    _launch(kernels, f"moe_down_{layout.format.value}", blocks, layout, params, stream, True)


def _launch(
    kernels: KernelLibrary,
    entry: str,
    blocks: int,
    layout: ImageLayout,
    params: NDArray[np.void],
    stream: int,
    is_chained: bool,
) -> None:
    shared_bytes = _THREADS // 32 * _RING_STAGES * _PART_BYTES[layout.format]
    function = kernels.function("moe_small_t", entry)
    function.reserve_shared(shared_bytes)
    function.launch(
        (blocks, 1, 1), (_THREADS, 1, 1), params, stream=stream, shared_bytes=shared_bytes,
        programmatic=is_chained,
    )  # fmt: skip


def _check_sizes(weights: MoeWeights, tokens: int, columns: int) -> None:
    router, gate_up, down = weights.router.plan.layout, weights.gate_up.layout, weights.down.layout
    if not 1 <= tokens <= MAX_TOKENS or columns % TILE_ROWS or not 16 <= columns <= MAX_COLUMNS:
        fail(_OP, f"x has shape {(tokens, columns)}: up to {MAX_TOKENS} rows of a multiple of 16")
    num_experts, inner = router.rows, down.columns
    most = min(MAX_EXPERTS_PER_TOKEN, num_experts)
    if num_experts > MAX_EXPERTS or not 1 <= weights.experts_per_token <= most:
        fail(_OP, f"{weights.experts_per_token} of {num_experts} experts")
    expected = ((num_experts, columns), (2 * inner, columns), (columns, inner))
    found = tuple((layout.rows, layout.columns) for layout in (router, gate_up, down))
    if found != expected:
        fail(_OP, f"router, gate_up and down are {found}, expected {expected}")
    if weights.shared is None:
        return
    shared = weights.shared.gate_up.plan.layout, weights.shared.down.plan.layout
    shared_inner = shared[1].columns
    if [(layout.rows, layout.columns) for layout in shared] != [
        (2 * shared_inner, columns), (columns, shared_inner),
    ]:  # fmt: skip
        fail(_OP, f"the shared expert is {shared} for {columns} columns")
    if not can_fuse(weights.gate_up, weights.down, weights.shared):
        fail(_OP, "the shared expert has other formats than the routed ones")
    if weights.shared_gate is None:
        fail(_OP, "a shared expert needs its gate")


def _vector(name: str, array: DeviceArray, columns: int) -> int:
    return require_view(_OP, name, array, "uint16", (columns,), alignment_bytes=16).address


def _shared_inner(workspace: MoeWorkspace, tokens: int, inner: int) -> int:
    if workspace.shared is None:
        fail(_OP, "a shared expert needs its part of the workspace")
    return require_view(
        _OP, "shared", workspace.shared, "uint16", (tokens, inner), alignment_bytes=16
    ).address
