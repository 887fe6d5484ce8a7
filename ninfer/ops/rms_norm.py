"""rms_norm: y[.., c] = x[.., c] / sqrt(mean_c(x[.., c]^2) + eps) * (offset + weight[.., c]).

With a residual, launch normalises x' = bf16(residual + x) and stores it as `sum` too.

Shapes     x [.., C]; weight [C], or [H, C] for x [T, H, C] -> y like x
           launch: x, residual, sum and y [T, C], weight [C]; T >= 1, 8 <= C <= 32768, C % 8 == 0
Dtypes     all the same floating dtype; launch: bf16, sums in f32, y rounded once
Units      eps > 0, added to the mean square; offset 0 (plain) or 1 (zero-centred weights)
           square_sums[t, s] = sum of x'[t, 32 s .. 32 s + 31]^2, f32 [T, ceil(C / 32)]
Effects    reference: a new array. launch writes every element of y (of sum, of square_sums); y and
           sum may be x or residual. A row depends on itself alone, bit for bit
Errors     OpContractError for a shape, dtype or eps outside the above
Tolerance  FLOAT32_REDUCTION; launch BF16_REDUCTION
Source     Zhang and Sennrich 2019 (arXiv:1910.07467); config key rms_norm_eps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail, require_same_dtype, require_shape
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "rms_norm"

_MAX_THREADS: Final = 512
_PARAMS: Final = np.dtype(
    [
        ("x", "<u8"), ("weight", "<u8"), ("y", "<u8"), ("residual", "<u8"), ("sum", "<u8"),
        ("square_sums", "<u8"), ("columns", "<i4"), ("x_stride", "<i4"), ("y_stride", "<i4"),
        ("residual_stride", "<i4"), ("sum_stride", "<i4"), ("eps", "<f4"), ("offset", "<f4"),
        ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """What is added in front: residual bf16 [T, C], and where the sum goes, bf16 [T, C]."""

    residual: DeviceArray
    sum: DeviceArray


def reference(x: FloatArray, weight: FloatArray, *, eps: float, offset: float = 0.0) -> FloatArray:
    """Normalise over the last axis, in the dtype of x."""
    require_same_dtype(_OP, x, weight)
    require_shape(_OP, "weight", weight, x.shape[x.ndim - weight.ndim :])
    if not eps > 0.0:
        fail(_OP, f"eps {eps} is not positive")
    y = x / root_mean_square(x, eps)
    y *= weight + offset if offset else weight
    return y


def root_mean_square(x: FloatArray, eps: float) -> FloatArray:
    """sqrt(mean(x^2) + eps) over the last axis, which stays with length 1."""
    square: FloatArray = np.add.reduce(x * x, axis=-1, keepdims=True)
    square /= x.shape[-1]
    square += eps
    return np.sqrt(square, out=square)


def launch(
    kernels: KernelLibrary,
    x: DeviceArray,
    weight: DeviceArray,
    y: DeviceArray,
    *,
    eps: float,
    offset: float,
    stream: int,
    addition: Addition | None = None,
    square_sums: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    source = view_of(_OP, "x", x, "uint16", 2)
    tokens, columns = shape = source.shape
    vectors = vectors_per_thread(_OP, columns)
    if tokens < 1 or not eps > 0.0:
        fail(_OP, f"x has shape {shape}, eps is {eps}: needs a row and a positive eps")
    require_alignment(_OP, "x", source, "uint16", 16)
    gain = require_view(_OP, "weight", weight, "uint16", (columns,), alignment_bytes=16)
    params = np.zeros((), _PARAMS)
    params["x"], params["x_stride"], params["weight"] = (
        source.address, source.row_stride, gain.address,
    )  # fmt: skip
    params["columns"], params["eps"], params["offset"] = columns, eps, offset
    outputs = [("y", y)]
    if addition is not None:
        outputs += [("residual", addition.residual), ("sum", addition.sum)]
    for name, array in outputs:
        view = require_view(
            _OP, name, array, "uint16", (tokens, columns), alignment_bytes=16,
            allows_row_stride=True,
        )  # fmt: skip
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    if square_sums is not None:
        strips = (tokens, -(-columns // 32))
        params["square_sums"] = require_view(
            _OP, "square_sums", square_sums, "float32", strips
        ).address
    threads = -(-columns // (8 * vectors * 32)) * 32
    kernels.function("rms_norm", f"rms_norm_bf16_{vectors}").launch(
        (tokens, 1, 1), (threads, 1, 1), params, stream=stream, programmatic=is_chained
    )


def vectors_per_thread(op: str, columns: int) -> int:
    """Vectors of 8 numbers that a thread of a row's block holds: a function of the row length
    alone, as the order of the sums follows from it. Raises OpContractError."""
    if not 8 <= columns <= 64 * _MAX_THREADS or columns % 8:
        fail(op, f"{columns} columns: not a multiple of 8 up to {64 * _MAX_THREADS}")
    return next(count for count in (1, 2, 4, 8) if columns <= 8 * count * _MAX_THREADS)
