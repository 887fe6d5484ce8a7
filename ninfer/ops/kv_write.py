"""kv_write: put keys and values of new tokens into their places of the paged KV pool.

    pages[slot_mapping[t] // 64, slot_mapping[t] % 64] = x[t]     for keys and for values

Shapes     k and v [T, Hk, D]; k_pages and v_pages [P, 64, Hk, D], contiguous; slot_mapping [T]
Dtypes     k, v and pages the same floating dtype; slot_mapping integer
Units      slot = page id * PAGE_TOKENS + offset in the page, 0 <= slot < P * PAGE_TOKENS
Effects    writes the named places of both pools and nothing else; slots are distinct
Errors     OpContractError for a shape, dtype, stride or slot outside the above
Tolerance  EXACT
Source     Kwon et al. 2023 (arXiv:2309.06180), paged KV cache
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops.checks import fail, require_indices, require_rank, require_same_dtype, require_shape

_OP = "kv_write"


def reference(
    k: FloatArray,
    v: FloatArray,
    k_pages: FloatArray,
    v_pages: FloatArray,
    slot_mapping: NDArray[np.integer[Any]],
) -> None:
    """Scatter k and v into the pools."""
    require_rank(_OP, "k_pages", k_pages, 4)
    num_pages, page_tokens, num_kv_heads, head_dim = k_pages.shape
    if page_tokens != PAGE_TOKENS or not (
        k_pages.flags.c_contiguous and v_pages.flags.c_contiguous
    ):
        fail(_OP, f"pages must be contiguous and hold {PAGE_TOKENS} tokens")
    require_shape(_OP, "v_pages", v_pages, k_pages.shape)
    require_indices(_OP, "slot_mapping", slot_mapping, num_pages * page_tokens)
    require_shape(_OP, "k", k, (slot_mapping.size, num_kv_heads, head_dim))
    require_shape(_OP, "v", v, k.shape)
    require_same_dtype(_OP, k, v, k_pages, v_pages)
    k_pages.reshape(-1, num_kv_heads, head_dim)[slot_mapping] = k
    v_pages.reshape(-1, num_kv_heads, head_dim)[slot_mapping] = v


def slots_of(page_table: NDArray[np.integer[Any]], start: int, stop: int) -> NDArray[np.int64]:
    """[stop - start] slots of the cache ordinals [start, stop) of one sequence."""
    if not 0 <= start < stop <= page_table.size * PAGE_TOKENS:
        fail(_OP, f"tokens [{start}, {stop}) do not fit {page_table.size} pages")
    ordinals = np.arange(start, stop)
    return page_table[ordinals // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + (
        ordinals % PAGE_TOKENS
    )
