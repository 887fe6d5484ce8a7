"""dflash_conv: causal convolution along the tokens of a block, with taps that depend on the token.

    y[i, c] = sum_t (base[t, c] + dynamic[i, t, c // g]) * x[i - t, c]      t <= columns[i]

Shapes     x [N, C], rows of several blocks one behind another; columns [N] each row's place in its
           own block; dynamic [N, W, C / g], base [W, C] -> y [N, C]; N, W >= 1
           launch: blocks of W rows each, columns[i] = i % W; dynamic [N, 2 * taps * C / g] and base
           [2, taps, C] of both sides, C % 8 == 0; rows of x, dynamic and y may have gaps
Dtypes     x, dynamic and base the same floating dtype; columns integer; launch: bf16, sums in f32,
           y rounded once
Units      column 0 begins a block, the next row of it has column 1, and so on
Effects    a new array; nothing crosses the beginning of a block; launch writes every element of y,
           or adds to it if is_residual, and y is no part of an input
Errors     OpContractError for a shape, dtype or columns outside the above
Tolerance  FLOAT32_POINTWISE; launch BF16_REDUCTION
Source     DFlash2, its authors' reference model; config keys conv_kernel_size, conv_group_size
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape
from ninfer.ops.device_checks import require_view

_OP: Final = "dflash_conv"

_MAX_THREADS: Final = 256
_PARAMS: Final = np.dtype(
    [
        ("x", "<u8"), ("dynamic", "<u8"), ("base", "<u8"), ("y", "<u8"), ("channels", "<i4"),
        ("taps", "<i4"), ("groups", "<i4"), ("columns", "<i4"), ("x_stride", "<i4"),
        ("dynamic_stride", "<i4"), ("y_stride", "<i4"), ("is_residual", "<i4"),
    ]
)  # fmt: skip


def reference(
    x: FloatArray, dynamic: FloatArray, base: FloatArray, columns: NDArray[np.integer[Any]]
) -> FloatArray:
    """One side of a block convolution."""
    group_size = _check(x, dynamic, base, columns)
    y = np.zeros_like(x)
    for tap in range(base.shape[0]):
        rows = np.flatnonzero(columns >= tap)
        taps = base[tap] + np.repeat(dynamic[rows, tap], group_size, axis=1)
        y[rows] += taps * x[rows - tap]
    return y


def _check(
    x: FloatArray, dynamic: FloatArray, base: FloatArray, columns: NDArray[np.integer[Any]]
) -> int:
    """Channels of a group."""
    require_rank(_OP, "x", x, 2)
    require_rank(_OP, "dynamic", dynamic, 3)
    num_rows, num_channels = x.shape
    _, num_taps, num_groups = dynamic.shape
    require_shape(_OP, "dynamic", dynamic, (num_rows, num_taps, num_groups))
    require_shape(_OP, "base", base, (num_taps, num_channels))
    require_shape(_OP, "columns", columns, (num_rows,))
    require_same_dtype(_OP, x, dynamic, base)
    if num_channels % num_groups:
        fail(_OP, f"{num_groups} groups do not divide {num_channels} channels")
    follows = np.diff(columns) == 1
    if columns[0] != 0 or not (follows | (columns[1:] == 0)).all():
        fail(_OP, "columns do not count from the beginning of each block")
    return int(num_channels // num_groups)


def launch(
    kernels: KernelLibrary,
    x: DeviceArray,
    dynamic: DeviceArray,
    base: DeviceArray,
    y: DeviceArray,
    *,
    side: int,
    columns: int,
    stream: int,
    is_residual: bool = False,
    is_chained: bool = False,
) -> None:
    """Queue one side of a block convolution on `stream`; returns before it has run.

    side          0 or 1, whose taps are columns [side * taps * C / g, (side + 1) * taps * C / g) of
                  dynamic, tap by tap, and base[side]
    columns       W, rows of a block
    is_residual   y += what the convolution gives, rounded once
    is_chained    may start while the kernel ahead of it in the stream still runs
    """
    num_rows, channels = view_of(_OP, "x", x, "uint16", 2).shape
    num_sides, taps, _ = view_of(_OP, "base", base, "uint16", 3).shape
    if num_rows < 1 or channels < 8 or channels % 8 or taps < 1:
        fail(_OP, f"{num_rows} rows of {channels} channels, {taps} taps: not rows of vectors of 8")
    if num_sides != 2 or side not in (0, 1) or columns < 1 or num_rows % columns:
        fail(_OP, f"side {side} of {num_sides}, {num_rows} rows in blocks of {columns}")
    groups = _num_groups(dynamic, channels, taps)
    params = np.zeros((), _PARAMS)
    params["channels"], params["taps"], params["groups"] = channels, taps, groups
    params["columns"], params["is_residual"] = columns, is_residual
    weights = require_view(_OP, "base", base, "uint16", (2, taps, channels), alignment_bytes=16)
    params["base"] = weights.address + 2 * side * taps * channels
    for name, array, width, alignment in (
        ("x", x, channels, 16),
        ("dynamic", dynamic, 2 * taps * groups, 2),
        ("y", y, channels, 16),
    ):
        view = require_view(
            _OP, name, array, "uint16", (num_rows, width), alignment_bytes=alignment,
            allows_row_stride=True,
        )  # fmt: skip
        params[name], params[f"{name}_stride"] = view.address, view.row_stride
    params["dynamic"] += 2 * side * taps * groups
    threads = min(_MAX_THREADS, -(-channels // 256) * 32)
    entry = "dflash_conv" if channels // groups % 8 == 0 else "dflash_conv_narrow"
    kernels.function("dflash", entry).launch(
        (num_rows, -(-channels // (8 * threads)), 1), (threads, 1, 1), params,
        stream=stream, programmatic=is_chained,
    )  # fmt: skip


def _num_groups(dynamic: DeviceArray, channels: int, taps: int) -> int:
    width = view_of(_OP, "dynamic", dynamic, "uint16", 2).shape[1]
    groups = width // (2 * taps)
    if groups < 1 or width % (2 * taps) or channels % groups:
        fail(_OP, f"{width} columns of dynamic, two sides of {taps} taps, of {channels} channels")
    return groups
