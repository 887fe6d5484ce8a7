"""moe_combine: the ranks of every token, the shared expert and the residual, added up.

    y[t] = bf16(sum_rank weights[t, rank] * routed[row] + shared_gate[t] * shared[t] + residual[t])
    row = t * k + rank, or positions[t * k + rank]; added in this order in float32

Shapes     routed [P, C], P = T * k; weights [T, k]; positions [P]; shared [T, C]; shared_gate [T];
           residual and y [T, C]; square_sums [T, ceil(C / 32)]; C % 8 == 0
Dtypes     routed and shared both f32 or both bf16; residual and y bf16; positions int32; others f32
Units      square_sums[t, s] = sum of y[t, 32 s .. 32 s + 31]^2
Effects    writes every element of y (and of square_sums); y may be residual
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  BF16_REDUCTION
Source     ninfer/ops/moe_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view

_OP: Final = "moe_combine"

_MAX_THREADS: Final = 512
_PARAMS: Final = np.dtype(
    [
        ("routed", "<u8"), ("weights", "<u8"), ("positions", "<u8"), ("shared", "<u8"),
        ("shared_gate", "<u8"), ("residual", "<u8"), ("y", "<u8"), ("square_sums", "<u8"),
        ("columns", "<i4"), ("experts_per_token", "<i4"), ("residual_stride", "<i4"),
        ("y_stride", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SharedOutput:
    """shared [T, C] in the dtype of routed, shared_gate f32 [T]."""

    shared: DeviceArray
    shared_gate: DeviceArray


def reference(
    routed: FloatArray,
    weights: FloatArray,
    residual: FloatArray,
    *,
    shared: FloatArray | None = None,
    shared_gate: FloatArray | None = None,
) -> FloatArray:
    """y without its rounding; routed [P, C] by pair."""
    tokens, count = weights.shape
    ranks = routed.reshape(tokens, count, routed.shape[1]) * weights[:, :, None]
    y: FloatArray = ranks.sum(axis=1) + residual
    if shared is not None and shared_gate is not None:
        y = y + shared * shared_gate[:, None]
    return y


def launch(
    kernels: KernelLibrary,
    routed: DeviceArray,
    weights: DeviceArray,
    residual: DeviceArray,
    y: DeviceArray,
    *,
    stream: int,
    positions: DeviceArray | None = None,
    shared: SharedOutput | None = None,
    square_sums: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    positions    rows of routed by pair, when it is in sorted order
    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    is_float = np.dtype(routed.__cuda_array_interface__["typestr"]) == np.float32
    dtype = "float32" if is_float else "uint16"
    tokens, count = view_of(_OP, "weights", weights, "float32", 2).shape
    columns = view_of(_OP, "routed", routed, dtype, 2).shape[1]
    if tokens < 1 or count < 1 or columns < 8 or columns % 8:
        fail(_OP, f"weights {tokens} x {count}, {columns} columns: not a multiple of 8")
    params = np.zeros((), _PARAMS)
    params["columns"], params["experts_per_token"] = columns, count
    params["weights"] = require_view(_OP, "weights", weights, "float32", (tokens, count)).address
    params["routed"] = require_view(
        _OP, "routed", routed, dtype, (tokens * count, columns), alignment_bytes=16
    ).address
    for name, array in (("residual", residual), ("y", y)):
        view = require_view(
            _OP, name, array, "uint16", (tokens, columns), alignment_bytes=16,
            allows_row_stride=True,
        )  # fmt: skip
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    if positions is not None:
        view = require_view(_OP, "positions", positions, "int32", (tokens * count,))
        params["positions"] = view.address
    if shared is not None:
        _set_shared(params, shared, dtype, (tokens, columns))
    if square_sums is not None:
        strips = (tokens, -(-columns // 32))
        view = require_view(_OP, "square_sums", square_sums, "float32", strips)
        params["square_sums"] = view.address
    threads = min(_MAX_THREADS, -(-columns // 256) * 32)
    entry = "moe_combine_f32" if is_float else "moe_combine_bf16"
    kernels.function("moe_combine", entry).launch(
        (tokens, 1, 1), (threads, 1, 1), params, stream=stream, programmatic=is_chained
    )


def _set_shared(
    params: NDArray[np.void], shared: SharedOutput, dtype: str, shape: tuple[int, int]
) -> None:
    output = require_view(_OP, "shared", shared.shared, dtype, shape, alignment_bytes=16)
    gate = require_view(_OP, "shared_gate", shared.shared_gate, "float32", shape[:1])
    params["shared"], params["shared_gate"] = output.address, gate.address
