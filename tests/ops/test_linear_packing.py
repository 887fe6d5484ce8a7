"""Weight images: unpacking gives the matrix back, and the kernel's fragments multiply to W @ x."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops.float_codecs import bf16_to_float, e2m1_to_float, e4m3_to_float, float_to_bf16
from ninfer.ops.linear_packing import (
    E2M1_SHIFT,
    ImageLayout,
    WeightFormat,
    interleave_gate_up,
    pack_bf16,
    pack_fp8_block,
    pack_fp8_row,
    pack_fp8_scaled_rows,
    pack_nvfp4,
    unpack_bf16,
    unpack_fp8,
    unpack_nvfp4,
)
from tests.helpers.linear_fragments import product
from tests.helpers.tolerance import FLOAT64_ALGORITHM, assert_close

SHAPES = [(32, 128, 8), (33, 144, 1), (256, 128, 4), (300, 272, 8), (520, 400, 2), (520, 656, 8)]
shapes = st.tuples(
    st.integers(1, 600), st.integers(1, 40).map(lambda n: n * 16), st.sampled_from([1, 2, 4, 8])
)
seeds = st.integers(0, 2**32 - 1)


def codes(rng: np.random.Generator, rows: int, columns: int, dtype: type[Any]) -> NDArray[Any]:
    return rng.integers(0, np.iinfo(dtype).max, (rows, columns), dtype, endpoint=True)


def finite_e4m3(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.uint8]:
    values = rng.integers(0, 256, shape, np.uint8)
    return np.where(values & 0x7F == 0x7F, values ^ 1, values).astype(np.uint8)


def joined(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two numbers a byte, the even column low."""
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)


def activations(rng: np.random.Generator, tokens: int, columns: int) -> NDArray[np.float32]:
    return bf16_to_float(float_to_bf16(rng.standard_normal((tokens, columns)).astype(np.float32)))


@settings(max_examples=25)
@given(shapes, seeds)
def test_unpacking_gives_back_any_codes(shape: tuple[int, int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns, strips = shape
    bf16 = codes(rng, rows, columns, np.uint16)
    layout = ImageLayout(WeightFormat.BF16, rows, columns, strips)
    assert (unpack_bf16(pack_bf16(bf16, layout), layout) == bf16).all()
    fp8 = codes(rng, rows, columns, np.uint8)
    layout = ImageLayout(WeightFormat.FP8_ROW, rows, columns, strips)
    assert (unpack_fp8(pack_fp8_row(fp8, layout), layout) == fp8).all()
    nibbles, scales = fp8[:, : columns // 2], codes(rng, rows, columns // 16, np.uint8)
    layout = ImageLayout(WeightFormat.NVFP4, rows, columns, strips)
    again = unpack_nvfp4(pack_nvfp4(nibbles, scales, layout), layout)
    assert (again[0] == nibbles).all()
    assert (again[1] == scales).all()


@pytest.mark.parametrize(("rows", "columns", "strips"), SHAPES)
def test_bf16_fragments_multiply_to_the_matrix_product(
    rows: int, columns: int, strips: int
) -> None:
    rng = np.random.default_rng(rows)
    weight = float_to_bf16(rng.standard_normal((rows, columns)).astype(np.float32))
    x = activations(rng, 3, columns)
    layout = ImageLayout(WeightFormat.BF16, rows, columns, strips)
    got = product(pack_bf16(weight, layout), layout, x)
    want = x.astype(np.float64) @ bf16_to_float(weight).astype(np.float64).T
    assert_close(got[:, :rows], want, FLOAT64_ALGORITHM)
    assert (got[:, rows:] == 0).all()


@pytest.mark.parametrize(("rows", "columns", "strips"), SHAPES)
def test_fp8_fragments_multiply_to_the_matrix_product(rows: int, columns: int, strips: int) -> None:
    rng = np.random.default_rng(rows)
    weight = finite_e4m3(rng, (rows, columns))
    x = activations(rng, 2, columns)
    layout = ImageLayout(WeightFormat.FP8_ROW, rows, columns, strips)
    got = product(pack_fp8_row(weight, layout), layout, x)
    want = x.astype(np.float64) @ e4m3_to_float(weight).astype(np.float64).T
    assert_close(got[:, :rows], want, FLOAT64_ALGORITHM)


@pytest.mark.parametrize(("rows", "columns", "strips"), SHAPES)
def test_block_scales_meet_their_128_by_128_weights(rows: int, columns: int, strips: int) -> None:
    rng = np.random.default_rng(rows)
    weight = finite_e4m3(rng, (rows, columns))
    blocks = (-(-rows // 128), -(-columns // 128))
    scales = rng.uniform(0.5, 2.0, blocks).astype(np.float32)
    x = activations(rng, 2, columns)
    layout = ImageLayout(WeightFormat.FP8_BLOCK, rows, columns, strips)
    got = product(pack_fp8_block(weight, scales, layout), layout, x)
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :columns]
    want = x.astype(np.float64) @ (e4m3_to_float(weight).astype(np.float64) * spread).T
    assert_close(got[:, :rows], want, FLOAT64_ALGORITHM)
    assert (unpack_fp8(pack_fp8_block(weight, scales, layout), layout) == weight).all()


def test_interleaved_gate_and_up_rows_keep_their_own_block_scales() -> None:
    rng = np.random.default_rng(1)
    inner, columns = 144, 256
    weight = finite_e4m3(rng, (2 * inner, columns))
    blocks = rng.uniform(0.5, 2.0, (2, 2, 2)).astype(np.float32)
    scales = np.repeat(blocks, 128, axis=1)[:, :inner].reshape(2 * inner, 2)
    x = activations(rng, 2, columns)
    layout = ImageLayout(WeightFormat.FP8_BLOCK, 2 * inner, columns, 4)
    image = pack_fp8_scaled_rows(interleave_gate_up(weight), interleave_gate_up(scales), layout)
    natural = e4m3_to_float(weight).astype(np.float64) * np.repeat(scales, 128, 1)
    want = x.astype(np.float64) @ interleave_gate_up(natural).T
    assert_close(product(image, layout, x)[:, : 2 * inner], want, FLOAT64_ALGORITHM)


@pytest.mark.parametrize(("rows", "columns", "strips"), SHAPES)
def test_nvfp4_fragments_multiply_to_the_matrix_product(
    rows: int, columns: int, strips: int
) -> None:
    rng = np.random.default_rng(rows)
    nibbles = rng.integers(0, 16, (rows, columns), np.uint8)
    packed = joined(nibbles)
    scales = rng.integers(0, 0x7F, (rows, columns // 16), np.uint8)
    x = activations(rng, 2, columns)
    layout = ImageLayout(WeightFormat.NVFP4, rows, columns, strips)
    got = product(pack_nvfp4(packed, scales, layout), layout, x) * E2M1_SHIFT
    spread = np.repeat(e4m3_to_float(scales).astype(np.float64), 16, axis=1)
    natural: NDArray[Any] = e2m1_to_float(nibbles) * spread
    want = x.astype(np.float64) @ natural.T
    assert_close(got[:, :rows], want, FLOAT64_ALGORITHM)


def test_every_e2m1_code_times_every_e4m3_scale_is_exact() -> None:
    """All 16 x 127 products, each alone in its row."""
    scales = np.repeat(np.arange(127, dtype=np.uint8), 16)[:, None]
    nibbles = np.zeros((127 * 16, 16), np.uint8)
    nibbles[:, 5] = np.tile(np.arange(16, dtype=np.uint8), 127)
    layout = ImageLayout(WeightFormat.NVFP4, 127 * 16, 16, 8)
    x = np.ones((1, 16), np.float32)
    image = pack_nvfp4(joined(nibbles), scales, layout)
    got = product(image, layout, x)[0, : 127 * 16] * E2M1_SHIFT
    assert (got == e2m1_to_float(nibbles[:, 5]) * e4m3_to_float(scales[:, 0])).all()


def test_interleaving_takes_eight_gate_then_eight_up_rows() -> None:
    rows = np.arange(32)[:, None]
    got = interleave_gate_up(rows)[:, 0].tolist()
    assert got == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


@pytest.mark.parametrize(
    ("fmt", "rows", "columns"),
    [
        (WeightFormat.BF16, 0, 64),
        (WeightFormat.BF16, 8, 12),
        (WeightFormat.FP8_ROW, 8, 0),
        (WeightFormat.NVFP4, 8, 24),
    ],
)
def test_a_shape_outside_the_contract_is_refused(
    fmt: WeightFormat, rows: int, columns: int
) -> None:
    with pytest.raises(OpContractError, match="linear_packing"):
        ImageLayout.of(fmt, rows, columns)


def test_arrays_that_do_not_fit_the_layout_are_refused() -> None:
    nvfp4 = ImageLayout.of(WeightFormat.NVFP4, 8, 64)
    with pytest.raises(OpContractError, match="scales"):
        pack_nvfp4(np.zeros((8, 32), np.uint8), np.zeros((8, 3), np.uint8), nvfp4)
    with pytest.raises(OpContractError, match="fit the layout"):
        pack_nvfp4(np.zeros((8, 64), np.uint8), np.zeros((8, 8), np.uint8), nvfp4)
    fp8 = ImageLayout.of(WeightFormat.FP8_BLOCK, 8, 256)
    with pytest.raises(OpContractError, match="scales"):
        pack_fp8_block(np.zeros((8, 256), np.uint8), np.ones((1, 1), np.float32), fp8)
    with pytest.raises(OpContractError, match="fit the layout"):
        pack_fp8_row(np.zeros((8, 256), np.uint8), fp8)
    with pytest.raises(OpContractError, match="strips"):
        ImageLayout(WeightFormat.BF16, 8, 64, 3)
    with pytest.raises(OpContractError, match="multiple of 16"):
        interleave_gate_up(np.zeros((24, 8), np.uint8))


@pytest.mark.parametrize("fmt", list(WeightFormat))
def test_narrow_matrices_take_small_row_blocks(fmt: WeightFormat) -> None:
    rows = (64, 2560, 5120, 18432, 248320)
    strips = [ImageLayout.of(fmt, count, 512).strips_per_block for count in rows]
    assert strips == sorted(strips)
    assert strips[0] < strips[-1]
