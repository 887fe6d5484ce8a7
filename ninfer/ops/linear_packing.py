"""The weight image that linear_small_t reads: what goes where, for bf16, e4m3 and e2m1 weights.

    matrix [N, K]  ->  strips of 32 rows  ->  row blocks of S = 1, 2, 4 or 8 strips (the last may
                       have fewer); a narrow matrix takes small blocks
    image          =   row blocks, each a row of units along K
    unit           =   8 / S slices along K, each a part for every strip of the block, then a slab
    part           =   32 rows by 32 (bf16), 64 (e4m3) or 128 (e2m1) columns, 2048 bytes:
                       4 vectors [half along K][tile of 16 rows], each 16 bytes for each of 32 lanes

Lane 4 * g + q holds rows g and g + 8 of a tile, and a run of columns with no gap: that permutes K
inside a tensor-core product, where order is free, and makes lane q's share of x one run of 16 or
32 bytes. e4m3 and e2m1 words have their bits spread so that few instructions make bf16 pairs
(kernels/include/dtypes.cuh undoes it).

    format      slab of a unit
    bf16        none
    fp8_row     none; the scale of a row is applied to its sum
    fp8_block   a part: f32 scale of rows g, f32 scale of rows g + 8; 64 bytes in all
    nvfp4       a part: 256 bytes of e4m3 scales; the global factor is applied to the sum

N is padded to 32 and K to whole units with zeros. NumPy here, and the same bytes on the device
by kernels/linear_pack.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.ops.checks import fail
from ninfer.ops.float_codecs import ByteArray, HalfArray

_OP: Final = "linear_packing"

STRIP_ROWS: Final = 32
PARTS_PER_UNIT: Final = 8
PART_BYTES: Final = 2048
SCALE_BLOCK: Final = 128
"""Rows and columns that share a scale in fp8_block."""
SCALE_GROUP: Final = 16
"""Columns that share a scale in nvfp4."""
E2M1_SHIFT: Final = 256.0
"""The kernel's e2m1 products come out so much too small; row scales make up for it."""


class WeightFormat(Enum):
    BF16 = "bf16"
    FP8_ROW = "fp8_row"
    FP8_BLOCK = "fp8_block"
    NVFP4 = "nvfp4"

    @property
    def part_columns(self) -> int:
        return {"bf16": 32, "nvfp4": 128}.get(self.value, 64)

    @property
    def has_row_scale(self) -> bool:
        return self in (WeightFormat.FP8_ROW, WeightFormat.NVFP4)

    def unit_bytes(self, parts: int = PARTS_PER_UNIT) -> int:
        """Bytes of a unit; only those of a last row block may have fewer than 8 parts."""
        if self is WeightFormat.NVFP4:
            return parts * (PART_BYTES + 256)
        return parts * PART_BYTES + (64 if self is WeightFormat.FP8_BLOCK else 0)


_ANY_ROWS: Final = 2**31
_FP8_STRIPS: Final = ((4096, 1), (8192, 2), (_ANY_ROWS, 8))
_STRIPS_BY_ROWS: Final = MappingProxyType(
    {
        WeightFormat.BF16: ((4096, 1), (8192, 2), (_ANY_ROWS, 4)),
        WeightFormat.FP8_ROW: _FP8_STRIPS,
        WeightFormat.FP8_BLOCK: _FP8_STRIPS,
        WeightFormat.NVFP4: ((8192, 2), (32768, 4), (_ANY_ROWS, 8)),
    }
)
"""(most rows, strips of a row block) of each format, as measured: bench/results/NOTES.md."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Sizes of the image of a matrix [rows, columns]. strips_per_block is 1, 2, 4 or 8."""

    format: WeightFormat
    rows: int
    columns: int
    strips_per_block: int

    @classmethod
    def of(cls, fmt: WeightFormat, rows: int, columns: int) -> ImageLayout:
        """The layout for this shape: row blocks small enough that few thread blocks share one."""
        steps = _STRIPS_BY_ROWS[fmt]
        return cls(fmt, rows, columns, next(count for most, count in steps if rows <= most))

    def __post_init__(self) -> None:
        if self.strips_per_block not in (1, 2, 4, 8):
            fail(_OP, f"{self.strips_per_block} strips a block are not 1, 2, 4 or 8")
        if self.rows < 1 or self.columns < 8 or self.columns % 8:
            fail(_OP, f"[{self.rows}, {self.columns}]: needs a row and a multiple of 8 columns")
        if self.format is WeightFormat.NVFP4 and self.columns % SCALE_GROUP:
            fail(_OP, f"{self.columns} columns are not a multiple of {SCALE_GROUP}")

    @property
    def strips(self) -> int:
        return -(-self.rows // STRIP_ROWS)

    @property
    def row_blocks(self) -> int:
        return -(-self.strips // self.strips_per_block)

    @property
    def last_strips(self) -> int:
        """Strips of the last row block."""
        return self.strips - (self.row_blocks - 1) * self.strips_per_block

    @property
    def slices(self) -> int:
        """Parts of a strip in a unit."""
        return PARTS_PER_UNIT // self.strips_per_block

    @property
    def unit_columns(self) -> int:
        return self.slices * self.format.part_columns

    @property
    def units_per_block(self) -> int:
        return -(-self.columns // self.unit_columns)

    @property
    def parts(self) -> int:
        """Parts of a strip in all."""
        return self.units_per_block * self.slices

    @property
    def units(self) -> int:
        return self.row_blocks * self.units_per_block

    @property
    def image_bytes(self) -> int:
        full = (self.row_blocks - 1) * self.format.unit_bytes()
        last = self.format.unit_bytes(self.last_strips * self.slices)
        return self.units_per_block * (full + last)

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.strips * STRIP_ROWS, self.units_per_block * self.unit_columns


def pack_bf16(codes: HalfArray, layout: ImageLayout) -> ByteArray:
    """bf16 codes [N, K] -> image."""
    _check(layout, codes.shape, WeightFormat.BF16)
    padded = _pad(codes, layout.padded_shape)
    # rows: strip, tile, r, g; columns: part, q, half, c, e
    split = padded.reshape(layout.strips, 2, 2, 8, layout.parts, 4, 2, 2, 2)
    fragments = np.ascontiguousarray(split.transpose(0, 4, 6, 1, 3, 5, 7, 2, 8))
    return _assemble(layout, fragments.view(np.uint8), None)


def unpack_bf16(image: ByteArray, layout: ImageLayout) -> HalfArray:
    """The inverse of pack_bf16."""
    tiles, _ = _disassemble(layout, image)
    split = tiles.view(np.uint16).reshape(layout.strips, layout.parts, 2, 2, 8, 4, 2, 2, 2)
    rows = split.transpose(0, 3, 7, 4, 1, 5, 2, 6, 8).reshape(layout.padded_shape)
    return np.ascontiguousarray(rows[: layout.rows, : layout.columns])


def pack_fp8_row(codes: ByteArray, layout: ImageLayout) -> ByteArray:
    """e4m3 codes [N, K] -> image; the row scales stay apart."""
    _check(layout, codes.shape, WeightFormat.FP8_ROW)
    return _assemble(layout, _e4m3_tiles(codes, layout), None)


def pack_fp8_block(codes: ByteArray, scales: Float32Array, layout: ImageLayout) -> ByteArray:
    """e4m3 codes [N, K] and scales [ceil(N / 128), ceil(K / 128)] -> image."""
    rows = np.repeat(scales, SCALE_BLOCK, axis=0)
    return pack_fp8_scaled_rows(codes, rows[: layout.rows], layout)


def pack_fp8_scaled_rows(codes: ByteArray, scales: Float32Array, layout: ImageLayout) -> ByteArray:
    """As pack_fp8_block with scales [N, ceil(K / 128)].

    Rows 0..7 and 16..23 of a strip share one scale, and so do the others: true of rows in their
    natural order and of gate and up rows interleaved by 8.
    """
    _check(layout, codes.shape, WeightFormat.FP8_BLOCK)
    if scales.shape != (layout.rows, -(-layout.columns // SCALE_BLOCK)):
        fail(_OP, f"scales have shape {scales.shape} for codes {codes.shape}")
    by_part = np.repeat(scales, 2, axis=1)[:, : layout.parts]
    padded = _pad(by_part, (layout.padded_shape[0], layout.parts))
    split = padded.reshape(layout.strips, 2, 2, 8, layout.parts)
    slab = np.ascontiguousarray(split[:, 0, :, 0].transpose(0, 2, 1), np.float32)
    return _assemble(layout, _e4m3_tiles(codes, layout), slab.view(np.uint8))


def unpack_fp8(image: ByteArray, layout: ImageLayout) -> ByteArray:
    """The codes [N, K] of an fp8_row or fp8_block image."""
    tiles, _ = _disassemble(layout, image)
    words = tiles.view(np.uint16).reshape(layout.strips, layout.parts, 2, 2, 8, 4, 2, 2, 2)
    first, second = _join_e4m3(words)
    # strip, part, half, tile, g, q, m, c, e, then r
    split = np.stack([first, second], axis=-1)
    rows = split.transpose(0, 3, 9, 4, 1, 2, 5, 6, 7, 8).reshape(layout.padded_shape)
    return np.ascontiguousarray(rows[: layout.rows, : layout.columns])


def unpack_fp8_scales(image: ByteArray, layout: ImageLayout) -> Float32Array:
    """The scale of every element [N, K] of an fp8_block image."""
    _, slab = _disassemble(layout, image)
    # strip, part, r; rows of a strip: tile, r, g
    pairs = slab.view(np.float32).reshape(layout.strips, 1, layout.parts, 2).transpose(0, 1, 3, 2)
    rows = np.repeat(np.repeat(pairs, 2, axis=1), 8, axis=2).reshape(-1, layout.parts)
    by_column = np.repeat(rows, layout.format.part_columns, axis=1)
    return np.ascontiguousarray(by_column[: layout.rows, : layout.columns])


def pack_nvfp4(codes: ByteArray, scales: ByteArray, layout: ImageLayout) -> ByteArray:
    """e2m1 bytes [N, K / 2] (even column in the low nibble), e4m3 scales [N, K / 16] -> image."""
    _check(layout, (codes.shape[0], codes.shape[1] * 2), WeightFormat.NVFP4)
    if scales.shape != (layout.rows, layout.columns // SCALE_GROUP):
        fail(_OP, f"scales have shape {scales.shape} for codes {codes.shape}")
    rows, columns = layout.padded_shape
    nibbles = np.empty((rows, columns), np.uint16)
    padded = _pad(codes, (rows, columns // 2))
    nibbles[:, 0::2], nibbles[:, 1::2] = padded & 15, padded >> 4
    # rows: strip, tile, r, g; columns: part, half, q, m, c, e
    split = nibbles.reshape(layout.strips, 2, 2, 8, layout.parts, 2, 4, 4, 2, 2)
    pairs = split.transpose(0, 4, 5, 1, 3, 6, 7, 8, 2, 9)
    words = _spread_e2m1(*(pairs[..., c, r, :] for c in (0, 1) for r in (0, 1)))
    return _assemble(layout, words.view(np.uint8), _nvfp4_slab(scales, layout))


def unpack_nvfp4(image: ByteArray, layout: ImageLayout) -> tuple[ByteArray, ByteArray]:
    """The inverse of pack_nvfp4: codes [N, K / 2] and scales [N, K / 16]."""
    tiles, slab = _disassemble(layout, image)
    strips, parts = layout.strips, layout.parts
    words = tiles.view(np.uint16).reshape(strips, parts, 2, 2, 8, 4, 4, 2)
    # strip, part, half, tile, g, q, m, e, then c, r
    split = np.stack(_join_e2m1(words), axis=-1).reshape(*words.shape, 2, 2)
    rows = split.transpose(0, 3, 9, 4, 1, 2, 5, 6, 8, 7).reshape(layout.padded_shape)
    nibbles = rows[: layout.rows, : layout.columns]
    first, second = _join_e4m3(slab.view(np.uint16).reshape(strips, parts, 8, 4, 2, 2))
    # strip, part, g, q, half, r, then tile
    groups = np.stack([first, second], axis=-1).transpose(0, 6, 5, 2, 1, 4, 3)
    scales = groups.reshape(layout.padded_shape[0], layout.padded_shape[1] // SCALE_GROUP)
    return (
        np.ascontiguousarray(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8),
        np.ascontiguousarray(scales[: layout.rows, : layout.columns // SCALE_GROUP]),
    )


def interleave_gate_up(matrix: NDArray[Any]) -> NDArray[Any]:
    """Rows [gate (I); up (I)] -> 8 gate rows, their 8 up rows, the next 8 gate rows, ..."""
    rows = matrix.shape[0]
    if rows % 16:
        fail(_OP, f"{rows} gate and up rows are not a multiple of 16")
    pairs = matrix.reshape(2, rows // 16, 8, *matrix.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(0, 1)).reshape(matrix.shape)


def _check(layout: ImageLayout, shape: tuple[int, ...], fmt: WeightFormat) -> None:
    if shape != (layout.rows, layout.columns) or fmt is not layout.format:
        fail(_OP, f"{fmt.value} codes of {shape} do not fit the layout of {layout}")


def _e4m3_tiles(codes: ByteArray, layout: ImageLayout) -> ByteArray:
    padded = _pad(codes, layout.padded_shape)
    # rows: strip, tile, r, g; columns: part, half, q, m, c, e
    split = padded.reshape(layout.strips, 2, 2, 8, layout.parts, 2, 4, 2, 2, 2)
    by_row = split.transpose(2, 0, 4, 5, 1, 3, 6, 7, 8, 9)
    return _spread_e4m3(by_row[0], by_row[1]).view(np.uint8)


def _nvfp4_slab(scales: ByteArray, layout: ImageLayout) -> ByteArray:
    rows, columns = layout.padded_shape
    padded = _pad(scales, (rows, columns // SCALE_GROUP))
    # rows: strip, tile, r, g; groups: part, half, q
    split = padded.reshape(layout.strips, 2, 2, 8, layout.parts, 2, 4)
    by_tile = split.transpose(1, 0, 4, 3, 6, 5, 2)
    return _spread_e4m3(by_tile[0], by_tile[1]).view(np.uint8)


def _spread_e4m3(first: NDArray[Any], second: NDArray[Any]) -> HalfArray:
    """Half words that hold one number of the first and one of the second pair."""
    a, b = first.astype(np.uint16), second.astype(np.uint16)
    word = (a & 0x80) << 8 | (a & 0x7F) << 4 | (b & 0x70) << 8 | (b & 0x80) << 4 | (b & 0x0F)
    return np.ascontiguousarray(word, np.uint16)


def _join_e4m3(words: HalfArray) -> tuple[ByteArray, ByteArray]:
    first = (words >> 8 & 0x80) | (words >> 4 & 0x7F)
    second = (words >> 8 & 0x70) | (words >> 4 & 0x80) | (words & 0x0F)
    return first.astype(np.uint8), second.astype(np.uint8)


def _spread_e2m1(*pairs: NDArray[Any]) -> HalfArray:
    """Half words [.., e] that hold number e of each of four pairs [.., e].

    The sign of the third pair sits in the other half, where the kernel's rotation wants it.
    """
    p0, p1, p2, p3 = (pair.astype(np.uint16) for pair in pairs)
    word = (p0 & 8) << 12 | (p0 & 7) << 6 | (p1 & 8) << 8 | (p1 & 7) << 2
    word |= (p2 & 7) << 12 | (p2[..., ::-1] & 8) << 2
    word |= (p3 & 8) << 6 | (p3 & 4) << 8 | (p3 & 3)
    return np.ascontiguousarray(word, np.uint16)


def _join_e2m1(words: HalfArray) -> tuple[ByteArray, ByteArray, ByteArray, ByteArray]:
    other = words[..., ::-1]
    p0 = (words >> 12 & 8) | (words >> 6 & 7)
    p1 = (words >> 8 & 8) | (words >> 2 & 7)
    p2 = (other >> 2 & 8) | (words >> 12 & 7)
    p3 = (words >> 6 & 8) | (words >> 8 & 4) | (words & 3)
    return p0.astype(np.uint8), p1.astype(np.uint8), p2.astype(np.uint8), p3.astype(np.uint8)


def _pad(matrix: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if matrix.shape == shape:
        return np.ascontiguousarray(matrix)
    padded = np.zeros(shape, matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _assemble(layout: ImageLayout, tiles: ByteArray, slab: ByteArray | None) -> ByteArray:
    """tiles: 2048 bytes a [strip, part]; slab: the same bytes a [strip, part], or None."""
    strips, units, slices = layout.strips, layout.units_per_block, layout.slices
    tiles = tiles.reshape(strips, units, slices, PART_BYTES)
    slabs = slab.reshape(strips, units, slices, -1) if slab is not None else tiles[..., :0]
    image = np.zeros(layout.image_bytes, np.uint8)
    for block, first, count in _row_blocks(layout, image):
        end = count * slices * PART_BYTES
        rows = slice(first, first + count)
        block[:, :end] = tiles[rows].transpose(1, 2, 0, 3).reshape(units, -1)
        used = end + count * slices * slabs.shape[3]
        block[:, end:used] = slabs[rows].transpose(1, 2, 0, 3).reshape(units, -1)
    return image


def _disassemble(layout: ImageLayout, image: ByteArray) -> tuple[ByteArray, ByteArray]:
    strips, units, slices = layout.strips, layout.units_per_block, layout.slices
    slab_bytes = {WeightFormat.NVFP4: 256, WeightFormat.FP8_BLOCK: 8}.get(layout.format, 0)
    tiles = np.empty((strips, units, slices, PART_BYTES), np.uint8)
    slabs = np.empty((strips, units, slices, slab_bytes), np.uint8)
    for block, first, count in _row_blocks(layout, image):
        end = count * slices * PART_BYTES
        rows = slice(first, first + count)
        tile = block[:, :end].reshape(units, slices, count, PART_BYTES)
        tiles[rows] = tile.transpose(2, 0, 1, 3)
        slab = block[:, end : end + count * slices * slab_bytes]
        slabs[rows] = slab.reshape(units, slices, count, slab_bytes).transpose(2, 0, 1, 3)
    return tiles, slabs


def _row_blocks(layout: ImageLayout, image: ByteArray) -> list[tuple[ByteArray, int, int]]:
    """Row blocks as (bytes [units, unit bytes], first strip, strips)."""
    blocks, offset = [], 0
    for index in range(layout.row_blocks):
        is_last = index == layout.row_blocks - 1
        count = layout.last_strips if is_last else layout.strips_per_block
        size = layout.units_per_block * layout.format.unit_bytes(count * layout.slices)
        block = image[offset : offset + size].reshape(layout.units_per_block, -1)
        blocks.append((block, index * layout.strips_per_block, count))
        offset += size
    return blocks
