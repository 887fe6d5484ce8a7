"""The index algebra of paged attention: right products, exact codes, no bank met twice."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.ops.float_codecs import bf16_to_float, e4m3_to_float
from tests.helpers import attention_fragments as fragments
from tests.helpers.kv_cache import random_bf16, wide

HEAD_DIMS = [64, 128, 256]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lanes_take_every_byte_of_a_page_once(head_dim: int) -> None:
    for code_bytes in (1, 2):
        row_bytes = head_dim * code_bytes
        keys = [a for read in fragments.key_addresses(code_bytes, head_dim) for a in read]
        assert sorted(keys) == list(range(0, 8 * row_bytes, 16))
        queries = [a for read in fragments.query_addresses(code_bytes, head_dim) for a in read]
        assert sorted(queries) == list(range(0, 16 * head_dim, 16))
        values = [
            address + byte
            for size, read in fragments.value_addresses(code_bytes, head_dim)
            for address in read
            for byte in range(size)
        ]
        assert sorted(values) == list(range(64 * row_bytes))


@pytest.mark.parametrize("code_bytes", [1, 2])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_read_meets_a_bank_twice(head_dim: int, code_bytes: int) -> None:
    for read in fragments.key_addresses(code_bytes, head_dim):
        assert fragments.bank_passes(read, 16) == 1
    for read in fragments.query_addresses(code_bytes, head_dim):
        assert fragments.bank_passes(read, 16) == 1
    for size, read in fragments.value_addresses(code_bytes, head_dim):
        assert fragments.bank_passes(read, size) == 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fragments_of_values_multiply_right(head_dim: int) -> None:
    values = random_bf16((64, head_dim), 1)
    probabilities = np.random.default_rng(2).random((8, 64))
    stage = fragments.store_page(values.view(np.uint8).reshape(64, -1))
    out = fragments.weigh(stage, probabilities, head_dim)
    np.testing.assert_allclose(out, (probabilities @ wide(values)).T, rtol=1e-12, atol=1e-12)


def test_a_place_for_every_probability() -> None:
    assert sorted(fragments.probability_place(key) for key in range(256)) == list(range(256))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 3), (0, 0), (1, 1), (2, 2), (3, 3)])
def test_codes_become_bf16_exactly(low: int, high: int) -> None:
    rng = np.random.default_rng(3)
    bytes_a, bytes_b = (rng.integers(0, 256, (4096, 4), dtype=np.uint8) for _ in range(2))
    bytes_a[:256, low] = bytes_b[:256, high] = np.arange(256)
    a, b = bytes_a.view(np.uint32)[:, 0], bytes_b.view(np.uint32)[:, 0]
    for pair, numbers in (
        (fragments.e4m3_pair, e4m3_to_float),
        (fragments.int8_pair, lambda codes: codes.view(np.int8).astype(np.float32)),
    ):
        got = pair(a, b, low, high)
        for side, codes in ((0, bytes_a[:, low]), (1, bytes_b[:, high])):
            want = numbers(np.ascontiguousarray(codes))
            real = ~np.isnan(want)
            half = bf16_to_float((got >> np.uint32(16 * side)).astype(np.uint16))
            assert (half[real] == want[real]).all()
