"""Random weights in every packed format, with what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.float_codecs import bf16_to_float, e2m1_to_float, e4m3_to_float, float_to_bf16
from ninfer.ops.linear_packing import (
    E2M1_SHIFT,
    ImageLayout,
    WeightFormat,
    interleave_gate_up,
    pack_bf16,
    pack_fp8_row,
    pack_fp8_scaled_rows,
    pack_nvfp4,
    unpack_bf16,
    unpack_fp8,
    unpack_fp8_scales,
    unpack_nvfp4,
)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """row_scale as the kernels take it, in the order of the image."""

    layout: ImageLayout
    image: NDArray[np.uint8]
    row_scale: NDArray[np.float32] | None


def random_packed(
    layout: ImageLayout, seed: int, *, is_interleaved: bool = False, scale: float = 1.0
) -> PackedWeight:
    """`scale` multiplies the decoded numbers, which are around 1 before it."""
    rng = np.random.default_rng([seed, layout.rows, layout.columns])
    rows, columns = layout.rows, layout.columns

    def order(matrix: NDArray[Any]) -> NDArray[Any]:
        return interleave_gate_up(matrix) if is_interleaved else matrix

    if layout.format is WeightFormat.BF16:
        values = (rng.standard_normal((rows, columns)) * scale).astype(np.float32)
        return PackedWeight(layout, pack_bf16(order(float_to_bf16(values)), layout), None)
    row_scale = (rng.uniform(0.5, 1.5, rows) * scale).astype(np.float32)
    if layout.format is WeightFormat.NVFP4:
        nibbles = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = rng.integers(0x28, 0x40, (rows, columns // 16), np.uint8)
        image = pack_nvfp4(order(nibbles), order(scales), layout)
        return PackedWeight(layout, image, order(row_scale * np.float32(E2M1_SHIFT)))
    codes = rng.integers(0, 0x48, (rows, columns), np.uint8) | rng.integers(
        0, 2, (rows, columns), np.uint8
    ) << np.uint8(7)
    if layout.format is WeightFormat.FP8_ROW:
        return PackedWeight(layout, pack_fp8_row(order(codes), layout), order(row_scale))
    parts = 2 if is_interleaved else 1
    blocks = rng.uniform(0.5, 1.5, (parts, -(-rows // parts // 128), -(-columns // 128))) * scale
    by_row = np.repeat(blocks, 128, axis=1)[:, : rows // parts].reshape(rows, -1)
    image = pack_fp8_scaled_rows(order(codes), order(by_row.astype(np.float32)), layout)
    return PackedWeight(layout, image, None)


def exact_rows(weight: PackedWeight, *, is_interleaved: bool = False) -> NDArray[np.float64]:
    """What the image stands for [N, K], nothing rounded, rows in natural order."""
    layout = weight.layout
    if layout.format is WeightFormat.BF16:
        values = bf16_to_float(unpack_bf16(weight.image, layout)).astype(np.float64)
    elif layout.format is WeightFormat.NVFP4:
        codes, scales = unpack_nvfp4(weight.image, layout)
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(layout.rows, -1)
        values = e2m1_to_float(nibbles).astype(np.float64) / E2M1_SHIFT
        values *= np.repeat(e4m3_to_float(scales), 16, axis=1)
    else:
        values = e4m3_to_float(unpack_fp8(weight.image, layout)).astype(np.float64)
        if layout.format is WeightFormat.FP8_BLOCK:
            values *= unpack_fp8_scales(weight.image, layout)
    if weight.row_scale is not None:
        values *= weight.row_scale[:, None]
    if not is_interleaved:
        return values
    pairs = values.reshape(layout.rows // 16, 2, 8, layout.columns).swapaxes(0, 1)
    return np.ascontiguousarray(pairs).reshape(values.shape)
