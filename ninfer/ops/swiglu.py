"""swiglu: y[t, i] = silu(x[t, i]) * x[t, I + i].

Shapes     x [T, 2 * I] = gate columns, then up columns -> y [T, I]; launch: I % 8 == 0
Dtypes     one floating dtype; launch: bf16 in and out, f32 between, rounded once
Effects    a new array; launch writes every element of y, which is not x
Errors     OpContractError for an odd number of columns or another rank
Tolerance  FLOAT32_POINTWISE; launch BF16_POINTWISE
Source     Shazeer 2020 (arXiv:2002.05202); config keys intermediate_size, hidden_act = silu
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.activations import silu
from ninfer.ops.checks import fail, require_rank
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "swiglu"

_THREADS: Final = 256
_BLOCKS_PER_MULTIPROCESSOR: Final = 8
_PARAMS: Final = np.dtype(
    [
        ("x", "<u8"), ("y", "<u8"), ("tokens", "<i4"), ("inner", "<i4"), ("x_stride", "<i4"),
        ("y_stride", "<i4"),
    ]
)  # fmt: skip


def reference(x: FloatArray) -> FloatArray:
    """SiLU of the first half times the second half."""
    require_rank(_OP, "x", x, 2)
    if x.shape[1] % 2:
        fail(_OP, f"x has {x.shape[1]} columns, expected an even number")
    inner = x.shape[1] // 2
    y = silu(x[:, :inner])
    y *= x[:, inner:]
    return y


def launch(
    kernels: KernelLibrary,
    x: DeviceArray,
    y: DeviceArray,
    *,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    source = view_of(_OP, "x", x, "uint16", 2)
    tokens, columns = source.shape
    if tokens < 1 or columns < 16 or columns % 16:
        fail(_OP, f"x has shape {source.shape}: needs a row and a multiple of 16 columns")
    require_alignment(_OP, "x", source, "uint16", 16)
    inner = columns // 2
    output = require_view(
        _OP, "y", y, "uint16", (tokens, inner), alignment_bytes=16, allows_row_stride=True
    )
    params = np.zeros((), _PARAMS)
    params["x"], params["y"] = source.address, output.address
    params["tokens"], params["inner"] = tokens, inner
    params["x_stride"], params["y_stride"] = source.row_stride, output.row_stride
    most = kernels.limits.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
    blocks = min(most, -(-tokens * inner // (8 * _THREADS)))
    kernels.function("swiglu", "swiglu_bf16").launch(
        (blocks, 1, 1), (_THREADS, 1, 1), params, stream=stream, programmatic=is_chained
    )
