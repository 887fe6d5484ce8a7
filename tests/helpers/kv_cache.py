"""A layer's KV pages in NumPy: poisoned pools, fragmented page tables, what rows hold in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops import kv_pages, paged_attention
from ninfer.ops.activations import sigmoid
from ninfer.ops.float_codecs import HalfArray, bf16_to_float, float_to_bf16

FORMATS: Final = ("bf16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class PagesOnDevice:
    """What the Ops take: arrays with the CUDA array interface."""

    pages: Any
    scales: Any


@dataclass(slots=True, eq=False)
class KvCache:
    """Pools of one layer, every unwritten number a NaN where the format has one.

    keys, values   f64 [length, Hk, D] of each row, what the pools hold for it
    """

    kv_format: str
    head_dim: int
    pages: NDArray[Any]
    scales: NDArray[Any] | None
    page_tables: NDArray[np.int32]
    keys: list[NDArray[np.float64]]
    values: list[NDArray[np.float64]]

    @property
    def scale(self) -> float:
        """Of scores."""
        return 1.0 / math.sqrt(self.head_dim)


def random_bf16(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> HalfArray:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return float_to_bf16(values.astype(np.float32))


def wide(codes: HalfArray) -> NDArray[np.float64]:
    return bf16_to_float(codes).astype(np.float64)


def empty_cache(
    kv_format: str, rows: int, max_pages: int, kv_heads: int, head_dim: int, seed: int
) -> KvCache:
    """Page tables of all rows over one shuffled pool, some pages nobody's."""
    count = rows * max_pages + 3
    width = kv_pages.stored_dim(head_dim)
    shape = (count, 2, kv_heads, PAGE_TOKENS, width)
    order = np.random.default_rng(seed).permutation(count)[: rows * max_pages]
    tables = order.reshape(rows, max_pages).astype(np.int32)
    if kv_format == "bf16":
        nans = np.full(shape, 0x7FC1, np.uint16)
        return KvCache(kv_format, head_dim, nans, None, tables, [], [])
    if kv_format == "fp8":
        scales = np.full(shape[:-1], np.nan, np.float32)
        codes = np.full(shape, 0x7F, np.uint8)
        return KvCache(kv_format, head_dim, codes, scales, tables, [], [])
    groups = np.full((*shape[:-1], width // 64), np.nan, np.float16)
    return KvCache(kv_format, head_dim, np.full(shape, -128, np.int8), groups, tables, [], [])


def stored(heads: HalfArray) -> HalfArray:
    """Heads bf16 [.., D] as wide as their places, zeros behind their numbers."""
    rest = kv_pages.stored_dim(heads.shape[-1]) - heads.shape[-1]
    return np.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, rest)])


def fill_row(cache: KvCache, row: int, keys: HalfArray, values: HalfArray) -> None:
    """Put bf16 [length, Hk, D] at the ordinals from 0 of the next row."""
    stored = [_store(cache, row, part, data) for part, data in enumerate((keys, values))]
    cache.keys.append(stored[0])
    cache.values.append(stored[1])


def filled_cache(
    kv_format: str,
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    *,
    seed: int = 0,
    max_pages: int | None = None,
    magnitude: float = 1.0,
) -> KvCache:
    """Random keys (times `magnitude`) and values of rows of these lengths."""
    pages = max_pages or max(1, -(-max(lengths) // PAGE_TOKENS))
    cache = empty_cache(kv_format, len(lengths), pages, kv_heads, head_dim, seed)
    for row, length in enumerate(lengths):
        shape = (length, kv_heads, head_dim)
        keys = random_bf16(shape, 10 * seed + 2 * row, magnitude)
        fill_row(cache, row, keys, random_bf16(shape, 10 * seed + 2 * row + 1))
    return cache


def attend(
    cache: KvCache,
    row: int,
    q: HalfArray,
    start: int,
    *,
    gate: HalfArray | None = None,
    rounds_codes: bool = False,
) -> NDArray[np.float64]:
    """paged_attention [T, H * D] in float64 of q and gate [T, H, D] at ordinals from `start`.

    rounds_codes   keys and values of 8 bits are rounded to bf16 first
    """
    length = start + q.shape[0]
    pages = [
        _in_order(_rounded(data[:length]) if rounds_codes else data[:length])
        for data in (cache.keys[row], cache.values[row])
    ]
    blocks = paged_attention.key_blocks(np.arange(pages[0].shape[0]), length)
    y = paged_attention.reference(
        wide(q), pages[0], pages[1], blocks, start=start, scale=cache.scale
    )
    if gate is not None:
        y = y * sigmoid(wide(gate))
    return y.reshape(q.shape[0], -1).astype(np.float64)


def projection(gate: HalfArray, kv_heads: int) -> HalfArray:
    """A projection [T, 2 * H * D + 2 * Hk * D] of NaNs but for the gates [T, H, D]."""
    tokens, heads, head_dim = gate.shape
    qkv = np.full((tokens, 2 * (heads + kv_heads) * head_dim), 0x7FC1, np.uint16)
    qkv[:, : 2 * heads * head_dim].reshape(tokens, heads, 2, head_dim)[:, :, 1] = gate
    return qkv


def places(cache: KvCache, row: int, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Page and offset of the ordinals [0, length) of a row."""
    ordinals = np.arange(length)
    return cache.page_tables[row, ordinals // PAGE_TOKENS], ordinals % PAGE_TOKENS


def _store(cache: KvCache, row: int, part: int, data: HalfArray) -> NDArray[np.float64]:
    page, offset = places(cache, row, data.shape[0])
    if cache.scales is None:
        cache.pages[page, part, :, offset] = stored(data)
        return wide(data)
    codes, scales = kv_pages.encode(bf16_to_float(stored(data)), cache.kv_format)
    cache.pages[page, part, :, offset] = codes
    cache.scales[page, part, :, offset] = scales
    return kv_pages.decode(codes, scales, cache.kv_format)[..., : cache.head_dim]


def _rounded(data: NDArray[np.float64]) -> NDArray[np.float64]:
    values: Float32Array = data.astype(np.float32)
    return wide(float_to_bf16(values))


def _in_order(data: NDArray[np.float64]) -> NDArray[np.float64]:
    padded = np.pad(data, ((0, -data.shape[0] % PAGE_TOKENS), (0, 0), (0, 0)))
    return padded.reshape(-1, PAGE_TOKENS, *data.shape[1:])
