"""paged_attention: causal grouped-query attention of one sequence's newest tokens over its pages.

    s[t, h, j] = scale * q[t, h] . k[j, h * Hk // H]        for j <= start + t
    y[t, h] = sum_j softmax_j(s[t, h, j]) v[j, h * Hk // H]

Shapes     q [T, H, D], the queries of cache ordinals [start, start + T); k_pages and v_pages
           [P, 64, Hk, D], H % Hk == 0, already holding the keys up to start + T - 1;
           blocks from `key_blocks(page_table, start + T)` -> y [T, H, D]
Dtypes     all the same floating dtype
Units      scale usually D ** -0.5
Effects    a new array; pages may lie anywhere in the pool, in any order, with the same bits out
Workspace  scores of one key block, H * T * KEY_BLOCK_TOKENS elements
Errors     OpContractError for a shape, dtype or length outside the above
Tolerance  FLOAT32_REDUCTION
Source     Vaswani et al. 2017 (arXiv:1706.03762); blocks joined by the online softmax of Milakov
           and Gimelshein 2018 (arXiv:1805.02867); config keys num_attention_heads,
           num_key_value_heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "paged_attention"

KEY_BLOCK_TOKENS: Final = 1024
"""Keys whose scores exist at one time; blocks begin at multiples of it, so that a result does not
depend on how a prompt was cut."""
_HIDDEN: Final = -1e30
"""Score of a hidden key; finite, so that a block without a visible key stays a number."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBlock:
    """Tokens [start, stop) of a sequence and where they lie.

    pages   a slice when the page ids ascend by one (read without a copy), else the ids
    """

    start: int
    stop: int
    pages: slice | NDArray[np.integer[Any]]


def key_blocks(page_table: NDArray[np.integer[Any]], length: int) -> tuple[KeyBlock, ...]:
    """Cut the first `length` tokens of a page table into blocks."""
    if not 0 < length <= page_table.size * PAGE_TOKENS:
        fail(_OP, f"{length} tokens do not fit {page_table.size} pages")
    return tuple(
        _key_block(page_table, start, min(start + KEY_BLOCK_TOKENS, length))
        for start in range(0, length, KEY_BLOCK_TOKENS)
    )


def reference(
    q: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    blocks: tuple[KeyBlock, ...],
    *,
    start: int,
    scale: float,
) -> FloatArray:
    """Attention of T queries over start + T keys."""
    num_tokens, num_heads, head_dim = _check(q, k_pages, v_pages, blocks, start)
    num_kv_heads = k_pages.shape[2]
    group = num_heads // num_kv_heads
    grouped = (q * scale).reshape(num_tokens, num_kv_heads, group, head_dim)
    queries = grouped.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * num_tokens, head_dim)
    peak, mass, total = _attend(queries, k_pages, v_pages, blocks[0], start, num_tokens)
    for block in blocks[1:]:
        block_peak, block_mass, block_total = _attend(
            queries, k_pages, v_pages, block, start, num_tokens
        )
        new_peak = np.maximum(peak, block_peak)
        old, new = np.exp(peak - new_peak), np.exp(block_peak - new_peak)
        mass = mass * old + block_mass * new
        total = total * old + block_total * new
        peak = new_peak
    total /= mass
    y = total.reshape(num_kv_heads, group, num_tokens, head_dim).transpose(2, 0, 1, 3)
    return y.reshape(num_tokens, num_heads, head_dim)


def _attend(
    queries: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    block: KeyBlock,
    start: int,
    num_tokens: int,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Largest score [Hk, G * T, 1], sum of exp(score - largest), and that sum over values."""
    scores: FloatArray = queries @ _read(k_pages, block).transpose(1, 2, 0)
    if block.stop > start + 1:
        by_token = scores.reshape(scores.shape[0], -1, num_tokens, scores.shape[2])
        by_token += _mask(block, start, num_tokens, scores.dtype)
    peak: FloatArray = np.maximum.reduce(scores, axis=-1, keepdims=True)
    scores -= peak
    np.exp(scores, out=scores)
    mass: FloatArray = np.add.reduce(scores, axis=-1, keepdims=True)
    return peak, mass, scores @ _read(v_pages, block).transpose(1, 0, 2)


def _key_block(page_table: NDArray[np.integer[Any]], start: int, stop: int) -> KeyBlock:
    pages = page_table[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)]
    first = int(pages[0])
    if pages.size == 1 or bool((pages == np.arange(first, first + pages.size)).all()):
        return KeyBlock(start, stop, slice(first, first + pages.size))
    return KeyBlock(start, stop, pages)


def _read(pages: FloatArray, block: KeyBlock) -> FloatArray:
    """[block tokens, Hk, D], a view where the pages lie side by side."""
    tokens: FloatArray = pages[block.pages].reshape(-1, *pages.shape[2:])
    return tokens[: block.stop - block.start]


def _mask(block: KeyBlock, start: int, num_tokens: int, dtype: np.dtype[Any]) -> FloatArray:
    """[T, block tokens]: 0 where the key is visible, _HIDDEN where it lies after the query."""
    keys = np.arange(block.start, block.stop)
    queries = np.arange(start, start + num_tokens)
    mask: FloatArray = np.where(keys > queries[:, None], _HIDDEN, 0.0).astype(dtype)
    return mask


def _check(
    q: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    blocks: tuple[KeyBlock, ...],
    start: int,
) -> tuple[int, int, int]:
    require_rank(_OP, "q", q, 3)
    require_rank(_OP, "k_pages", k_pages, 4)
    num_tokens, num_heads, head_dim = q.shape
    num_pages, _, num_kv_heads, _ = k_pages.shape
    require_shape(_OP, "k_pages", k_pages, (num_pages, PAGE_TOKENS, num_kv_heads, head_dim))
    require_shape(_OP, "v_pages", v_pages, k_pages.shape)
    require_same_dtype(_OP, q, k_pages, v_pages)
    if num_heads % num_kv_heads:
        fail(_OP, f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
    if not blocks or start < 0 or blocks[-1].stop != start + num_tokens:
        fail(_OP, f"key blocks do not end at token {start + num_tokens}")
    return num_tokens, num_heads, head_dim
