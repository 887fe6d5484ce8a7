"""The draft head holds the first rows of the head, quantised, whatever the head is stored in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import InvariantError
from ninfer.kernels.library import KernelLibrary
from ninfer.ops import dequantise
from ninfer.ops.float_codecs import HalfArray, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat, pack_bf16, pack_fp8_row
from ninfer.ops.linear_small_t import PackedLinear, plan_linear
from ninfer.ops.quantise import reference_fp8_row
from ninfer.program.executors import cuda_draft_head
from ninfer.program.executors.cuda_device import CudaDevice
from ninfer.program.executors.cuda_draft_head import draft_head_spec, make_draft_head
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import HEAD, LinearPart, MatrixSpec
from tests.helpers.cuda_models import require_device
from tests.helpers.fake_cuda import Launch
from tests.helpers.packing_cuda import PackingCuda

COLUMNS = 64


class HeadCuda(PackingCuda):
    """Also plays the kernels that unpack and quantise rows."""

    def queue(self, item: Any) -> None:
        super().queue(item)
        if isinstance(item, Launch) and item.family == "dequantise":
            self._dequantise(item)
        elif isinstance(item, Launch) and item.entry == "quantise_fp8_row":
            self._quantise(item.arguments)

    def _dequantise(self, launch: Launch) -> None:
        arguments = launch.arguments
        fmt = WeightFormat(launch.entry.removeprefix("dequantise_"))
        rows, columns = int(arguments["rows"]), int(arguments["columns"])
        layout = ImageLayout(fmt, rows, columns, int(arguments["strips_per_block"]))
        image = self.memory(int(arguments["image"]), layout.image_bytes)
        scale = None
        if fmt.has_row_scale:
            scale = self.memory(int(arguments["row_scale"]), 4 * rows).view(np.float32)
        decoded = dequantise.reference(image, layout, row_scale=scale)
        self.memory(int(arguments["y"]), decoded.nbytes)[:] = decoded.view(np.uint8).reshape(-1)

    def _quantise(self, arguments: NDArray[np.void]) -> None:
        rows, columns = int(arguments["rows"]), int(arguments["columns"])
        x = self.memory(int(arguments["x"]), 2 * rows * columns).view(np.uint16)
        codes, scales = reference_fp8_row(x.reshape(rows, columns))
        self.memory(int(arguments["codes"]), codes.nbytes)[:] = codes.reshape(-1)
        self.memory(int(arguments["scales"]), scales.nbytes)[:] = scales.view(np.uint8)


def random_rows(rows: int) -> HalfArray:
    rng = np.random.default_rng(rows)
    values = rng.standard_normal((rows, COLUMNS)) * rng.uniform(0.1, 4.0, (rows, 1))
    return float_to_bf16(values.astype(np.float32))


def upload(driver: CudaDriver, array: NDArray[Any]) -> DeviceTensor:
    tensor = DeviceTensor.dense(driver.allocate(array.nbytes), array.shape, array.dtype.name)
    driver.upload(tensor.address, np.ascontiguousarray(array))
    driver.synchronize()
    return tensor


def make_head(
    driver: CudaDriver, kernels: KernelLibrary, fmt: WeightFormat, rows: int
) -> tuple[LinearPart, HalfArray]:
    """A head on the device, and its rows as bf16."""
    layout = ImageLayout.of(fmt, rows, COLUMNS)
    decoded, scale = random_rows(rows), None
    if fmt is WeightFormat.BF16:
        image = pack_bf16(decoded, layout)
    else:
        codes, scales = reference_fp8_row(decoded)
        image, scale = pack_fp8_row(codes, layout), upload(driver, scales)
        decoded = dequantise.reference(image, layout, row_scale=scales)
    linear = PackedLinear(plan_linear(layout, kernels.limits), upload(driver, image), scale)
    return LinearPart(0, True, MatrixSpec(HEAD, layout, False), linear), decoded


def check_draft_head(driver: CudaDriver, fmt: WeightFormat, vocab: int, num_rows: int) -> None:
    head, decoded = make_head(driver, driver.kernels, fmt, vocab)
    spec = draft_head_spec(vocab, COLUMNS, num_rows)
    measured = Arena()
    spec.take(measured)
    place = driver.allocate(measured.used_bytes)
    made = make_draft_head(driver, head, spec, Arena(place, measured.used_bytes))
    assert made.is_whole
    layout = made.matrix.layout
    assert (layout.rows, layout.columns) == (min(vocab, num_rows), COLUMNS)
    codes, scales = reference_fp8_row(decoded[: layout.rows])
    got_image = np.empty(layout.image_bytes, np.uint8)
    got_scales = np.empty(layout.rows, np.float32)
    image, scale = made.linear.image, made.linear.row_scale
    assert isinstance(image, DeviceTensor)
    assert isinstance(scale, DeviceTensor)
    driver.download(got_image, image.address)
    driver.download(got_scales, scale.address)
    driver.synchronize()
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_image, pack_fp8_row(codes, layout))


CASES = [
    (WeightFormat.BF16, 500, 1000), (WeightFormat.BF16, 9000, 8999), (WeightFormat.BF16, 9000, 300),
    (WeightFormat.FP8_ROW, 9100, 8500), (WeightFormat.FP8_ROW, 9100, 4000),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "vocab", "num_rows"), CASES)
@pytest.mark.parametrize("piece_bytes", [1, 100_000, 64 << 20])
def test_rows_of_any_head_come_in_pieces(
    monkeypatch: pytest.MonkeyPatch, fmt: WeightFormat, vocab: int, num_rows: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(cuda_draft_head, "_PIECE_BYTES", piece_bytes)
    cuda = HeadCuda()
    check_draft_head(cuda, fmt, vocab, num_rows)


def test_staging_is_given_back() -> None:
    cuda = HeadCuda()
    head, _ = make_head(cuda, cuda.kernels, WeightFormat.BF16, 600)
    spec = draft_head_spec(600, COLUMNS, 600)
    place = cuda.allocate(spec.num_bytes + 512)
    before = len(cuda.sizes)
    make_draft_head(cuda, head, spec, Arena(place, spec.num_bytes + 512))
    assert len(cuda.sizes) == before


def test_a_head_that_is_too_small_is_refused() -> None:
    cuda = HeadCuda()
    head, _ = make_head(cuda, cuda.kernels, WeightFormat.BF16, 600)
    with pytest.raises(InvariantError, match="no draft head 700"):
        make_draft_head(cuda, head, draft_head_spec(700, COLUMNS, 700), Arena())


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "vocab", "num_rows"), CASES)
def test_the_device_makes_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, fmt: WeightFormat, vocab: int, num_rows: int
) -> None:
    require_device()
    monkeypatch.setattr(cuda_draft_head, "_PIECE_BYTES", 100_000)
    driver = CudaDevice()
    try:
        check_draft_head(driver, fmt, vocab, num_rows)
    finally:
        driver.close()
