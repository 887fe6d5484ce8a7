"""Quantised checkpoints into a WeightStore: the images and row scales that lie on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import OptionError
from ninfer.convert.source import open_model
from ninfer.ops import dequantise
from ninfer.ops.float_codecs import float_to_bf16
from ninfer.ops.linear_packing import WeightFormat
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import build_cuda, plan_on, source_fill
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.cuda_weights import DeviceWeights, WeightPlan
from tests.helpers import executor_driver as driver
from tests.helpers.checkpoints import read_tensors, write_safetensors
from tests.helpers.fake_cuda import FakeCuda, Product
from tests.helpers.model_paths import golden_model
from tests.helpers.packing_cuda import PackingCuda
from tests.helpers.quantised_checkpoints import LAYOUTS, decode_checkpoint, quantise_checkpoint

MEMORY_BUDGET = 256 << 20
"""The made-up device really allocates what is planned."""

CASES = ("qwen3-dense", "qwen3-moe", "qwen3_5-dense", "qwen3_5-dense-tied-realheads", "qwen3_5-moe")
FORMATS = {
    "fp8-block": {WeightFormat.FP8_BLOCK},
    "ct-block": {WeightFormat.FP8_BLOCK},
    "ct-nvfp4": {WeightFormat.NVFP4},
    "modelopt-nvfp4": {WeightFormat.NVFP4},
}
"""Of codes, by layout; one scale a matrix or a row is fp8_row."""


def ignore(stage: str, done: int, total: int) -> None:
    pass


def load(folder: Path, weights: str = "auto") -> tuple[PackingCuda, WeightPlan, DeviceWeights]:
    source, cuda = open_model(folder), PackingCuda()
    options = EngineOptions(max_concurrency=1, max_context=64, weights=weights)
    plan = plan_on(source.config, cuda, options, bands=source.bands).weights
    store = WeightStore(cuda, plan, Arena(cuda.allocate(plan.num_bytes), plan.num_bytes))
    source_fill(source, ignore)(store)
    return cuda, plan, store.finish()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_hold_the_numbers_of_the_checkpoint(tmp_path: Path, case: str, layout: str) -> None:
    """Bit for bit once decoded to bf16, which for e4m3 and e2m1 codes is one rounding of the
    product with the scales."""
    folder = quantise_checkpoint(golden_model(case), tmp_path / "q", layout)
    cuda, plan, weights = load(folder)
    assert plan.decoded == {}
    formats = set()
    for item, values in open_model(folder).read_float32():
        want = float_to_bf16(values)
        for part in weights.linears.get(item.name, ()):
            layout_ = part.matrix.layout
            got = dequantise.reference(
                read(cuda, part.linear.image), layout_,
                row_scale=None if part.linear.row_scale is None
                else read(cuda, part.linear.row_scale),
                is_interleaved=part.matrix.is_interleaved,
            )  # fmt: skip
            rows = slice(part.first_row, part.first_row + layout_.rows)
            np.testing.assert_array_equal(got, want[rows], err_msg=item.name)
            formats.add(layout_.format)
        if item.name in weights.experts:
            experts = weights.experts[item.name]
            images = read(cuda, experts.images)
            scales = None if experts.row_scales is None else read(cuda, experts.row_scales)
            for index in range(item.shape[0]):
                got = dequantise.reference(
                    images[index], experts.layout,
                    row_scale=None if scales is None else scales[index],
                    is_interleaved=item.name.endswith("gate_up"),
                )  # fmt: skip
                np.testing.assert_array_equal(got, want[index], err_msg=item.name)
            formats.add(experts.layout.format)
    expected = FORMATS.get(layout, {WeightFormat.FP8_ROW})
    if layout == "modelopt-mixed":
        expected = {WeightFormat.FP8_ROW, WeightFormat.NVFP4}
    assert formats == {WeightFormat.BF16, *expected}


def test_parts_of_different_formats_are_images_of_their_own(tmp_path: Path) -> None:
    """As FP8 releases of hybrid models have them: qkv and z in codes, b and a in BF16."""
    folder = quantise_checkpoint(golden_model("qwen3_5-dense"), tmp_path / "q", "fp8-block")
    _, plan, weights = load(folder)
    parts = weights.linears["layers.0.gdn.in_proj"]
    formats = [part.matrix.layout.format for part in parts]
    assert formats == [WeightFormat.FP8_BLOCK, WeightFormat.FP8_BLOCK, WeightFormat.BF16]
    assert [part.first_row for part in parts] == [0, 320, 512]
    assert not any(part.is_whole for part in parts)
    (gate_up,) = weights.linears["layers.0.mlp.gate_up"]
    assert gate_up.is_whole
    assert gate_up.matrix.is_interleaved
    assert sum(matrix.num_bytes for matrix in plan.matrices) < plan.num_bytes


def test_codes_may_be_decoded_to_bf16(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "ct-nvfp4")
    cuda, plan, loaded = load(folder, "bf16")
    assert plan.encoded == {}
    assert {matrix.layout.format for matrix in plan.matrices} == {WeightFormat.BF16}
    values = {item.name: array for item, array in open_model(folder).read_float32()}
    (part,) = loaded.linears["layers.0.mlp.down_proj"]
    got = dequantise.reference(read(cuda, part.linear.image), part.matrix.layout)
    np.testing.assert_array_equal(got, float_to_bf16(values["layers.0.mlp.down_proj"]))


@pytest.mark.parametrize(
    ("layout", "weights", "name"),
    [
        ("fp8-block", "auto", "fp8"),
        ("fp8-block", "fp8", "fp8"),
        ("ct-channel", "fp8", "fp8"),
        ("ct-nvfp4", "auto", "nvfp4"),
        ("ct-nvfp4", "nvfp4", "nvfp4"),
        ("modelopt-mixed", "auto", "fp8+nvfp4"),
        ("modelopt-mixed", "bf16", "bf16"),
    ],
)
def test_the_format_is_that_of_the_checkpoint(
    tmp_path: Path, layout: str, weights: str, name: str
) -> None:
    source = open_model(quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", layout))
    options = EngineOptions(max_concurrency=1, weights=weights)
    plan = plan_on(source.config, FakeCuda(), options, bands=source.bands)
    assert plan.weight_format == name


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("fp8-block", "nvfp4"),
        ("ct-nvfp4", "fp8"),
        ("modelopt-mixed", "fp8"),
        ("modelopt-mixed", "nvfp4"),
    ],
)
def test_codes_are_never_quantised_a_second_time(tmp_path: Path, layout: str, weights: str) -> None:
    source = open_model(quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", layout))
    options = EngineOptions(weights=weights)
    with pytest.raises(OptionError, match=f"--weights: {weights} is not what the checkpoint holds"):
        plan_on(source.config, FakeCuda(), options, bands=source.bands)


def test_what_cannot_keep_its_codes_is_decoded_and_named(tmp_path: Path) -> None:
    """An up projection in BF16 beside a gate in codes: the two take turns in one image."""
    plain = decode_checkpoint(golden_model("qwen3-dense"), tmp_path / "f", "ct-channel")
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "ct-channel")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = read_tensors(folder / "model.safetensors")
    del tensors[name + "_scale"]
    tensors[name] = read_tensors(plain / "model.safetensors")[name]
    write_safetensors(folder / "model.safetensors", tensors)
    cuda, plan, weights = load(folder)
    assert plan.decoded == {"layers.1.mlp.gate_up": "its parts are stored as fp8_row and float"}
    (part,) = weights.linears["layers.1.mlp.gate_up"]
    assert part.matrix.layout.format is WeightFormat.BF16
    values = {item.name: array for item, array in open_model(plain).read_float32()}
    got = dequantise.reference(
        read(cuda, part.linear.image), part.matrix.layout, is_interleaved=True
    )
    np.testing.assert_array_equal(got, float_to_bf16(values["layers.1.mlp.gate_up"]))


def read(cuda: FakeCuda, tensor: object) -> NDArray[Any]:
    assert isinstance(tensor, DeviceTensor)
    return cuda.read(tensor)


@pytest.mark.parametrize("layout", ["fp8-block", "ct-channel", "modelopt-mixed"])
@pytest.mark.parametrize("case", CASES)
async def test_every_launch_meets_its_contract(tmp_path: Path, case: str, layout: str) -> None:
    """Few columns and many, with objects in several images."""
    source = open_model(quantise_checkpoint(golden_model(case), tmp_path / "q", layout))
    cuda = FakeCuda()
    options = EngineOptions(
        max_concurrency=2,
        max_context=256,
        prefill_chunk=64,
        memory_budget=MEMORY_BUDGET,
        host_cache_bytes=0,
    )
    fill = source_fill(source, ignore)
    built = build_cuda(source.config, cuda, options, fill, bands=source.bands)
    assert sum(cuda.sizes.values()) == built.plan.memory.total_bytes
    for count in (1, 16, 17, 64):
        row = driver.sequence(0).row(list(range(count)), samples=False)
        scores = await built.executor.score(row)
        assert scores.shape == (count, source.config.vocab_size)
    await built.executor.decode((driver.sequence(1).row([1], samples=True),))


async def test_parts_are_multiplied_into_their_own_columns(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3_5-dense"), tmp_path / "q", "fp8-block")
    source, cuda = open_model(folder), FakeCuda()
    options = EngineOptions(
        max_concurrency=1,
        max_context=256,
        prefill_chunk=64,
        memory_budget=MEMORY_BUDGET,
        host_cache_bytes=0,
    )
    fill = source_fill(source, ignore)
    built = build_cuda(source.config, cuda, options, fill, bands=source.bands)
    await built.executor.score(driver.sequence(0).row(list(range(64)), samples=False))
    first, second, third = [item for item in cuda.queued if isinstance(item, Product)][:3]
    assert [item.weight.shape[0] for item in (first, second, third)] == [320, 192, 12]
    start = first.y.address
    assert [item.y.address - start for item in (second, third)] == [2 * 320, 2 * 512]
    assert {item.y.row_stride for item in (first, second, third)} == {524}
