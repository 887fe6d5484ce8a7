"""Quantised checkpoints into a WeightStore: the images and row scales that lie on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ninfer.convert.source import open_model
from ninfer.ops import dequantise
from ninfer.ops.float_codecs import float_to_bf16
from ninfer.ops.linear_packing import WeightFormat
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import plan_on, source_fill
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.cuda_weights import DeviceWeights, WeightPlan
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.model_paths import golden_model
from tests.helpers.packing_cuda import PackingCuda
from tests.helpers.quantised_checkpoints import LAYOUTS, quantise_checkpoint

CASES = ("qwen3-dense", "qwen3-moe", "qwen3_5-dense", "qwen3_5-dense-tied-realheads", "qwen3_5-moe")
OPTIONS = EngineOptions(max_concurrency=1, max_context=64)


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
    cuda, _, weights = load(folder)
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
    assert WeightFormat.BF16 in formats
    assert formats - {WeightFormat.BF16}


def read(cuda: FakeCuda, tensor: object) -> np.typing.NDArray[np.generic]:
    assert isinstance(tensor, DeviceTensor)
    return cuda.read(tensor)
