"""embedding, rms_norm and swiglu on the device: against float64, bit by bit, chained in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ops import embedding, rms_norm, swiglu
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.tolerance import BF16_POINTWISE, BF16_REDUCTION, assert_close

pytestmark = pytest.mark.gpu

COLUMNS = [8, 40, 64, 1000, 2048, 2560, 4104, 5120, 17408]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


def random_bf16(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> NDArray[np.uint16]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return float_to_bf16(values.astype(np.float32))


def wide(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    return bf16_to_float(codes).astype(np.float64)


def strip_sums(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    squares = wide(codes) ** 2
    padded = np.pad(squares, ((0, 0), (0, -squares.shape[1] % 32)))
    sums: NDArray[np.float64] = padded.reshape(squares.shape[0], -1, 32).sum(-1)
    return sums


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_embedding_copies_rows_and_sums_their_squares(
    device: Device, tokens: int, columns: int
) -> None:
    cp = device.cp
    table = random_bf16((50, columns), 1)
    ids = np.random.default_rng(tokens).integers(0, 50, tokens, np.int32)
    y = Fenced(cp, (tokens, columns), "uint16")
    sums = Fenced(cp, (tokens, -(-columns // 32)), "float32")
    given = cp.asarray(table)
    embedding.launch(
        device.kernels, cp.asarray(ids), given, y.array, square_sums=sums.array,
        stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    assert (y.read() == table[ids]).all()
    assert (cp.asnumpy(given) == table).all()
    np.testing.assert_allclose(sums.read(), strip_sums(table[ids]), rtol=1e-5)


@pytest.mark.parametrize("columns", [8, 40, 2560])
def test_scaled_embeddings_are_rounded_once_and_then_squared(device: Device, columns: int) -> None:
    cp, scale = device.cp, 1.7
    table = random_bf16((50, columns), 1)
    ids = np.array([3, 49, -1, 0], np.int32)
    y = Fenced(cp, (4, columns), "uint16")
    sums = Fenced(cp, (4, -(-columns // 32)), "float32")
    embedding.launch(
        device.kernels, cp.asarray(ids), cp.asarray(table), y.array, square_sums=sums.array,
        scale=scale, stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    got, is_real = y.read(), ids >= 0
    want = float_to_bf16(bf16_to_float(table[ids]) * np.float32(scale))
    assert (got[is_real] == want[is_real]).all()
    assert np.isnan(bf16_to_float(got[~is_real])).all()
    np.testing.assert_allclose(sums.read()[is_real], strip_sums(want)[is_real], rtol=1e-5)


def test_an_id_outside_the_table_is_a_row_of_nan(device: Device) -> None:
    cp = device.cp
    table = random_bf16((50, 64), 1)
    y = Fenced(cp, (3, 64), "uint16")
    embedding.launch(
        device.kernels, cp.asarray(np.array([-1, 7, 50], np.int32)), cp.asarray(table), y.array,
        stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    got = bf16_to_float(y.read())
    assert np.isnan(got[[0, 2]]).all()
    assert (got[1] == bf16_to_float(table[7])).all()


def run_norm(
    device: Device, x: NDArray[np.uint16], weight: NDArray[np.uint16], **options: Any
) -> NDArray[np.uint16]:
    cp = device.cp
    y = Fenced(cp, x.shape, "uint16")
    given = cp.asarray(x)
    rms_norm.launch(
        device.kernels, given, cp.asarray(weight), y.array, eps=1e-6, stream=device.stream.ptr,
        **options,
    )  # fmt: skip
    device.stream.synchronize()
    assert (cp.asnumpy(given) == x).all()
    result: NDArray[np.uint16] = y.read()
    return result


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("columns", COLUMNS)
def test_rms_norm_matches_float64_whatever_the_number_of_rows(
    device: Device, columns: int, offset: float
) -> None:
    x, weight = random_bf16((33, columns), 2, 30.0), random_bf16((columns,), 3)
    got = run_norm(device, x, weight, offset=offset)
    want = rms_norm.reference(wide(x), wide(weight), eps=1e-6, offset=offset)
    assert_close(bf16_to_float(got), want, BF16_REDUCTION)
    for tokens in (1, 2, 31):
        assert (run_norm(device, x[:tokens], weight, offset=offset) == got[:tokens]).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_rms_norm_adds_first_and_leaves_the_sum(device: Device, columns: int) -> None:
    cp = device.cp
    x, residual = random_bf16((5, columns), 4), random_bf16((5, columns), 5)
    weight = random_bf16((columns,), 6)
    total = Fenced(cp, x.shape, "uint16")
    sums = Fenced(cp, (5, -(-columns // 32)), "float32")
    addition = rms_norm.Addition(cp.asarray(residual), total.array)
    got = run_norm(device, x, weight, offset=1.0, addition=addition, square_sums=sums.array)
    expected = float_to_bf16(bf16_to_float(x) + bf16_to_float(residual))
    assert (total.read() == expected).all()
    assert (got == run_norm(device, expected, weight, offset=1.0)).all()
    np.testing.assert_allclose(sums.read(), strip_sums(expected), rtol=1e-5)


def test_rms_norm_of_zeros_and_of_large_numbers_is_finite(device: Device) -> None:
    weight = random_bf16((256,), 7)
    x = np.zeros((2, 256), np.uint16)
    x[1] = float_to_bf16(np.full(256, 1e15, np.float32))
    got = bf16_to_float(run_norm(device, x, weight, offset=0.0))
    assert (got[0] == 0.0).all()
    assert_close(got[1], wide(weight), BF16_REDUCTION)


@pytest.mark.parametrize("inner", [8, 72, 9216])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_swiglu_matches_float64(device: Device, tokens: int, inner: int) -> None:
    cp = device.cp
    x = random_bf16((tokens, 2 * inner), 8, 8.0)
    x[0, :2] = float_to_bf16(np.array([300.0, -300.0], np.float32))
    y = Fenced(cp, (tokens, inner), "uint16")
    swiglu.launch(device.kernels, cp.asarray(x), y.array, stream=device.stream.ptr)
    device.stream.synchronize()
    assert_close(bf16_to_float(y.read()), swiglu.reference(wide(x)), BF16_POINTWISE)


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_captured_chain_of_all_three(device: Device, is_chained: bool) -> None:
    cp = device.cp
    table, weight = random_bf16((64, 512), 9), random_bf16((512,), 10)
    ids, table_array, weight_array = (
        cp.asarray(np.arange(9, dtype=np.int32)), cp.asarray(table), cp.asarray(weight),
    )  # fmt: skip
    x, y, z = (cp.zeros(shape, cp.uint16) for shape in ((9, 512), (9, 512), (9, 256)))

    def chain(chained: bool) -> None:
        stream = device.stream.ptr
        embedding.launch(device.kernels, ids, table_array, x, stream=stream, is_chained=chained)
        rms_norm.launch(
            device.kernels, x, weight_array, y, eps=1e-6, offset=0.0, stream=stream,
            is_chained=chained,
        )  # fmt: skip
        swiglu.launch(device.kernels, y, z, stream=stream, is_chained=chained)

    chain(False)
    device.stream.synchronize()
    want = cp.asnumpy(z)
    assert np.isfinite(bf16_to_float(want)).all()
    device.stream.begin_capture()
    for _ in range(4):
        chain(is_chained)
    graph = device.stream.end_capture()
    for _ in range(10):
        x[...] = y[...] = z[...] = 0x7FC1
        graph.launch(device.stream)
        device.stream.synchronize()
        assert (cp.asnumpy(z) == want).all()
