"""gated_rms_norm: y[t, h] = weight * x[t, h] / sqrt(mean(x[t, h]^2) + eps) * silu(z[t, h]).

Shapes     x and z [T, Hv, dv], weight [dv] -> y [T, Hv, dv]
           launch: x, z and y [T, Hv * dv], rows of z with gaps; T >= 1, dv of 32, 64, 128
Dtypes     all the same floating dtype; launch: bf16, f32 between, rounded once, at y
Units      eps > 0; the weight is plain (no offset); norm first, gate after
Effects    reference: a new array. launch writes every element of y, which may be x, never z.
           A row depends on itself alone, bit for bit
Errors     OpContractError for a shape, dtype or eps outside the above
Tolerance  FLOAT32_REDUCTION; launch BF16_REDUCTION
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464); parameter linear_attn.norm
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import rms_norm
from ninfer.ops.activations import silu
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape
from ninfer.ops.device_checks import require_view

_OP: Final = "gated_rms_norm"

_WARPS: Final = 8
_HEAD_DIMS: Final = (32, 64, 128)
_PARAMS: Final = np.dtype(
    [
        ("x", "<u8"), ("z", "<u8"), ("weight", "<u8"), ("y", "<u8"), ("tokens", "<i4"),
        ("heads", "<i4"), ("x_stride", "<i4"), ("z_stride", "<i4"), ("y_stride", "<i4"),
        ("eps", "<f4"),
    ]
)  # fmt: skip


def reference(x: FloatArray, z: FloatArray, weight: FloatArray, *, eps: float) -> FloatArray:
    """Normalise over dv, then gate."""
    require_rank(_OP, "x", x, 3)
    require_shape(_OP, "z", z, x.shape)
    require_same_dtype(_OP, x, z)
    y = rms_norm.reference(x, weight, eps=eps)
    y *= silu(z)
    return y


def launch(
    kernels: KernelLibrary,
    x: DeviceArray,
    z: DeviceArray,
    weight: DeviceArray,
    y: DeviceArray,
    *,
    eps: float,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    gain = view_of(_OP, "weight", weight, "uint16", 1)
    source = view_of(_OP, "x", x, "uint16", 2)
    (head_dim,), (tokens, columns) = gain.shape, source.shape
    if head_dim not in _HEAD_DIMS or tokens < 1 or columns < 1 or columns % head_dim:
        fail(_OP, f"x has shape {source.shape} for heads of {head_dim}, expected {_HEAD_DIMS}")
    if not eps > 0.0:
        fail(_OP, f"eps {eps} is not positive")
    params = np.zeros((), _PARAMS)
    params["weight"], params["eps"] = gain.address, eps
    params["tokens"], params["heads"] = tokens, columns // head_dim
    for name, array in (("x", x), ("z", z), ("y", y)):
        view = require_view(_OP, name, array, "uint16", (tokens, columns), allows_row_stride=True)
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    blocks = -(-tokens * (columns // head_dim) // _WARPS)
    kernels.function("gated_rms_norm", f"gated_rms_norm_bf16_{head_dim // 32}").launch(
        (blocks, 1, 1), (32 * _WARPS, 1, 1), params, stream=stream, programmatic=is_chained
    )
