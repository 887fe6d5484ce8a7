"""dflash_conv: causal convolution along the tokens of a block, with taps that depend on the token.

    y[i, c] = sum_t (base[t, c] + dynamic[i, t, c // g]) * x[i - t, c]      t <= columns[i]

Shapes     x [N, C], rows of several blocks one behind another; columns [N] each row's place in its
           own block; dynamic [N, W, C / g], base [W, C] -> y [N, C]; N, W >= 1
Dtypes     x, dynamic and base the same floating dtype; columns integer
Units      column 0 begins a block, the next row of it has column 1, and so on
Effects    a new array; nothing crosses the beginning of a block
Errors     OpContractError for a shape, dtype or columns outside the above
Tolerance  FLOAT32_POINTWISE
Source     DFlash2, its authors' reference model; config keys conv_kernel_size, conv_group_size
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "dflash_conv"


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
