from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.ops import dflash_conv
from tests.helpers.arrays import Float64Array, f32, normal
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes
from tests.helpers.tolerance import FLOAT32_POINTWISE, FLOAT64_ALGORITHM, assert_close


def naive(
    x: Float64Array, dynamic: Float64Array, base: Float64Array, sizes: list[int]
) -> Float64Array:
    """Block by block, row by row, channel by channel."""
    y, first = np.zeros_like(x), 0
    group_size = x.shape[1] // dynamic.shape[2]
    for size in sizes:
        for i in range(size):
            for c in range(x.shape[1]):
                for tap in range(min(base.shape[0], i + 1)):
                    weight = base[tap, c] + dynamic[first + i, tap, c // group_size]
                    y[first + i, c] += weight * x[first + i - tap, c]
        first += size
    return y


def columns_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([np.arange(size) for size in sizes])


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    num_taps=st.integers(1, 7),
    groups=st.sampled_from([(1, 4), (2, 3), (6, 1)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_against_plain_loops(
    sizes: list[int], num_taps: int, groups: tuple[int, int], seed: int
) -> None:
    """Also with more taps than a block has rows."""
    rng = np.random.default_rng(seed)
    num_groups, group_size = groups
    x = normal(rng, sum(sizes), num_groups * group_size)
    dynamic = normal(rng, sum(sizes), num_taps, num_groups)
    base = normal(rng, num_taps, num_groups * group_size)
    want = naive(x, dynamic, base, sizes)
    columns = columns_of(sizes)
    assert_close(dflash_conv.reference(x, dynamic, base, columns), want, FLOAT64_ALGORITHM)
    got = dflash_conv.reference(f32(x), f32(dynamic), f32(base), columns)
    assert_close(got, want, FLOAT32_POINTWISE)


def test_nothing_crosses_the_beginning_of_a_block() -> None:
    rng = np.random.default_rng(1)
    x, dynamic, base = normal(rng, 6, 4), normal(rng, 6, 3, 2), normal(rng, 3, 4)
    columns = columns_of([3, 3])
    both = dflash_conv.reference(x, dynamic, base, columns)
    x[:3] = np.nan
    np.testing.assert_array_equal(dflash_conv.reference(x, dynamic, base, columns)[3:], both[3:])


@pytest.mark.parametrize("columns", [[1, 2, 3], [0, 2, 3], [0, 1], [0, 1, 1]])
def test_columns_count_from_each_beginning(columns: list[int]) -> None:
    x, dynamic, base = np.ones((3, 4)), np.ones((3, 2, 2)), np.ones((2, 4))
    with pytest.raises(OpContractError, match="dflash_conv"):
        dflash_conv.reference(x, dynamic, base, np.array(columns))


def test_contract() -> None:
    x, dynamic, base, columns = np.ones((3, 4)), np.ones((3, 2, 2)), np.ones((2, 4)), np.arange(3)
    for bad in (
        (x, np.ones((3, 2, 3)), base, columns),
        (x, np.ones((2, 2, 2)), base, columns),
        (x, dynamic, np.ones((3, 4)), columns),
        (f32(x), dynamic, base, columns),
    ):
        with pytest.raises(OpContractError, match="dflash_conv"):
            dflash_conv.reference(*bad)


def conv_arguments(rows: int, channels: int, taps: int, groups: int) -> dict[str, Any]:
    return {
        "x": ShapeOnly((rows, channels)), "dynamic": ShapeOnly((rows, 2 * taps * groups)),
        "base": ShapeOnly((2, taps, channels)), "y": ShapeOnly((rows, channels)), "side": 0,
        "columns": 16, "stream": 0,
    }  # fmt: skip


@pytest.mark.parametrize("channels", [8, 64, 2560, 5120])
def test_every_channel_has_a_thread(channels: int) -> None:
    kernels = RecordingLibrary()
    arguments = conv_arguments(48, channels, 3, channels // 8)
    dflash_conv.launch(kernels.library, **arguments, is_residual=True, is_chained=True)
    launch = kernels.only()
    assert launch.entry == "dflash_conv"
    assert launch.grid[0] == 48
    assert 8 * launch.grid[1] * launch.block[0] >= channels > 8 * (launch.grid[1] - 1) * 256
    assert launch.arguments.dtype.itemsize == struct_bytes("dflash", "ConvParams")
    assert launch.options["programmatic"]
    assert (launch["channels"], launch["taps"], launch["groups"]) == (channels, 3, channels // 8)
    assert (launch["columns"], launch["is_residual"]) == (16, 1)


@pytest.mark.parametrize(("group_size", "is_wide"), [(2, False), (4, False), (8, True), (16, True)])
def test_sides_have_taps_of_their_own(group_size: int, is_wide: bool) -> None:
    kernels = RecordingLibrary()
    groups, start = 64 // group_size, ShapeOnly((1,)).address
    arguments = conv_arguments(32, 64, 3, groups)
    arguments["dynamic"] = ShapeOnly((32, 6 * groups), strides=(4096, 2))
    for side in (0, 1):
        dflash_conv.launch(kernels.library, **{**arguments, "side": side})
    for side, launch in enumerate(kernels.launches):
        assert (launch.entry == "dflash_conv") == is_wide
        assert launch["dynamic"] == start + 2 * side * 3 * groups
        assert launch["base"] == start + 2 * side * 3 * 64
        assert (launch["dynamic_stride"], launch["x_stride"]) == (2048, 64)
        assert (launch["is_residual"], launch.options["programmatic"]) == (0, False)


@pytest.mark.parametrize(
    "change",
    [
        {"side": 2},
        {"side": -1},
        {"columns": 0},
        {"columns": 15},
        {"x": ShapeOnly((32, 60))},
        {"x": ShapeOnly((31, 64))},
        {"x": ShapeOnly((32, 64), address=8)},
        {"x": ShapeOnly((32, 64), strides=(136, 2))},
        {"x": ShapeOnly((32, 64), "float32")},
        {"y": ShapeOnly((32, 32))},
        {"base": ShapeOnly((1, 3, 64))},
        {"base": ShapeOnly((2, 3, 32))},
        {"dynamic": ShapeOnly((32, 25))},
        {"dynamic": ShapeOnly((32, 30))},
        {"dynamic": ShapeOnly((32, 0))},
        {"dynamic": ShapeOnly((31, 24))},
    ],
)
def test_a_launch_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="dflash_conv"):
        dflash_conv.launch(kernels.library, **{**conv_arguments(32, 64, 3, 4), **change})
    assert not kernels.launches
