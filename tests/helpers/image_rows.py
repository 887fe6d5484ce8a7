"""kernels/dequantise.cu in NumPy: which bytes of an image a lane reads, and what it stores where.

It mirrors the kernel part by part and lane by lane and shares nothing with the packing functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat

UNWRITTEN = 0x7FC1
_SLAB_BYTES = {WeightFormat.NVFP4: 256, WeightFormat.FP8_BLOCK: 8}
_LANES = np.arange(32)


def dequantised(
    image: NDArray[np.uint8],
    layout: ImageLayout,
    row_scale: NDArray[np.float32] | None,
    *,
    is_interleaved: bool,
) -> NDArray[np.uint16]:
    """y [N, K] as the kernel writes it; elements it never writes stay UNWRITTEN."""
    y = np.full((layout.rows, layout.columns), UNWRITTEN, np.uint16)
    padded = np.zeros(layout.padded_shape[0], np.float32)
    padded[: layout.rows] = 0 if row_scale is None else row_scale
    total = layout.units_per_block * (
        (layout.row_blocks - 1) * 8 + layout.last_strips * layout.slices
    )
    for index in range(total):
        vectors, slab, first_row, first_column = _part_of(image, layout, index)
        for half in range(2):
            for tile in range(2):
                runs = _runs(layout.format, vectors, slab, padded, first_row, half, tile)
                row = first_row + tile * 16 + _LANES // 4
                for upper, (offset, run) in enumerate(runs):
                    _store(y, row + 8 * upper, first_column + offset, run, is_interleaved)
    return y


def _part_of(
    image: NDArray[np.uint8], layout: ImageLayout, index: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], int, int]:
    block = min(index // (layout.units_per_block * 8), layout.row_blocks - 1)
    within = index - block * layout.units_per_block * 8
    is_last = block == layout.row_blocks - 1
    strips = layout.last_strips if is_last else layout.strips_per_block
    parts = strips * layout.slices
    unit, part = within // parts, within % parts
    start = block * layout.units_per_block * layout.format.unit_bytes()
    start += unit * layout.format.unit_bytes(parts)
    vectors = image[start + part * 2048 : start + part * 2048 + 2048]
    slab_bytes = _SLAB_BYTES.get(layout.format, 0)
    slab = image[start + parts * 2048 + part * slab_bytes :][:slab_bytes]
    row = (block * layout.strips_per_block + part % strips) * 32
    column = (unit * layout.slices + part // strips) * layout.format.part_columns
    return vectors.view(np.uint32).reshape(2, 2, 32, 4), slab, row, column


def _runs(
    fmt: WeightFormat,
    vectors: NDArray[np.uint32],
    slab: NDArray[np.uint8],
    row_scale: NDArray[np.float32],
    first_row: int,
    half: int,
    tile: int,
) -> list[tuple[NDArray[np.intp], NDArray[np.uint16]]]:
    """For rows g and for rows g + 8: (first column of the lane, its numbers [32, n])."""
    words, q = vectors[half, tile], _LANES % 4
    if fmt is WeightFormat.BF16:
        return [(q * 8 + half * 4, _halves(words[:, upper::2])) for upper in range(2)]
    row = first_row + tile * 16 + _LANES // 4
    by = [row_scale[row], row_scale[row + 8]]
    if fmt is WeightFormat.FP8_BLOCK:
        by = [np.full(32, value) for value in slab.view(np.float32)]
    if fmt is not WeightFormat.NVFP4:
        pairs = [words & 0x87F087F0, ((words << 4) & 0x80F080F0) | ((words >> 4) & 0x07000700)]
        return [
            (half * 32 + q * 8, _scaled(_halves(pair), np.float32(2.0**120), scale))
            for pair, scale in zip(pairs, by, strict=True)
        ]
    scale_words = slab.view(np.uint32).reshape(32, 2)[:, half]
    scale_pairs = (
        scale_words & 0x87F087F0,
        ((scale_words << 4) & 0x80F080F0) | ((scale_words >> 4) & 0x07000700),
    )
    group = bf16_to_float(_halves(scale_pairs[tile][:, None])) * np.float32(2.0**120)
    group *= np.float32(2.0**118)
    turned = words >> 6 | words << 26
    fourth = ((words << 6) & 0x80C080C0) | ((words >> 2) & 0x01000100)
    both = ((words & 0x81C081C0, turned & 0x81C081C0), ((words << 4) & 0x81C081C0, fourth))
    return [
        (
            half * 64 + q * 16,
            _scaled(
                _halves(np.stack(pairs, axis=-1).reshape(32, 8)), group[:, upper, None], by[upper]
            ),
        )
        for upper, pairs in enumerate(both)
    ]


def _halves(words: NDArray[Any]) -> NDArray[np.uint16]:
    """[32, n] words -> [32, 2 n] numbers, low half first."""
    return np.ascontiguousarray(words, np.uint32).view(np.uint16)


def _scaled(codes: NDArray[np.uint16], exact: Any, scale: NDArray[np.float32]) -> Any:
    return float_to_bf16(bf16_to_float(codes) * exact * scale[:, None])


def _store(
    y: NDArray[np.uint16],
    rows: NDArray[np.intp],
    columns: NDArray[np.intp],
    run: NDArray[np.uint16],
    is_interleaved: bool,
) -> None:
    for lane in range(32):
        packed, column = int(rows[lane]), int(columns[lane])
        if packed >= y.shape[0] or column >= y.shape[1]:
            continue
        row = packed
        if is_interleaved:
            row = packed % 16 // 8 * (y.shape[0] // 2) + packed // 16 * 8 + packed % 8
        end = column + run.shape[1]
        written = y[row, column:end]
        assert (written == UNWRITTEN).all(), f"row {row}, columns {column}.. are written twice"
        written[...] = run[lane, : written.size]
