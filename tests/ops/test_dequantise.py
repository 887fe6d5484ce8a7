"""dequantise: the kernel's walk over an image in NumPy against unpacking; and on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import dequantise
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.image_rows import dequantised
from tests.helpers.packed_weights import random_packed
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes

FORMATS = list(WeightFormat)
SHAPES = [(32, 64), (48, 272), (336, 400), (544, 1040)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("strips", [1, 2, 4, 8])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_walk_over_an_image_writes_every_element_once(
    fmt: WeightFormat, strips: int, is_interleaved: bool
) -> None:
    weight = random_packed(ImageLayout(fmt, 304, 272, strips), 0, is_interleaved=is_interleaved)
    want = dequantise.reference(
        weight.image, weight.layout, row_scale=weight.row_scale, is_interleaved=is_interleaved
    )
    got = dequantised(weight.image, weight.layout, weight.row_scale, is_interleaved=is_interleaved)
    assert (got == want).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_warp_a_part_and_the_struct_of_the_kernel(fmt: WeightFormat) -> None:
    kernels = RecordingLibrary()
    layout = ImageLayout(fmt, 304, 272, 4)
    scale = ShapeOnly((304,), "float32") if fmt.has_row_scale else None
    dequantise.launch(
        kernels.library, layout, ShapeOnly((layout.image_bytes,), "uint8"), ShapeOnly((304, 272)),
        row_scale=scale, stream=0,
    )  # fmt: skip
    launch = kernels.only()
    assert launch.grid[0] * launch.block[0] // 32 >= layout.strips * layout.parts
    assert launch.arguments.dtype.itemsize == struct_bytes("dequantise", "DequantiseParams")


def test_wrong_arguments_are_refused() -> None:
    layout = ImageLayout(WeightFormat.FP8_ROW, 304, 272, 4)
    image, y = ShapeOnly((layout.image_bytes,), "uint8"), ShapeOnly((304, 272))
    short = ShapeOnly((layout.image_bytes - 1,), "uint8")
    scale = ShapeOnly((304,), "float32")
    odd = ImageLayout(WeightFormat.BF16, 40, 64, 1)
    odd_image = ShapeOnly((odd.image_bytes,), "uint8")
    kernels = RecordingLibrary().library
    with pytest.raises(OpContractError, match="row_scale"):
        dequantise.launch(kernels, layout, image, y, stream=0)
    with pytest.raises(OpContractError, match="image"):
        dequantise.launch(kernels, layout, short, y, row_scale=scale, stream=0)
    with pytest.raises(OpContractError, match="y has shape"):
        dequantise.launch(kernels, layout, image, ShapeOnly((272, 304)), row_scale=scale, stream=0)
    with pytest.raises(OpContractError, match="16"):
        dequantise.launch(
            kernels, odd, odd_image, ShapeOnly((40, 64)), is_interleaved=True, stream=0
        )


@pytest.mark.gpu
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (2560, 9216), (18432, 2560)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_device_writes_the_same_numbers(
    device: Device, fmt: WeightFormat, rows: int, columns: int, is_interleaved: bool
) -> None:
    cp = device.cp
    layout = ImageLayout.of(fmt, rows, columns)
    weight = random_packed(layout, 1, is_interleaved=is_interleaved)
    y = Fenced(cp, (rows, columns), "uint16")
    scale = None if weight.row_scale is None else cp.asarray(weight.row_scale)
    dequantise.launch(
        device.kernels, layout, cp.asarray(weight.image), y.array, row_scale=scale,
        is_interleaved=is_interleaved, stream=device.stream.ptr,
    )  # fmt: skip
    device.stream.synchronize()
    want = dequantise.reference(
        weight.image, layout, row_scale=weight.row_scale, is_interleaved=is_interleaved
    )
    assert np.array_equal(y.read(), want)
