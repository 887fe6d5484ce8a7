"""Quantised checkpoints on the device: their very codes, and logits near those of float32."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.convert.opened_model import OpenedModel
from ninfer.convert.source import open_model
from ninfer.ops import dequantise
from ninfer.ops.float_codecs import HalfArray, float_to_bf16
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.cuda_weights import DeviceWeights, MatrixSpec
from tests.e2e.test_goldens import load_prompts
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import SMALL_OPTIONS, cuda_executor
from tests.helpers.distributions import divergences, lead
from tests.helpers.expert_choices import RouterLog, run_with_experts, watched_router
from tests.helpers.model_paths import golden_model
from tests.helpers.quantised_checkpoints import decode_checkpoint, quantise_checkpoint
from tests.program.executors.test_cuda_goldens import CLOSE_CALL, most_divergence

pytestmark = pytest.mark.gpu

CASES = ("qwen3-dense", "qwen3_5-dense-tied-realheads", "qwen3-moe", "qwen3_5-moe")
LAYOUTS = ("fp8-block", "ct-channel", "ct-nvfp4", "modelopt-mixed")
"""One of each kind of image; how the others get there needs no device."""
OPTIONS = dataclasses.replace(SMALL_OPTIONS, weights="auto")
STEPS = 6
ROUTER_NOISE = 0.15
"""As that of the goldens, for four models in place of one: where the float32 reference rounds
weights, activations and products to bf16, its choices lag by up to 0.123 (qwen3_5-moe in NVFP4)."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """`source` is quantised.

    plain     its numbers as F32, by an independent formula
    rounded   the same as BF16: what many columns meet
    wanted    float32 logits of `plain` by prompt
    """

    case: str
    layout: str
    source: OpenedModel
    plain: OpenedModel
    rounded: OpenedModel
    executor: CudaExecutor
    weights: DeviceWeights
    wanted: dict[str, Float32Array]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=LAYOUTS)
def loaded(
    request: pytest.FixtureRequest, case: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    layout = str(request.param)
    folder = tmp_path_factory.mktemp("quantised")
    source = open_model(quantise_checkpoint(golden_model(case), folder / "q", layout))
    plain = open_model(decode_checkpoint(golden_model(case), folder / "f", layout))
    rounded = open_model(decode_checkpoint(golden_model(case), folder / "r", layout, "BF16"))
    wanted = asyncio.run(reference_logits(plain, case))
    finished: list[DeviceWeights] = []
    finish = WeightStore.finish

    def watch(store: WeightStore) -> DeviceWeights:
        finished.append(finish(store))
        return finished[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightStore, "finish", watch)
        with cuda_executor(source, OPTIONS) as executor:
            yield Loaded(case, layout, source, plain, rounded, executor, finished[0], wanted)


async def reference_logits(plain: OpenedModel, case: str) -> dict[str, Float32Array]:
    executor = driver.build_executor(plain)
    try:
        return {
            name: await driver.score(executor, driver.sequence(), golden.prompt, (1000,))
            for name, golden in load_prompts(case).items()
        }
    finally:
        executor.close()


def unpacked(loaded: Loaded, matrix: MatrixSpec, image: DeviceTensor, scale: object) -> HalfArray:
    """What the device makes of an image."""
    driver_ = loaded.executor.driver
    layout = matrix.layout
    address = driver_.allocate(2 * layout.rows * layout.columns)
    try:
        y = DeviceTensor.dense(address, (layout.rows, layout.columns), "uint16")
        assert scale is None or isinstance(scale, DeviceTensor)
        dequantise.launch(
            driver_.kernels, layout, image, y, row_scale=scale,
            is_interleaved=matrix.is_interleaved, stream=driver_.stream,
        )  # fmt: skip
        result = np.empty(y.shape, np.uint16)
        driver_.download(result, address)
        driver_.synchronize()
    finally:
        driver_.release(address)
    return result


def test_the_device_holds_the_numbers_of_the_checkpoint(loaded: Loaded) -> None:
    """Bit for bit: all that is rounded is the product of code and scales, once, to bf16."""
    weights = loaded.weights
    checked = 0
    for item, values in loaded.source.read_float32():
        want = float_to_bf16(values)
        if item.name in weights.linears:
            for part in weights.linears[item.name]:
                image = part.linear.image
                assert isinstance(image, DeviceTensor)
                got = unpacked(loaded, part.matrix, image, part.linear.row_scale)
                rows = slice(part.first_row, part.first_row + got.shape[0])
                np.testing.assert_array_equal(got, want[rows], err_msg=item.name)
                checked += 1
        if item.name in weights.experts:
            experts = weights.experts[item.name]
            matrix = MatrixSpec(
                item.name, experts.layout, is_interleaved=item.name.endswith("gate_up")
            )
            assert isinstance(experts.images, DeviceTensor)
            for index in range(item.shape[0]):
                scales = experts.row_scales
                scale = scales.index(index) if isinstance(scales, DeviceTensor) else None
                got = unpacked(loaded, matrix, experts.images.index(index), scale)
                np.testing.assert_array_equal(got, want[index], err_msg=item.name)
                checked += 1
    assert checked > 5


@pytest.mark.parametrize("chunk", [16, 1000])
async def test_logits_stay_near_those_of_the_decoded_numbers(loaded: Loaded, chunk: int) -> None:
    """A mean over the positions of all prompts: those of a short one alone may all be close calls
    of this layout's numbers, which no independent bf16 run has measured."""
    prompts = load_prompts(loaded.case)
    found: list[NDArray[np.float64]] = []
    for name, golden in prompts.items():
        with watched_router(loaded.executor, loaded.source.config) as log:
            got = await driver.score(loaded.executor, driver.sequence(), golden.prompt, (chunk,))
        source = loaded.plain if min(chunk, len(golden.prompt)) <= SMALL_TOKENS else loaded.rounded
        found.append(divergences(led(loaded, source, name, golden.prompt, log), got))
    mean = float(np.concatenate(found).mean())
    print(loaded.case, loaded.layout, f"{mean:.2e}", *(f"{part.mean():.2e}" for part in found))
    most = [most_divergence(loaded.case, name) for name in prompts]
    assert mean <= np.average(most, weights=[part.size for part in found])


def led(
    loaded: Loaded, source: OpenedModel, name: str, prompt: list[int], log: RouterLog
) -> Float32Array:
    """The float32 logits, or those of `source` with the experts that the device took where it took
    others."""
    if loaded.source.config.moe is None:
        return loaded.wanted[name]
    run = run_with_experts(source, prompt, log.choices())
    lag = float(run.lags.max())
    assert lag < ROUTER_NOISE, f"{loaded.case} {loaded.layout} {name}: {lag}"
    return run.logits if lag > 0.0 else loaded.wanted[name]


async def test_decoded_tokens_are_those_of_the_decoded_numbers(loaded: Loaded) -> None:
    reference = driver.build_executor(loaded.plain)
    try:
        golden = next(iter(load_prompts(loaded.case).values()))
        ours, theirs = driver.sequence(2), driver.sequence(2)
        got = driver.taken(await driver.prefill(loaded.executor, ours, golden.prompt, (64,)))
        want = driver.taken(await driver.prefill(reference, theirs, golden.prompt, (64,)))
        tokens = list(golden.prompt)
        for step in range(STEPS):
            if got.token_id != want.token_id:
                scores = await driver.score(reference, driver.sequence(5), tokens, (1000,))
                assert lead(scores[-1], got.token_id) < CLOSE_CALL, step
            tokens.append(want.token_id)
            (got,) = await driver.decode(loaded.executor, [ours], [want.token_id])
            (want,) = await driver.decode(reference, [theirs], [want.token_id])
    finally:
        reference.close()


@pytest.mark.parametrize("case", ["qwen3-dense"])
async def test_decoding_to_bf16_gives_the_same_model(case: str, tmp_path: Path) -> None:
    """`--weights bf16`: one rounding of every number, no codes."""
    source = open_model(quantise_checkpoint(golden_model(case), tmp_path / "q", "modelopt-mixed"))
    options = dataclasses.replace(SMALL_OPTIONS, weights="bf16")
    name, golden = next(iter(load_prompts(case).items()))
    reference = driver.build_executor(source)
    try:
        want = await driver.score(reference, driver.sequence(), golden.prompt, (1000,))
    finally:
        reference.close()
    with cuda_executor(source, options) as executor:
        got = await driver.score(executor, driver.sequence(), golden.prompt, (1000,))
    assert divergences(want, got).mean() <= most_divergence(case, name)
