"""quantise: the references' errors and edges; the device gives the same bits and feeds packing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.ops import linear_pack, quantise
from ninfer.ops.float_codecs import bf16_to_float, e2m1_to_float, e4m3_to_float, float_to_bf16
from ninfer.ops.linear_packing import E2M1_SHIFT, ImageLayout, WeightFormat, pack_nvfp4
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes

SHAPES = [(1, 16), (5, 48), (128, 128), (200, 272), (300, 1040)]


def weights(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.uint16]:
    """Heavy-tailed, with zeros, negative zeros, a row of zeros and one of tiny numbers."""
    rng = np.random.default_rng([seed, rows, columns])
    values = rng.standard_t(3, (rows, columns)) * scale
    values[rng.random((rows, columns)) < 0.05] = -0.0
    if rows > 2:
        values[1] = 0.0
        values[2] = 1e-40
    return float_to_bf16(values.astype(np.float32))


@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), st.sampled_from([1e-6, 1.0, 1e5]))
def test_errors_are_half_a_step_at_most(seed: int, shape: tuple[int, int], scale: float) -> None:
    x = weights(*shape, seed=seed, scale=scale)
    values = bf16_to_float(x).astype(np.float64)
    codes, row_scales = quantise.reference_fp8_row(x)
    decoded = e4m3_to_float(codes) * row_scales[:, None].astype(np.float64)
    slack = row_scales[:, None] * 2.0**-9
    assert (np.abs(decoded - values) <= np.abs(values) * 2.0**-4 + slack).all()
    codes, blocks = quantise.reference_fp8_block(x)
    spread = np.repeat(np.repeat(blocks, 128, axis=0), 128, axis=1)[: shape[0], : shape[1]]
    decoded = e4m3_to_float(codes) * spread.astype(np.float64)
    assert (np.abs(decoded - values) <= np.abs(values) * 2.0**-4 + spread * 2.0**-9).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES))
def test_nvfp4_is_within_a_step_of_its_group(seed: int, shape: tuple[int, int]) -> None:
    x = weights(*shape, seed=seed)
    values = bf16_to_float(x).astype(np.float64)
    codes, groups, row_scale = quantise.reference_nvfp4(x)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape)
    scale = row_scale[0].astype(np.float64) / E2M1_SHIFT
    steps = np.repeat(e4m3_to_float(groups) * scale, 16, axis=1)
    decoded = e2m1_to_float(nibbles) * steps
    most = np.repeat(np.abs(values).reshape(shape[0], -1, 16).max(axis=2), 16, axis=1)
    # The gap from 4 to 6 is the widest, and the group's scale is off by a sixteenth at most.
    bound = np.maximum(most / 6 * 1.5, scale * 2.0**-9 * 6)
    assert (np.abs(decoded - values) <= bound + 1e-12).all()


def test_zeros_and_tiny_numbers_become_zeros() -> None:
    x = weights(4, 128)
    codes, scales = quantise.reference_fp8_row(x)
    assert scales[1] == scales[2] == 1.0
    assert not (codes[1:3] & 0x7F).any()
    zeros = np.zeros((3, 32), np.uint16)
    assert not quantise.reference_nvfp4(zeros)[0].any()


def test_launches_cover_the_matrix() -> None:
    kernels = RecordingLibrary()
    x, codes = ShapeOnly((300, 272)), ShapeOnly((300, 272), "uint8")
    quantise.launch_fp8_block(kernels.library, x, codes, ShapeOnly((3, 3), "float32"), stream=0)
    quantise.launch_fp8_row(kernels.library, x, codes, ShapeOnly((300,), "float32"), stream=0)
    quantise.launch_nvfp4(
        kernels.library, x, ShapeOnly((300, 136), "uint8"), ShapeOnly((300, 17), "uint8"),
        ShapeOnly((300,), "float32"), amax=ShapeOnly((1,), "uint32"), stream=0,
    )  # fmt: skip
    assert [launch.grid for launch in kernels.launches[:2]] == [(3, 3, 1), (300, 1, 1)]
    for launch in kernels.launches:
        assert launch.arguments.dtype.itemsize == struct_bytes("quantise", "QuantiseParams")


@pytest.mark.parametrize(
    ("x", "codes", "scales"),
    [
        (ShapeOnly((3, 60)), ShapeOnly((3, 60), "uint8"), ShapeOnly((3,), "float32")),
        (ShapeOnly((3, 64)), ShapeOnly((3, 32), "uint8"), ShapeOnly((3,), "float32")),
        (ShapeOnly((3, 64)), ShapeOnly((3, 64), "uint8"), ShapeOnly((4,), "float32")),
        (ShapeOnly((3, 64), strides=(256, 2)), ShapeOnly((3, 64), "uint8"),
         ShapeOnly((3,), "float32")),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(x: ShapeOnly, codes: ShapeOnly, scales: ShapeOnly) -> None:
    with pytest.raises(OpContractError, match="quantise"):
        quantise.launch_fp8_row(RecordingLibrary().library, x, codes, scales, stream=0)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


DEVICE_SHAPES = [*SHAPES, (2560, 9216)]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e5])
@pytest.mark.parametrize(("rows", "columns"), DEVICE_SHAPES)
def test_fp8_bits_are_those_of_the_reference(
    device: Device, rows: int, columns: int, scale: float
) -> None:
    cp = device.cp
    x = weights(rows, columns, scale=scale)
    given_x = cp.asarray(x)
    codes = Fenced(cp, (rows, columns), "uint8")
    by_row = Fenced(cp, (rows,), "float32")
    blocks = Fenced(cp, (-(-rows // 128), -(-columns // 128)), "float32")
    stream = device.stream.ptr
    quantise.launch_fp8_row(device.kernels, given_x, codes.array, by_row.array, stream=stream)
    device.stream.synchronize()
    want_codes, want_scales = quantise.reference_fp8_row(x)
    assert np.array_equal(by_row.read(), want_scales)
    assert np.array_equal(codes.read(), want_codes)
    quantise.launch_fp8_block(device.kernels, given_x, codes.array, blocks.array, stream=stream)
    device.stream.synchronize()
    want_codes, want_scales = quantise.reference_fp8_block(x)
    assert np.array_equal(blocks.read(), want_scales)
    assert np.array_equal(codes.read(), want_codes)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e5])
@pytest.mark.parametrize(("rows", "columns"), DEVICE_SHAPES)
def test_nvfp4_bits_are_those_of_the_reference_and_pack(
    device: Device, rows: int, columns: int, scale: float
) -> None:
    cp = device.cp
    x = weights(rows, columns, scale=scale)
    codes = Fenced(cp, (rows, columns // 2), "uint8")
    groups = Fenced(cp, (rows, columns // 16), "uint8")
    row_scale = Fenced(cp, (rows,), "float32")
    quantise.launch_nvfp4(
        device.kernels, cp.asarray(x), codes.array, groups.array, row_scale.array,
        amax=cp.zeros(1, cp.uint32), stream=device.stream.ptr,
    )  # fmt: skip
    layout = ImageLayout.of(WeightFormat.NVFP4, rows, columns)
    image = Fenced(cp, (layout.image_bytes,), "uint8")
    linear_pack.launch(
        device.kernels, layout, codes.array, image.array, scales=groups.array,
        stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    want = quantise.reference_nvfp4(x)
    assert np.array_equal(codes.read(), want[0])
    assert np.array_equal(groups.read(), want[1])
    assert np.array_equal(row_scale.read(), want[2])
    assert np.array_equal(image.read(), pack_nvfp4(want[0], want[1], layout))
