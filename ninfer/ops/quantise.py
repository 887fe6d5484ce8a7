"""quantise: bf16 weights to e4m3 with block or row scales, or to e2m1 with group scales.

    fp8_block  scale[b, c] = amax of the 128 x 128 block / 448;  code = e4m3(x / scale)
    fp8_row    scale[n]    = amax of the row / 448;              code = e4m3(x / scale)
    nvfp4      scale = amax of the matrix / (6 * 448)
               group[n, g] = e4m3(amax of 16 columns / 6 / scale);  code = e2m1(x / (group * scale))

A scale that would not be a normal float32 is 1 instead, and its weights come out as zeros. So do
the weights of a group whose scale rounds to zero.

Shapes     x [N, K], K % 8 == 0 (nvfp4: K % 16 == 0) -> codes [N, K] (nvfp4: [N, K / 2]), scales
           [ceil(N / 128), ceil(K / 128)], [N], or [N, K / 16]: what linear_pack takes
Dtypes     x bf16 (uint16); codes uint8; scales f32, nvfp4's groups e4m3 (uint8)
Units      row_scale [N] f32, for nvfp4: scale * linear_packing.E2M1_SHIFT, as PackedLinear wants it
Effects    writes every element of the outputs
Workspace  nvfp4: amax uint32 [1], zero before the first launch
Errors     OpContractError for another shape, dtype or alignment
Tolerance  EXACT
Source     OCP 8-bit and 4-bit floating point; NVFP4 two-level scales
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view
from ninfer.ops.float_codecs import (
    E2M1_MAX,
    E4M3_MAX,
    ByteArray,
    HalfArray,
    bf16_to_float,
    e4m3_to_float,
    float_to_e2m1,
    float_to_e4m3,
)
from ninfer.ops.linear_packing import E2M1_SHIFT, SCALE_BLOCK, SCALE_GROUP

_OP: Final = "quantise"

_THREADS: Final = 256
_BLOCKS_PER_MULTIPROCESSOR: Final = 8
_SMALLEST_NORMAL: Final = 2.0**-126
_PARAMS: Final = np.dtype(
    [
        ("x", "<u8"), ("codes", "<u8"), ("scales", "<u8"), ("row_scale", "<u8"), ("amax", "<u8"),
        ("rows", "<i4"), ("columns", "<i4"),
    ]
)  # fmt: skip


def reference_fp8_block(x: HalfArray) -> tuple[ByteArray, Float32Array]:
    """(codes, scales)."""
    values = bf16_to_float(x)
    rows, columns = values.shape
    padding = ((0, -rows % SCALE_BLOCK), (0, -columns % SCALE_BLOCK))
    padded = np.pad(np.abs(values), padding)
    blocks = padded.reshape(
        padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, padded.shape[1] // SCALE_BLOCK, SCALE_BLOCK
    )
    scales = _scale_of(blocks.max(axis=(1, 3)), E4M3_MAX)
    spread = np.repeat(np.repeat(scales, SCALE_BLOCK, axis=0), SCALE_BLOCK, axis=1)
    return float_to_e4m3(values / spread[:rows, :columns]), scales


def reference_fp8_row(x: HalfArray) -> tuple[ByteArray, Float32Array]:
    """(codes, scales)."""
    values = bf16_to_float(x)
    scales = _scale_of(np.abs(values).max(axis=1), E4M3_MAX)
    return float_to_e4m3(values / scales[:, None]), scales


def reference_nvfp4(x: HalfArray) -> tuple[ByteArray, ByteArray, Float32Array]:
    """(codes, group scales, row_scale)."""
    values = bf16_to_float(x)
    rows, columns = values.shape
    scale = _scale_of(np.abs(values).max(keepdims=True), E2M1_MAX * E4M3_MAX)[0, 0]
    most = np.abs(values).reshape(rows, columns // SCALE_GROUP, SCALE_GROUP).max(axis=2)
    groups = float_to_e4m3(most / np.float32(E2M1_MAX) / scale)
    steps = np.repeat(e4m3_to_float(groups) * scale, SCALE_GROUP, axis=1)
    quotients = np.divide(values, steps, out=np.zeros_like(values), where=steps > 0)
    nibbles = float_to_e2m1(quotients)
    codes = (nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)).astype(np.uint8)
    return codes, groups, np.full(rows, scale * np.float32(E2M1_SHIFT), np.float32)


def launch_fp8_block(
    kernels: KernelLibrary, x: DeviceArray, codes: DeviceArray, scales: DeviceArray, *, stream: int
) -> None:
    """Queue the codes and scales of 128 x 128 blocks; returns before it has run."""
    params, rows, columns = _params(x, codes, 8)
    blocks = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
    params["scales"] = require_view(_OP, "scales", scales, "float32", blocks).address
    _queue(kernels, "quantise_fp8_block", (blocks[1], blocks[0], 1), params, stream)


def launch_fp8_row(
    kernels: KernelLibrary, x: DeviceArray, codes: DeviceArray, scales: DeviceArray, *, stream: int
) -> None:
    """Queue the codes and scales of rows; returns before it has run."""
    params, rows, _ = _params(x, codes, 8)
    params["scales"] = require_view(_OP, "scales", scales, "float32", (rows,)).address
    _queue(kernels, "quantise_fp8_row", (rows, 1, 1), params, stream)


def launch_nvfp4(
    kernels: KernelLibrary,
    x: DeviceArray,
    codes: DeviceArray,
    scales: DeviceArray,
    row_scale: DeviceArray,
    *,
    amax: DeviceArray,
    stream: int,
) -> None:
    """Queue codes, group scales and row_scale; returns before it has run.

    amax   uint32 [1]; zero, or the bits of a larger magnitude that other matrices share
    """
    params, rows, columns = _params(x, codes, SCALE_GROUP)
    groups = (rows, columns // SCALE_GROUP)
    params["scales"] = require_view(_OP, "scales", scales, "uint8", groups).address
    params["row_scale"] = require_view(_OP, "row_scale", row_scale, "float32", (rows,)).address
    params["amax"] = require_view(_OP, "amax", amax, "uint32", (1,)).address
    most = kernels.limits.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
    grid = (min(most, -(-rows * groups[1] // _THREADS)), 1, 1)
    _queue(kernels, "quantise_amax", grid, params, stream)
    _queue(kernels, "quantise_nvfp4", grid, params, stream)


def _params(
    x: DeviceArray, codes: DeviceArray, column_step: int
) -> tuple[NDArray[np.void], int, int]:
    source = view_of(_OP, "x", x, "uint16", 2)
    rows, columns = source.shape
    if rows < 1 or columns < column_step or columns % column_step:
        fail(
            _OP, f"x has shape {source.shape}: needs a row and a multiple of {column_step} columns"
        )
    if source.row_stride != columns:
        fail(_OP, "the rows of x do not follow one another")
    require_alignment(_OP, "x", source, "uint16", 16)
    code_columns = columns // 2 if column_step == SCALE_GROUP else columns
    target = require_view(_OP, "codes", codes, "uint8", (rows, code_columns), alignment_bytes=8)
    params = np.zeros((), _PARAMS)
    params["x"], params["codes"] = source.address, target.address
    params["rows"], params["columns"] = rows, columns
    return params, rows, columns


def _queue(
    kernels: KernelLibrary,
    entry: str,
    grid: tuple[int, int, int],
    params: NDArray[np.void],
    stream: int,
) -> None:
    kernels.function("quantise", entry).launch(grid, (_THREADS, 1, 1), params, stream=stream)


def _scale_of(amax: Float32Array, most: float) -> Float32Array:
    scale = amax / np.float32(most)
    return np.where(scale >= np.float32(_SMALLEST_NORMAL), scale, np.float32(1.0))
