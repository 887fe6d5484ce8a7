"""linear_small_t: y[t, n] = sum_k x[t, k] * W[n, k], few columns t, weights read once at full rate.

    x' = x, or with `norm`: bf16(x[t, k] / sqrt(sum_i norm.square_sums[t, i] / K + eps)
                                 * (offset + norm.weight[k]))
    a[t, n] = sum_k x'[t, k] * W[n, k], W decoded exactly; * row_scale[n] for fp8_row and nvfp4
    y = bf16(a) | f32 a | bf16(residual + a) | bf16(silu(a[t, gate]) * a[t, up])

Shapes     x [T, K], 1 <= T <= linear_plan.max_tokens, K % 8 == 0; W [N, K] packed; y and residual
           [T, N], or with swiglu y [T, N / 2] and W's rows packed interleaved; square_sums
           [T, ceil(N / 32)]
Dtypes     x, residual, norm weight bf16; sums and accumulation f32; y bf16 or f32, rounded once
Units      square_sums[t, s] = sum of y[t, 32 s .. 32 s + 31]^2 of the rounded y: what the next
           Op's norm takes
Effects    writes every element of y (and of square_sums if given); y may be residual, never x
Order      which products are added in which order depends on W's shape and format and on the
           plan's thread blocks only: a column's bits do not depend on T or on the other columns
Workspace  partials f32 of `workspace_size` elements, every byte 0xff before and after. Blocks
           wait for each other, so all have to be resident at once: `launch` checks that they
           fit, and no two launches of such Ops may overlap on different streams
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  BF16_REDUCTION
Source     the definition; the layout follows the ideas of IST-DASLab/marlin
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, DeviceView, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import swiglu
from ninfer.ops.checks import fail
from ninfer.ops.linear_packing import ImageLayout
from ninfer.ops.linear_plan import COLUMN_TILE, RingShape, least_window, shape_ring, threads
from ninfer.ops.linear_plan import MAX_TOKENS as MAX_TOKENS
from ninfer.ops.linear_plan import LinearPlan as LinearPlan
from ninfer.ops.linear_plan import max_tokens as max_tokens
from ninfer.ops.linear_plan import plan_linear as plan_linear
from ninfer.ops.linear_plan import workspace_size as workspace_size

_OP: Final = "linear_small_t"

_PARAMS: Final = np.dtype(
    [
        ("weights", "<u8"), ("x", "<u8"), ("y", "<u8"), ("residual", "<u8"), ("row_scale", "<u8"),
        ("partials", "<u8"), ("square_sums", "<u8"),
        ("x_square_sums", "<u8"), ("norm_weight", "<u8"),
        ("rows", "<i4"), ("columns", "<i4"), ("tokens", "<i4"), ("x_stride", "<i4"),
        ("y_stride", "<i4"), ("units_per_block", "<i4"), ("row_blocks", "<i4"),
        ("strips_per_block", "<i4"), ("last_strips", "<i4"), ("stages", "<i4"), ("window", "<i4"),
        ("epilogue", "<i4"), ("num_square_sums", "<i4"), ("norm_eps", "<f4"),
        ("norm_offset", "<f4"), ("lookahead", "<i4"), ("windows", "<i4"),
    ],
    align=True,
)  # fmt: skip


class Epilogue(Enum):
    """What happens to a sum; values are the kernel's."""

    STORE_BF16 = 0
    STORE_FLOAT = 1
    ADD_RESIDUAL = 2
    SWIGLU = 3


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight on the device. row_scale f32 [N], for fp8_row and nvfp4 alone.

    nvfp4's row_scale is the global factor times linear_packing.E2M1_SHIFT.
    """

    plan: LinearPlan
    image: DeviceArray
    row_scale: DeviceArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class InputNorm:
    """RMSNorm of x on the way in; square_sums f32 [T, S] were left by the Op that wrote x."""

    square_sums: DeviceArray
    weight: DeviceArray
    eps: float
    offset: float


def reference(
    x: FloatArray, weight: FloatArray, *, residual: FloatArray | None = None, is_gated: bool = False
) -> FloatArray:
    """y of decoded weights [N, K], rows in natural order (gate, then up); nothing is rounded."""
    y: FloatArray = x @ weight.T
    if is_gated:
        return swiglu.reference(y)
    return y if residual is None else residual + y


def launch(
    kernels: KernelLibrary,
    weight: PackedLinear,
    x: DeviceArray,
    y: DeviceArray,
    *,
    workspace: DeviceArray,
    stream: int,
    epilogue: Epilogue = Epilogue.STORE_BF16,
    residual: DeviceArray | None = None,
    square_sums: DeviceArray | None = None,
    norm: InputNorm | None = None,
    is_chained: bool = False,
    ring: RingShape | None = None,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs (weights are
                 constants; everything else waits for it)
    ring         for measurements; by default what shape_ring says
    """
    layout = weight.plan.layout
    source = view_of(_OP, "x", x, "uint16", 2)
    tokens = source.shape[0]
    if not 1 <= tokens <= MAX_TOKENS or source.shape[1] != layout.columns:
        fail(_OP, f"x has shape {source.shape} for {layout.columns} columns, T up to {MAX_TOKENS}")
    if source.row_stride % 8 or source.address % 16:
        fail(_OP, "the rows of x are not aligned to 16 bytes")
    shape = ring or shape_ring(weight.plan, tokens, kernels.limits)
    params = np.zeros((), _PARAMS)
    params["x"], params["tokens"], params["x_stride"] = source.address, tokens, source.row_stride
    _set_ring(params, weight.plan, tokens, shape)
    _set_weight(params, weight)
    _set_output(params, layout, tokens, y, epilogue)
    _set_residual(params, layout, tokens, residual, epilogue)
    _set_workspace(params, weight.plan, tokens, workspace)
    if square_sums is not None:
        if epilogue not in (Epilogue.STORE_BF16, Epilogue.ADD_RESIDUAL):
            fail(_OP, f"no square sums with {epilogue.name}")
        strips = view_of(_OP, "square_sums", square_sums, "float32", 2)
        _require_shape("square_sums", strips, (tokens, layout.strips))
        params["square_sums"] = strips.address
    if norm is not None:
        _set_norm(params, layout, tokens, norm)
    tiles = -(-tokens // COLUMN_TILE)
    entry = f"linear_small_t_{layout.format.value}_{tiles * COLUMN_TILE}"
    function = kernels.function("linear_small_t", entry)
    function.reserve_shared(kernels.limits.shared_bytes_per_block)
    num_threads = threads(layout.format)
    resident = function.resident_blocks(num_threads, shape.shared_bytes)
    if weight.plan.thread_blocks > resident * kernels.limits.num_multiprocessors:
        fail(_OP, f"{weight.plan.thread_blocks} thread blocks are not resident at once")
    function.launch(
        (weight.plan.thread_blocks, 1, 1),
        (num_threads, 1, 1),
        params,
        stream=stream,
        shared_bytes=shape.shared_bytes,
        programmatic=is_chained,
    )


def _set_ring(params: NDArray[np.void], plan: LinearPlan, tokens: int, shape: RingShape) -> None:
    if shape.windows == 1 and shape.window < least_window(plan, tokens):
        fail(_OP, f"one window of {shape.window} columns does not hold what a block reads")
    params["stages"], params["lookahead"] = shape.stages, shape.lookahead
    params["window"], params["windows"] = shape.window, shape.windows


def _set_weight(params: NDArray[np.void], weight: PackedLinear) -> None:
    layout = weight.plan.layout
    image = view_of(_OP, "image", weight.image, "uint8", 1)
    _require_shape("image", image, (layout.image_bytes,))
    if image.address % 128:
        fail(_OP, "the image is not aligned to 128 bytes")
    if (weight.row_scale is not None) != layout.format.has_row_scale:
        fail(_OP, f"row_scale is for fp8_row and nvfp4, the weight is {layout.format.value}")
    if weight.row_scale is not None:
        scale = view_of(_OP, "row_scale", weight.row_scale, "float32", 1)
        _require_shape("row_scale", scale, (layout.rows,))
        params["row_scale"] = scale.address
    params["weights"] = image.address
    params["rows"], params["columns"] = layout.rows, layout.columns
    params["units_per_block"], params["row_blocks"] = layout.units_per_block, layout.row_blocks
    params["strips_per_block"] = layout.strips_per_block
    params["last_strips"] = layout.last_strips


def _set_output(
    params: NDArray[np.void], layout: ImageLayout, tokens: int, y: DeviceArray, epilogue: Epilogue
) -> None:
    is_gated = epilogue is Epilogue.SWIGLU
    if is_gated and layout.rows % 16:
        fail(_OP, f"{layout.rows} gate and up rows are not a multiple of 16")
    dtype = "float32" if epilogue is Epilogue.STORE_FLOAT else "uint16"
    output = view_of(_OP, "y", y, dtype, 2)
    _require_shape("y", output, (tokens, layout.rows // 2 if is_gated else layout.rows))
    params["y"], params["y_stride"] = output.address, output.row_stride
    params["epilogue"] = epilogue.value


def _set_residual(
    params: NDArray[np.void],
    layout: ImageLayout,
    tokens: int,
    residual: DeviceArray | None,
    epilogue: Epilogue,
) -> None:
    if (residual is not None) != (epilogue is Epilogue.ADD_RESIDUAL):
        fail(_OP, "a residual comes with ADD_RESIDUAL and with nothing else")
    if residual is not None:
        view = view_of(_OP, "residual", residual, "uint16", 2)
        _require_shape("residual", view, (tokens, layout.rows))
        if tokens > 1 and view.row_stride != params["y_stride"]:
            fail(_OP, "residual and y differ in their row stride")
        params["residual"] = view.address


def _set_workspace(
    params: NDArray[np.void], plan: LinearPlan, tokens: int, workspace: DeviceArray
) -> None:
    partials = view_of(_OP, "workspace", workspace, "float32", 1)
    size = workspace_size(plan, tokens)
    if partials.shape[0] < size or partials.address % 16:
        fail(_OP, f"workspace holds {partials.shape[0]} elements, expected {size}, aligned to 16")
    params["partials"] = partials.address


def _set_norm(params: NDArray[np.void], layout: ImageLayout, tokens: int, norm: InputNorm) -> None:
    if not norm.eps > 0.0:
        fail(_OP, f"eps {norm.eps} is not positive")
    sums = view_of(_OP, "norm.square_sums", norm.square_sums, "float32", 2)
    _require_shape("norm.square_sums", sums, (tokens, sums.shape[1]))
    weight = view_of(_OP, "norm.weight", norm.weight, "uint16", 1)
    _require_shape("norm.weight", weight, (layout.columns,))
    if weight.address % 16:
        fail(_OP, "norm.weight is not aligned to 16 bytes")
    params["x_square_sums"], params["num_square_sums"] = sums.address, sums.shape[1]
    params["norm_weight"] = weight.address
    params["norm_eps"], params["norm_offset"] = norm.eps, norm.offset


def _require_shape(name: str, view: DeviceView, shape: tuple[int, ...]) -> None:
    if view.shape != shape:
        fail(_OP, f"{name} has shape {view.shape}, expected {shape}")
