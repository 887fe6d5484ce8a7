"""copy_rows: target[target_rows[b]] = source[source_rows[b]], rows of bf16 numbers.

Shapes     source [S, C], target [D, C], C % 8 == 0; source_rows and target_rows [B] or None: b
Dtypes     bf16; indices int32
Units      indices in [0, S) and [0, D); target rows differ: the caller's promise
Effects    writes the named rows of target, which is no part of source
Errors     OpContractError for a shape, dtype, stride or alignment outside the above
Tolerance  EXACT
Source     the definition
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import IntArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "copy_rows"

_MAX_THREADS: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("source", "<u8"), ("target", "<u8"), ("source_rows", "<u8"), ("target_rows", "<u8"),
        ("columns", "<i4"), ("source_stride", "<i4"), ("target_stride", "<i4"), ("padding", "<i4"),
    ]
)  # fmt: skip


def reference(
    source: NDArray[Any],
    target: NDArray[Any],
    *,
    num_rows: int,
    source_rows: IntArray | None = None,
    target_rows: IntArray | None = None,
) -> None:
    """Writes rows of `target`."""
    every = np.arange(num_rows, dtype=np.int32)
    reads = every if source_rows is None else source_rows
    target[every if target_rows is None else target_rows] = source[reads]


def launch(
    kernels: KernelLibrary,
    source: DeviceArray,
    target: DeviceArray,
    *,
    num_rows: int,
    stream: int,
    source_rows: DeviceArray | None = None,
    target_rows: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue the copy of `num_rows` rows on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    params = np.zeros((), _PARAMS)
    views = {name: view_of(_OP, name, array, "uint16", 2) for name, array in
             (("source", source), ("target", target))}  # fmt: skip
    columns = views["source"].shape[1]
    if num_rows < 1 or columns < 8 or columns % 8:
        fail(_OP, f"{num_rows} rows of {columns} numbers: needs a row and a multiple of 8")
    params["columns"] = columns
    for name, view in views.items():
        if view.shape[1] != columns:
            fail(_OP, f"rows of {columns} numbers into {view.shape[1]}")
        require_alignment(_OP, name, view, "uint16", 16)
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    for name, rows, count in (
        ("source", source_rows, views["source"].shape[0]),
        ("target", target_rows, views["target"].shape[0]),
    ):
        if rows is not None:
            index = require_view(_OP, f"{name}_rows", rows, "int32", (num_rows,))
            params[f"{name}_rows"] = index.address
        elif count < num_rows:
            fail(_OP, f"{num_rows} rows, but {name} has {count}")
    threads = min(_MAX_THREADS, -(-columns // 256) * 32)
    kernels.function("draft_rounds", "copy_rows").launch(
        (num_rows, 1, 1), (threads, 1, 1), params, stream=stream, programmatic=is_chained
    )
