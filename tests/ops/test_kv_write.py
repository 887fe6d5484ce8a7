from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops import kv_write
from tests.helpers.arrays import f32, normal

PAGES = 7


@given(
    start=st.integers(0, 200), count=st.integers(1, 200), order=st.permutations(list(range(PAGES)))
)
def test_tokens_land_in_their_places_and_nowhere_else(
    start: int, count: int, order: list[int]
) -> None:
    stop = start + count
    rng = np.random.default_rng(start)
    k, v = f32(normal(rng, count, 2, 3)), f32(normal(rng, count, 2, 3))
    k_pages = np.full((PAGES, PAGE_TOKENS, 2, 3), np.float32(np.nan))
    v_pages = k_pages.copy()
    table = np.array(order, np.int32)
    kv_write.reference(k, v, k_pages, v_pages, kv_write.slots_of(table, start, stop))
    for ordinal in range(PAGES * PAGE_TOKENS):
        page, offset = order[ordinal // PAGE_TOKENS], ordinal % PAGE_TOKENS
        if start <= ordinal < stop:
            assert np.array_equal(k_pages[page, offset], k[ordinal - start])
            assert np.array_equal(v_pages[page, offset], v[ordinal - start])
        else:
            assert np.isnan(k_pages[page, offset]).all()
            assert np.isnan(v_pages[page, offset]).all()


def test_contract() -> None:
    pages, x = np.zeros((2, PAGE_TOKENS, 2, 3), np.float32), np.zeros((1, 2, 3), np.float32)
    slot = np.array([5])
    for slots in (np.array([128]), np.array([-1])):
        with pytest.raises(OpContractError, match="kv_write: slot_mapping"):
            kv_write.reference(x, x, pages, pages, slots)
    with pytest.raises(OpContractError, match="kv_write: v_pages"):
        kv_write.reference(x, x, pages, pages[:1], slot)
    with pytest.raises(OpContractError, match="kv_write: pages must be contiguous"):
        kv_write.reference(x, x, pages[:, :, ::-1], pages, slot)
    with pytest.raises(OpContractError, match="kv_write: pages must be contiguous"):
        kv_write.reference(x, x, pages[:, :32].copy(), pages, slot)
    with pytest.raises(OpContractError, match="kv_write: k has shape"):
        kv_write.reference(x[:, :1], x, pages, pages, slot)
    with pytest.raises(OpContractError, match="kv_write: dtypes"):
        kv_write.reference(x.astype(np.float64), x, pages, pages, slot)
    with pytest.raises(OpContractError, match="do not fit 2 pages"):
        kv_write.slots_of(np.array([0, 1], np.int32), 100, 129)
