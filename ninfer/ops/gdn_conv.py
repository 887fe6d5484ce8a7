"""gdn_conv: depthwise causal convolution over time with its window in StateImages, then SiLU.

    s = window[read_slots[b]] followed by x[b] along time
    y[b, t, c] = silu(sum_{j < W} weight[c, j] * s[b, t + j, c])
    window[write_slots[b]] = the last W - 1 columns of s[b], before convolution and SiLU

Shapes     x [B, T, Cd], weight [Cd, W], windows [slots, Cd, W - 1] (may be strided),
           read_slots and write_slots [B] -> y [B, T, Cd]; W >= 2
Dtypes     x, weight and windows the same floating dtype; slots integer
Units      tap W - 1 meets the newest input; the windows are oldest first
Effects    writes windows[write_slots] and nothing else; a slot may be read and written by one row
Errors     OpContractError for a shape, dtype or slot outside the above
Tolerance  FLOAT32_REDUCTION
Source     Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464); config key linear_conv_kernel_dim
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops.activations import silu
from ninfer.ops.checks import fail, require_indices, require_rank, require_same_dtype, require_shape

_OP = "gdn_conv"


def reference(
    x: FloatArray,
    weight: FloatArray,
    windows: FloatArray,
    read_slots: NDArray[np.integer[Any]],
    write_slots: NDArray[np.integer[Any]],
) -> FloatArray:
    """T inputs of B sequences; decode has T == 1, prefill B == 1."""
    _check(x, weight, windows, read_slots, write_slots)
    num_tokens, width = x.shape[1], weight.shape[1]
    series = np.concatenate((windows[read_slots].transpose(0, 2, 1), x), axis=1)
    y = series[:, :num_tokens] * weight[:, 0]
    for tap in range(1, width):
        y += series[:, tap : tap + num_tokens] * weight[:, tap]
    windows[write_slots] = series[:, num_tokens:].transpose(0, 2, 1)
    return silu(y)


def _check(
    x: FloatArray,
    weight: FloatArray,
    windows: FloatArray,
    read_slots: NDArray[np.integer[Any]],
    write_slots: NDArray[np.integer[Any]],
) -> None:
    require_rank(_OP, "x", x, 3)
    require_rank(_OP, "weight", weight, 2)
    num_rows, _, channels = x.shape
    width = weight.shape[1]
    if width < 2:
        fail(_OP, f"width {width} keeps no window")
    require_shape(_OP, "weight", weight, (channels, width))
    require_shape(_OP, "windows", windows, (windows.shape[0], channels, width - 1))
    require_shape(_OP, "read_slots", read_slots, (num_rows,))
    require_shape(_OP, "write_slots", write_slots, (num_rows,))
    require_indices(_OP, "read_slots", read_slots, windows.shape[0])
    require_indices(_OP, "write_slots", write_slots, windows.shape[0])
    require_same_dtype(_OP, x, weight, windows)
