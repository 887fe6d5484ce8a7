"""dequantise: y[n, k] = bf16(W[n, k] * scale), row-major, from the image that linear_small_t reads.

What a matrix product over many tokens takes: bf16 and unscaled e4m3 come out exactly, every scale
costs the one rounding to bf16.

Shapes     image of ImageLayout [N, K], row_scale [N] -> y [N, K]; is_interleaved: the image holds
           gate and up rows in turns of 8, y gets them in natural order (gate, then up), so that
           swiglu takes the product
Dtypes     y bf16 (uint16); row_scale f32, for fp8_row and nvfp4 alone, in the order of the image
Effects    writes every element of y and nothing else
Workspace  none
Errors     OpContractError for another shape, dtype or alignment
Tolerance  EXACT against `reference`
Source     ninfer/ops/linear_packing.py
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.kernels.device_array import DeviceArray
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.float_codecs import (
    ByteArray,
    HalfArray,
    e2m1_to_float,
    e4m3_to_float,
    float_to_bf16,
)
from ninfer.ops.linear_packing import (
    E2M1_SHIFT,
    SCALE_GROUP,
    ImageLayout,
    WeightFormat,
    unpack_bf16,
    unpack_fp8,
    unpack_fp8_scales,
    unpack_nvfp4,
)

_OP: Final = "dequantise"

_THREADS: Final = 256
_BLOCKS_PER_MULTIPROCESSOR: Final = 8
_PARAMS: Final = np.dtype(
    [
        ("image", "<u8"), ("row_scale", "<u8"), ("y", "<u8"), ("rows", "<i4"), ("columns", "<i4"),
        ("units_per_block", "<i4"), ("row_blocks", "<i4"), ("strips_per_block", "<i4"),
        ("last_strips", "<i4"), ("is_interleaved", "<i4"), ("y_stride", "<i4"),
    ]
)  # fmt: skip


def reference(
    image: ByteArray,
    layout: ImageLayout,
    *,
    row_scale: Float32Array | None = None,
    is_interleaved: bool = False,
) -> HalfArray:
    """y as bf16 codes, from the image itself."""
    _check_row_scale(layout, row_scale is not None)
    if layout.format is WeightFormat.BF16:
        y = unpack_bf16(image, layout)
    elif layout.format is WeightFormat.NVFP4:
        codes, scales = unpack_nvfp4(image, layout)
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(layout.rows, -1)
        values = e2m1_to_float(nibbles)
        values *= np.repeat(e4m3_to_float(scales), SCALE_GROUP, axis=1)
        values /= np.float32(E2M1_SHIFT)
        y = _scaled(values, row_scale)
    else:
        values = e4m3_to_float(unpack_fp8(image, layout))
        if layout.format is WeightFormat.FP8_BLOCK:
            values *= unpack_fp8_scales(image, layout)
        y = _scaled(values, row_scale)
    return natural_order(y) if is_interleaved else y


def natural_order(matrix: HalfArray) -> HalfArray:
    """The inverse of interleave_gate_up."""
    pairs = matrix.reshape(matrix.shape[0] // 16, 2, 8, matrix.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(0, 1)).reshape(matrix.shape)


def launch(
    kernels: KernelLibrary,
    layout: ImageLayout,
    image: DeviceArray,
    y: DeviceArray,
    *,
    row_scale: DeviceArray | None = None,
    is_interleaved: bool = False,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue y on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    _check_row_scale(layout, row_scale is not None)
    if is_interleaved and layout.rows % 16:
        fail(_OP, f"{layout.rows} gate and up rows are not a multiple of 16")
    source = require_view(_OP, "image", image, "uint8", (layout.image_bytes,), alignment_bytes=16)
    output = require_view(
        _OP, "y", y, "uint16", (layout.rows, layout.columns), alignment_bytes=16,
        allows_row_stride=True,
    )  # fmt: skip
    params = np.zeros((), _PARAMS)
    params["image"], params["y"], params["y_stride"] = (
        source.address, output.address, output.row_stride,
    )  # fmt: skip
    if row_scale is not None:
        scale = require_view(_OP, "row_scale", row_scale, "float32", (layout.rows,))
        params["row_scale"] = scale.address
    params["rows"], params["columns"] = layout.rows, layout.columns
    params["units_per_block"], params["row_blocks"] = layout.units_per_block, layout.row_blocks
    params["strips_per_block"] = layout.strips_per_block
    params["last_strips"], params["is_interleaved"] = layout.last_strips, is_interleaved
    warps = layout.strips * layout.parts
    most = kernels.limits.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
    kernels.function("dequantise", f"dequantise_{layout.format.value}").launch(
        (min(most, -(-warps * 32 // _THREADS)), 1, 1),
        (_THREADS, 1, 1),
        params,
        stream=stream,
        programmatic=is_chained,
    )


def _check_row_scale(layout: ImageLayout, is_given: bool) -> None:
    if is_given != layout.format.has_row_scale:
        fail(_OP, f"row_scale is for fp8_row and nvfp4, the weight is {layout.format.value}")


def _scaled(values: Float32Array, row_scale: Float32Array | None) -> HalfArray:
    if row_scale is not None:
        values = values * row_scale[:, None]
    return float_to_bf16(values)
