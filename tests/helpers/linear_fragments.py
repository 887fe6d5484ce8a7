"""The small-T linear kernel's arithmetic in NumPy: packed words, bf16 pairs, tensor-core products.

It mirrors kernels/linear_small_t.cu and include/dtypes.cuh step by step, lane by lane, and shares
nothing with the packing functions.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat

Words: TypeAlias = NDArray[Any]
"""uint32."""


def product(
    image: NDArray[np.uint8], layout: ImageLayout, x: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Sums [T, N padded to 32] as the kernel forms them, before the row scale."""
    padded = np.zeros((x.shape[0], layout.padded_shape[1]), np.float64)
    padded[:, : x.shape[1]] = x
    y = np.zeros((x.shape[0], layout.padded_shape[0]))
    columns = layout.format.part_columns
    offset = 0
    for block in range(layout.row_blocks):
        is_last = block == layout.row_blocks - 1
        strips = layout.last_strips if is_last else layout.strips_per_block
        size = layout.format.unit_bytes(strips * layout.slices)
        for unit in range(layout.units_per_block):
            stage = image[offset : offset + size]
            offset += size
            for part in range(strips * layout.slices):
                start = unit * layout.unit_columns + part // strips * columns
                row = (block * layout.strips_per_block + part % strips) * 32
                x_part = padded[:, start : start + columns]
                y[:, row : row + 32] += _part(
                    layout.format, stage, strips * layout.slices, part, x_part
                )
    return y


def _part(
    fmt: WeightFormat, stage: NDArray[np.uint8], parts: int, part: int, x: NDArray[np.float64]
) -> NDArray[np.float64]:
    vectors = stage[part * 2048 : (part + 1) * 2048].view(np.uint32).reshape(2, 2, 32, 4)
    slab = stage[parts * 2048 :]
    y = np.zeros((x.shape[0], 32))
    for half in range(2):
        for tile in range(2):
            fragments, run = _fragments(fmt, vectors, slab, part, half, tile)
            base = half * 4 * run if fmt is not WeightFormat.BF16 else 0
            for m, a in fragments:
                y[:, tile * 16 : tile * 16 + 16] += _mma(a, x, base, run, m)
    if fmt is WeightFormat.FP8_BLOCK:
        low, high = slab[part * 8 : part * 8 + 8].view(np.float32)
        y *= np.tile(np.repeat([low, high], 8), 2)
    return y


def _fragments(
    fmt: WeightFormat, vectors: Words, slab: NDArray[np.uint8], part: int, half: int, tile: int
) -> tuple[list[tuple[int, Words]], int]:
    """(product index inside the lane's run, A registers [32 lanes, 4]) and the run's length."""
    words = vectors[half, tile]
    if fmt is WeightFormat.BF16:
        return [(half, words)], 8
    if fmt is WeightFormat.NVFP4:
        scales = slab[part * 256 : (part + 1) * 256].view(np.uint32).reshape(32, 2)[:, half]
        pair = (_first(scales), _second(scales))[tile]
        scale = _times(_times(pair, 2.0**120), 2.0**118)
        low, high = _splat(scale & 0xFFFF), _splat(scale >> 16)
        return [(m, _e2m1(words[:, m], low, high)) for m in range(4)], 16
    pairs = [pair for word in words.T for pair in (_first(word), _second(word))]
    registers = np.stack([_times(pair, 2.0**120) for pair in pairs], axis=-1)
    return [(m, registers[:, 4 * m : 4 * m + 4]) for m in range(2)], 8


def _mma(a: Words, x: NDArray[np.float64], base: int, run: int, m: int) -> NDArray[np.float64]:
    """m16n8k16: A from registers, B from lane q's run of natural columns of x."""
    lanes = np.arange(32)
    group, q = lanes // 4, lanes % 4
    left, right = np.zeros((16, 16)), np.zeros((x.shape[0], 16))
    for register in range(4):
        rows, first = group + (register % 2) * 8, 2 * q + (register // 2) * 8
        left[rows, first], left[rows, first + 1] = _floats(a[:, register])
    for lane_q in range(4):
        start = base + lane_q * run + 4 * m
        for register in range(2):
            at = 2 * lane_q + 8 * register
            right[:, at : at + 2] = x[:, start + 2 * register : start + 2 * register + 2]
    product: NDArray[np.float64] = right @ left.T
    return product


def _floats(pairs: Words) -> tuple[NDArray[Any], NDArray[Any]]:
    low, high = (pairs & 0xFFFF).astype(np.uint16), (pairs >> 16).astype(np.uint16)
    return bf16_to_float(low), bf16_to_float(high)


def _times(pairs: Words, factor: float | Words) -> Words:
    """A bf16x2 product, rounded to bf16 as the device does."""
    low, high = _floats(pairs)
    by = _floats(factor) if isinstance(factor, np.ndarray) else (factor, factor)
    products = [
        float_to_bf16((v * f).astype(np.float32)) for v, f in zip((low, high), by, strict=True)
    ]
    return products[0].astype(np.uint32) | products[1].astype(np.uint32) << 16


def _splat(half: Words) -> Words:
    both: Words = half | half << 16
    return both


def _first(words: Words) -> Words:
    return words & 0x87F087F0


def _second(words: Words) -> Words:
    return ((words << 4) & 0x80F080F0) | ((words >> 4) & 0x07000700)


def _e2m1(words: Words, low: Words, high: Words) -> Words:
    rotated = words >> 6 | words << 26
    pairs = [
        words & 0x81C081C0,
        (words << 4) & 0x81C081C0,
        rotated & 0x81C081C0,
        ((words << 6) & 0x80C080C0) | ((words >> 2) & 0x01000100),
    ]
    return np.stack([_times(p, s) for p, s in zip(pairs, (low, high) * 2, strict=True)], axis=-1)
