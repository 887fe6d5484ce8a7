from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from ninfer.contract.errors import OpContractError
from ninfer.ops import linear
from tests.helpers.arrays import f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close

LARGE = (512, linear.CACHED_BYTES // (4 * 512) + 8)
SHAPES = [
    *((1, 1), (8, 3), (64, 8), (96, 320), (384, 776), (512, 384), (384, 4096), (48, 64)),
    *((300, 1), (1, 300), (7, 130), (41, 37), LARGE),
]
"""(K, N)"""


@pytest.mark.parametrize(("columns", "rows"), SHAPES[:4])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 64])
def test_against_plain_loops(columns: int, rows: int, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, num_tokens, columns)
    weight = normal(rng, rows, columns, scale=columns**-0.5)
    want = np.array(
        [
            [sum(a * b for a, b in zip(t, w, strict=True)) for w in weight.tolist()]
            for t in x.tolist()
        ]
    )
    for project in (linear.reference, linear.tiled):
        assert_close(project(x, weight), want, FLOAT64_ALGORITHM)
        got = project(f32(x), f32(weight))
        assert got.dtype == np.float32
        assert_close(got, want, FLOAT32_REDUCTION)


@pytest.mark.parametrize(("columns", "rows"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_tiled_rows_are_the_same_bits_in_any_company(
    columns: int, rows: int, num_threads: int
) -> None:
    with threadpool_limits(num_threads, user_api="blas"):
        check_company(columns, rows)


def check_company(columns: int, rows: int) -> None:
    rng = np.random.default_rng(columns)
    x, weight = f32(normal(rng, 21, columns)), f32(normal(rng, rows, columns))
    want = np.concatenate([linear.tiled(x[t : t + 1], weight) for t in range(21)])
    for size in (2, 5, 7, 8, 9, 16, 21):
        chosen = rng.permutation(21)[:size]
        assert np.array_equal(linear.tiled(x[chosen], weight), want[chosen])
    mates = x.copy()
    mates[1:] = np.nan
    assert np.array_equal(linear.tiled(mates, weight)[0], want[0])


@pytest.mark.parametrize(("columns", "rows"), [(41, 37), (384, 776), LARGE])
def test_tiled_rows_are_the_same_bits_at_any_address(columns: int, rows: int) -> None:
    rng = np.random.default_rng(columns)
    x, weight = f32(normal(rng, 5, columns)), f32(normal(rng, rows, columns))
    want = linear.tiled(x, weight)
    room = np.zeros(x.size + 16, np.float32)
    for offset in range(1, 16):
        moved = room[offset : offset + x.size].reshape(x.shape)
        moved[:] = x
        assert np.array_equal(linear.tiled(moved, weight), want)


def test_tiled_takes_strided_input() -> None:
    rng = np.random.default_rng(0)
    wide, weight = f32(normal(rng, 8, 40)), f32(normal(rng, 6, 20))
    narrow = wide[:, 10:30]
    assert np.array_equal(linear.tiled(narrow, weight), linear.tiled(narrow.copy(), weight))


@pytest.mark.parametrize("project", [linear.reference, linear.tiled])
def test_contract(project: linear.Projection) -> None:
    x, weight = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
    with pytest.raises(OpContractError, match="linear: weight has shape"):
        project(x, weight[:, :2])
    with pytest.raises(OpContractError, match="linear: x has shape"):
        project(x[:0], weight)
    with pytest.raises(OpContractError, match="linear: x has shape"):
        project(x[0], weight)
    with pytest.raises(OpContractError, match="linear: dtypes"):
        project(x, weight.astype(np.float64))
