"""embedding: y[t] = scale * table[token_ids[t]].

Shapes     token_ids [T], table [V, C] -> y [T, C]; T >= 1; launch: C % 8 == 0
Dtypes     token_ids integer; table and y the same floating dtype; launch: int32 and bf16
Units      token ids in [0, V); scale > 0, and 1 copies bit by bit; launch: y rounded once
           square_sums[t, s] = sum of y[t, 32 s .. 32 s + 31]^2, f32 [T, ceil(C / 32)]
Effects    reference: a new array; table is only read. launch writes every element of y and of
           square_sums; ids are data to it: one outside [0, V) makes a row of NaN
Errors     OpContractError for a shape, a dtype, a scale or an id outside the above
Tolerance  EXACT; scaled FLOAT32_POINTWISE, launch BF16_POINTWISE
Source     Qwen3 and Qwen3.5 model definitions; config keys vocab_size, input_embedding_scale
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail, require_indices, require_rank
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "embedding"

_MAX_THREADS: Final = 512
_PARAMS: Final = np.dtype(
    [
        ("token_ids", "<u8"), ("table", "<u8"), ("y", "<u8"), ("square_sums", "<u8"),
        ("num_rows", "<i4"), ("columns", "<i4"), ("y_stride", "<i4"), ("scale", "<f4"),
    ]
)  # fmt: skip


def reference(
    token_ids: NDArray[np.integer[Any]], table: FloatArray, *, scale: float = 1.0
) -> FloatArray:
    """Rows of `table`, copied and scaled."""
    require_rank(_OP, "table", table, 2)
    require_indices(_OP, "token_ids", token_ids, table.shape[0])
    _check_scale(scale)
    y: FloatArray = table[token_ids]
    if scale != 1.0:
        y *= table.dtype.type(scale)
    return y


def launch(
    kernels: KernelLibrary,
    token_ids: DeviceArray,
    table: DeviceArray,
    y: DeviceArray,
    *,
    stream: int,
    square_sums: DeviceArray | None = None,
    scale: float = 1.0,
    is_chained: bool = False,
) -> None:
    """Queue the gather on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    rows = view_of(_OP, "table", table, "uint16", 2)
    num_rows, columns = rows.shape
    ids = view_of(_OP, "token_ids", token_ids, "int32", 1)
    tokens = ids.shape[0]
    if tokens < 1 or num_rows < 1 or columns < 8 or columns % 8:
        fail(_OP, f"{tokens} ids of a table {rows.shape}: needs an id and a multiple of 8 columns")
    if rows.row_stride != columns:
        fail(_OP, "the rows of table do not follow one another")
    _check_scale(scale)
    require_alignment(_OP, "table", rows, "uint16", 16)
    output = require_view(
        _OP, "y", y, "uint16", (tokens, columns), alignment_bytes=16, allows_row_stride=True
    )
    params = np.zeros((), _PARAMS)
    params["token_ids"], params["table"], params["y"] = ids.address, rows.address, output.address
    params["num_rows"], params["columns"] = num_rows, columns
    params["y_stride"], params["scale"] = output.row_stride, scale
    if square_sums is not None:
        shape = (tokens, -(-columns // 32))
        sums = require_view(_OP, "square_sums", square_sums, "float32", shape)
        params["square_sums"] = sums.address
    threads = min(_MAX_THREADS, -(-columns // 256) * 32)
    kernels.function("embedding", "embedding_bf16").launch(
        (tokens, 1, 1), (threads, 1, 1), params, stream=stream, programmatic=is_chained
    )


def _check_scale(scale: float) -> None:
    if not 0.0 < scale < float("inf"):
        fail(_OP, f"scale {scale} is not positive")
