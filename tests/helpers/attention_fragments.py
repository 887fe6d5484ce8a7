"""Index algebra of the paged attention kernels in NumPy: places, lanes, tensor-core products.

It mirrors include/paged_decode.cuh and include/kv_pages.cuh of the kernels lane by lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.float_codecs import HalfArray, bf16_to_float, float_to_bf16

Words: TypeAlias = NDArray[Any]
"""uint32."""
LANES: Final = [(g, q) for g in range(8) for q in range(4)]
WARPS: Final = 4


def stage_swizzle(row: int, row_bytes: int) -> int:
    return row & 2 if row_bytes == 64 else (row & 1) << 2 | (row & 2)


def query_swizzle(row: int, code_bytes: int) -> int:
    return (row & 1) << 2 | (row & 2) if code_bytes == 2 else row & 1


def probability_place(key: int) -> int:
    return (key & ~15) | (key & 3) << 2 | (key >> 2 & 3)


def key_addresses(code_bytes: int, head_dim: int) -> Iterator[list[int]]:
    """Byte addresses in a stage of each 16-byte read of keys g, a list of lanes a read."""
    row_bytes = head_dim * code_bytes
    for k in range(row_bytes // 64):
        yield [g * row_bytes + ((4 * k + q) ^ stage_swizzle(g, row_bytes)) * 16 for g, q in LANES]


def query_addresses(code_bytes: int, head_dim: int) -> Iterator[list[int]]:
    """The same of reads of queries g."""
    per_block = 16 // (8 * code_bytes)
    for k in range(head_dim * code_bytes // 64):
        for part in range(per_block):
            yield [
                g * 2 * head_dim
                + ((4 * k * per_block + per_block * q + part) ^ query_swizzle(g, code_bytes)) * 16
                for g, q in LANES
            ]


def value_addresses(code_bytes: int, head_dim: int) -> Iterator[tuple[int, list[int]]]:
    """(bytes a lane, byte addresses) of each read of values: four keys in a row, 8 parts each."""
    row_bytes, lane_bytes = head_dim * code_bytes, head_dim // 32 * code_bytes
    for warp in range(WARPS):
        for first in range(0, 64, 4):
            addresses = []
            for g, q in LANES:
                vector, rest = divmod((warp * 8 + g) * lane_bytes, 16)
                place = (vector ^ stage_swizzle(q, row_bytes)) * 16 + rest
                addresses.append((first + q) * row_bytes + place)
            yield lane_bytes, addresses


def bank_passes(addresses: list[int], lane_bytes: int) -> int:
    """Most passes that any group of lanes which the memory serves at once needs."""
    group = min(32, 128 // max(lane_bytes, 4))
    worst = 0
    for start in range(0, 32, group):
        words: dict[int, set[int]] = {}
        for address in addresses[start : start + group]:
            for word in range(address // 4, (address + lane_bytes - 1) // 4 + 1):
                words.setdefault(word % 32, set()).add(word)
        worst = max(worst, max(len(found) for found in words.values()))
    return worst


def store_page(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A page-head [64, row bytes] as it lies in a stage."""
    row_bytes = rows.shape[1]
    stage = np.zeros_like(rows)
    for row in range(rows.shape[0]):
        for vector in range(row_bytes // 16):
            place = (vector ^ stage_swizzle(row, row_bytes)) * 16
            stage[row, place : place + 16] = rows[row, vector * 16 : vector * 16 + 16]
    return stage.reshape(-1)


def weigh(
    stage: NDArray[np.uint8], probabilities: NDArray[np.float64], head_dim: int
) -> NDArray[np.float64]:
    """O [D, 8] of a bf16 page and probabilities [8, 64] through the lanes' fragments."""
    out = np.zeros((head_dim, 8))
    stored = np.zeros((8, 64))
    for key in range(64):
        stored[:, probability_place(key)] = probabilities[:, key]
    reads = list(value_addresses(2, head_dim))
    for warp in range(WARPS):
        for k in range(4):
            group = [reads[warp * 16 + 4 * k + i] for i in range(4)]
            for j in range(head_dim // 64):
                a, b = np.zeros((16, 16)), np.zeros((16, 8))
                for lane, (g, q) in enumerate(LANES):
                    pairs = [_pair(stage, address[lane] + 4 * j) for _, address in group]
                    for half, k_first in ((0, 2 * q), (1, 2 * q + 8)):
                        low, high = pairs[2 * half], pairs[2 * half + 1]
                        a[g, k_first : k_first + 2] = low[0], high[0]
                        a[g + 8, k_first : k_first + 2] = low[1], high[1]
                        from_place = 16 * k + 4 * q + 2 * half
                        b[k_first : k_first + 2, g] = stored[g, from_place : from_place + 2]
                c = a @ b
                for g in range(8):
                    dim = (warp * 8 + g) * (head_dim // 32) + 2 * j
                    out[dim] += c[g]
                    out[dim + 1] += c[g + 8]
    return out


def e4m3_pair(a: Words, b: Words, low: int, high: int) -> Words:
    """Bytes `low` of a and `high` of b as the bf16 pair that code_pair makes."""
    spread = _byte(a, low) << 8 | _byte(b, high) << 24 | _byte(a, 0) | _byte(a, 0) << 16
    numbers = (spread & 0x80008000) | ((spread >> 4) & 0x07F007F0)
    return _each_half(numbers, lambda x: x * np.float32(2.0**120))


def int8_pair(a: Words, b: Words, low: int, high: int) -> Words:
    spread = _byte(a, low) | _byte(b, high) << 16 | _byte(a, 0) << 8 | _byte(a, 0) << 24
    magnitude = (spread & 0x007F007F) | 0x43004300
    minus = (spread & 0x00800080) | 0xC300C300
    return _join([float_to_bf16(_half(magnitude, side) + _half(minus, side)) for side in (0, 1)])


def _pair(stage: NDArray[np.uint8], address: int) -> NDArray[np.float32]:
    codes: HalfArray = stage[address : address + 4].view(np.uint16)
    return bf16_to_float(codes)


def _byte(words: Words, index: int) -> Words:
    return words >> np.uint32(8 * index) & np.uint32(0xFF)


def _half(words: Words, side: int) -> NDArray[np.float32]:
    return bf16_to_float((words >> np.uint32(16 * side)).astype(np.uint16))


def _each_half(words: Words, function: Any) -> Words:
    return _join([float_to_bf16(function(_half(words, side))) for side in (0, 1)])


def _join(halves: list[HalfArray]) -> Words:
    return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)
