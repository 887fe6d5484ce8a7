"""dflash_logits: what a draft model makes of the products with its head.

    x = scale * logits;   y = cap * tanh(x / cap), or x without a cap

Shapes     logits [T, V] -> y [T, V]
           launch: in place, or with token_ids [Vd]: logits [T, Vd] -> y [T, V],
           y[t, token_ids[j]] for column j; rows of logits and y may have gaps
Dtypes     a floating dtype; launch: f32, token_ids int32
Units      scale > 0, cap > 0 or None; token ids differ: the caller's promise
Effects    writes logits in place when anything changes, and returns them; launch queues nothing
           when nothing does. With token_ids, writes the named places of y, which is no part of
           logits; ids outside [0, V) have none
Errors     OpContractError for a rank, shape, dtype, stride or factor outside the above
Tolerance  FLOAT32_POINTWISE
Source     DFlash, its authors' reference model; config keys output_multiplier,
           final_logit_softcapping, draft_vocab_size
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, DeviceView, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail, require_rank, require_same_dtype
from ninfer.ops.device_checks import require_view

_OP: Final = "dflash_logits"

_THREADS: Final = 256
_LOGITS_A_THREAD: Final = 4
_PARAMS: Final = np.dtype(
    [
        ("logits", "<u8"), ("token_ids", "<u8"), ("y", "<u8"), ("columns", "<i4"),
        ("num_ids", "<i4"), ("logits_stride", "<i4"), ("y_stride", "<i4"), ("scale", "<f4"),
        ("cap", "<f4"),
    ]
)  # fmt: skip


def reference(logits: FloatArray, *, scale: float, cap: float | None) -> FloatArray:
    """Scale, then bound softly."""
    require_rank(_OP, "logits", logits, 2)
    require_same_dtype(_OP, logits)
    _check_factors(scale, cap)
    if scale != 1.0:
        logits *= scale
    if cap is not None:
        logits /= cap
        np.tanh(logits, out=logits)
        logits *= cap
    return logits


def _check_factors(scale: float, cap: float | None) -> None:
    if not scale > 0.0 or (cap is not None and not cap > 0.0):
        fail(_OP, f"scale {scale} and cap {cap} are not positive")


def launch(
    kernels: KernelLibrary,
    logits: DeviceArray,
    *,
    scale: float,
    cap: float | None,
    stream: int,
    token_ids: DeviceArray | None = None,
    y: DeviceArray | None = None,
    is_chained: bool = False,
) -> None:
    """Queue scale and bound on `stream`; returns before it has run.

    token_ids, y   where the columns of logits belong; None, None: in place
    is_chained     may start while the kernel ahead of it in the stream still runs
    """
    source = view_of(_OP, "logits", logits, "float32", 2)
    num_rows, columns = source.shape
    if num_rows < 1 or columns < 1:
        fail(_OP, f"logits have shape {source.shape}")
    _check_factors(scale, cap)
    if (token_ids is None) != (y is None):
        fail(_OP, "needs both token_ids and y, or neither")
    params = np.zeros((), _PARAMS)
    target = source
    if token_ids is not None and y is not None:
        target = _scattered(y, num_rows)
        ids = require_view(_OP, "token_ids", token_ids, "int32", (columns,))
        params["token_ids"] = ids.address
    elif scale == 1.0 and cap is None:
        return
    params["logits"], params["logits_stride"] = source.address, source.row_stride
    params["y"], params["y_stride"] = target.address, target.row_stride
    params["columns"], params["num_ids"] = columns, target.shape[1]
    params["scale"], params["cap"] = scale, 0.0 if cap is None else cap
    blocks = -(-columns // (_THREADS * _LOGITS_A_THREAD))
    kernels.function("dflash", "dflash_logits").launch(
        (num_rows, blocks, 1), (_THREADS, 1, 1), params, stream=stream, programmatic=is_chained
    )


def _scattered(y: DeviceArray, num_rows: int) -> DeviceView:
    view = view_of(_OP, "y", y, "float32", 2)
    if view.shape[0] != num_rows or view.shape[1] < 1:
        fail(_OP, f"y has shape {view.shape}, expected {num_rows} rows")
    return view
