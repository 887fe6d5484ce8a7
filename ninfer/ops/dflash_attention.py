"""dflash_attention: grouped-query attention of a block of guessed tokens over its context in pages
and over itself.

    position of query i and of block key i: p_i = start + i;  of context key j: j < start
    s[i, h, j] = scale * q[i, h] . k[j, h * Hk // H]      where key j is visible to query i
    y[i, h] = sum_j softmax_j(s[i, h, j]) v[j, h * Hk // H]
    visible    |p_i - p_j| < window, and p_j <= p_i in a causal layer

Shapes     q [T, H, D], k and v [T, Hk, D] of the block, H % Hk == 0; k_pages and v_pages
           [P, 64, Hk, D]; page_table [p], p * 64 >= start -> y [T, H, D]; T >= 1, start >= 0
Dtypes     all the same floating dtype
Units      scale usually D ** -0.5; window in tokens, >= 1, None for no bound
Effects    a new array; reads no context key that every query is too far from; pages may lie
           anywhere in the pool, with the same bits out
Workspace  scores of all visible keys, H * T * (T + min(start, window)) elements
Errors     OpContractError for a shape, dtype or length outside the above
Tolerance  FLOAT32_REDUCTION
Source     DFlash (arXiv:2602.06036), its authors' reference model; config keys layer_types,
           sliding_window, is_causal
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops.checks import fail, require_rank, require_same_dtype, require_shape

_OP = "dflash_attention"


def reference(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    page_table: NDArray[np.integer[Any]],
    *,
    start: int,
    window: int | None,
    is_causal: bool,
    scale: float,
) -> FloatArray:
    """Attention of one sequence's block."""
    num_tokens, num_heads, head_dim = _check(q, k, v, k_pages, v_pages, page_table, start, window)
    first = 0 if window is None else max(0, start - window + 1)
    keys = np.concatenate((_context(k_pages, page_table, first, start), k))
    values = np.concatenate((_context(v_pages, page_table, first, start), v))
    num_kv_heads = k.shape[1]
    grouped = (q * scale).reshape(num_tokens, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores: FloatArray = grouped @ keys.transpose(1, 2, 0)[:, None]
    scores[..., ~_visible(num_tokens, first, start, window, is_causal)] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    y: FloatArray = scores @ values.transpose(1, 0, 2)[:, None]
    y /= scores.sum(axis=-1, keepdims=True)
    return y.transpose(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _context(
    pages: FloatArray, page_table: NDArray[np.integer[Any]], first: int, stop: int
) -> FloatArray:
    """[stop - first, Hk, D] keys or values of the cache ordinals [first, stop)."""
    first_page = first // PAGE_TOKENS
    gathered = pages[page_table[first_page : -(-stop // PAGE_TOKENS)]]
    part: FloatArray = gathered.reshape(-1, *pages.shape[2:])
    begin = first_page * PAGE_TOKENS
    return part[first - begin : stop - begin]


def _visible(
    num_tokens: int, first: int, start: int, window: int | None, is_causal: bool
) -> NDArray[np.bool_]:
    """[T, keys]; every query sees itself."""
    stop = start + num_tokens
    distance = np.arange(start, stop)[:, None] - np.arange(first, stop)
    visible = distance >= 0 if is_causal else np.ones(distance.shape, np.bool_)
    if window is not None:
        visible &= np.abs(distance) < window
    return visible


def _check(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    page_table: NDArray[np.integer[Any]],
    start: int,
    window: int | None,
) -> tuple[int, int, int]:
    require_rank(_OP, "q", q, 3)
    require_rank(_OP, "k_pages", k_pages, 4)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    require_shape(_OP, "k", k, (num_tokens, num_kv_heads, head_dim))
    require_shape(_OP, "v", v, k.shape)
    pool = (k_pages.shape[0], PAGE_TOKENS, num_kv_heads, head_dim)
    require_shape(_OP, "k_pages", k_pages, pool)
    require_shape(_OP, "v_pages", v_pages, pool)
    require_same_dtype(_OP, q, k, v, k_pages, v_pages)
    if num_heads % num_kv_heads:
        fail(_OP, f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
    if not 0 <= start <= page_table.size * PAGE_TOKENS:
        fail(_OP, f"{start} tokens of context do not fit {page_table.size} pages")
    if window is not None and window < 1:
        fail(_OP, f"a window of {window} tokens")
    return num_tokens, num_heads, head_dim
