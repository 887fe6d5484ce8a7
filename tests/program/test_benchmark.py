"""ModelBenchmark over a driver without a device, and the figures it is judged by."""

from __future__ import annotations

import pytest

from ninfer.contract.errors import OptionError
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.options import EngineOptions
from ninfer.program.benchmark import BenchCase, ModelBenchmark
from ninfer.program.cuda_loader import build_cuda
from ninfer.program.executors.cuda_weights import WEIGHT_FORMATS, plan_weights
from ninfer.program.synthetic_weights import fill_synthetic
from ninfer.program.traffic import prompt_flop, step_traffic
from tests.helpers.fake_cuda import FakeCuda

CONFIG = SYNTHETIC_MODELS["qwen3.5-0.8b"]
RATE = 4.7e12


def make_benchmark(cuda: FakeCuda) -> ModelBenchmark:
    options = EngineOptions(
        max_concurrency=2, max_context=300, weights="fp8", prefill_chunk=128, host_cache_bytes=0
    )
    built = build_cuda(CONFIG, cuda, options, lambda store: fill_synthetic(cuda, CONFIG, store))
    return ModelBenchmark(
        CONFIG,
        built.executor,
        built.plan.memory.capacity,
        built.plan.weights,
        kv_dtype="bf16",
        read_rate=RATE,
    )


async def test_a_case_is_run_and_counted() -> None:
    cuda = FakeCuda(free_bytes=1 << 36, has_memory=False)
    figures = await make_benchmark(cuda).run(BenchCase(200, 2, 6))
    layers = len(CONFIG.layers)
    assert figures.kernels_a_step == 18 * 5 + 6 * 7 + 3 == layers * 5 + 6 * 2 + 3
    assert sum(figures.family_s.values()) == pytest.approx(figures.kernels_a_step * 1e-6)
    assert figures.floor_s == pytest.approx(figures.bytes_a_step / RATE)
    assert figures.fraction == pytest.approx(figures.floor_s / figures.step_s.median)
    assert figures.tokens_s == pytest.approx(2 / figures.step_s.median)
    assert figures.bytes_a_token == figures.bytes_a_step / 2
    assert figures.prefill_tokens_s == pytest.approx(200 / figures.prefill_s.median)


@pytest.mark.parametrize("case", [BenchCase(300, 1, 4), BenchCase(10, 3, 4)])
async def test_a_case_past_the_capacity_is_refused(case: BenchCase) -> None:
    with pytest.raises(OptionError, match="too small"):
        await make_benchmark(FakeCuda(free_bytes=1 << 36, has_memory=False)).run(case)


@pytest.mark.parametrize(
    ("name", "weights", "gigabytes"),
    [("qwen3.5-4b", "bf16", 8.54), ("qwen3.5-27b", "bf16", 51.6), ("qwen3.5-27b", "fp8", 27.3)],
)
def test_bytes_of_a_step_are_those_counted_by_hand(
    name: str, weights: str, gigabytes: float
) -> None:
    config = SYNTHETIC_MODELS[name]
    plan = plan_weights(config, WEIGHT_FORMATS[weights])
    traffic = step_traffic(config, plan, kv_dtype="bf16", num_rows=1, context_tokens=1024)
    assert traffic.total_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert traffic.kv_bytes == 1024 * 2 * config.num_attention_layers * 4 * 256 * 2


def test_of_experts_only_those_that_are_chosen_count() -> None:
    config = SYNTHETIC_MODELS["qwen3.5-35b-a3b"]
    plan = plan_weights(config, WEIGHT_FORMATS["bf16"])
    one, many = (
        step_traffic(config, plan, kv_dtype="bf16", num_rows=rows, context_tokens=1).weights_bytes
        for rows in (1, 1000)
    )
    assert one / 1e9 == pytest.approx(2 * 3.0, rel=0.05), "3 billion are active"
    assert many == pytest.approx(plan.num_bytes - 248_320 * 2048 * 2, rel=1e-3)


@pytest.mark.parametrize(("name", "gigaflop"), [("qwen3.5-4b", 7.14), ("qwen3.5-27b", 48.7)])
def test_flop_of_a_token_are_those_counted_by_hand(name: str, gigaflop: float) -> None:
    config = SYNTHETIC_MODELS[name]
    plan = plan_weights(config, WEIGHT_FORMATS["nvfp4"])
    assert prompt_flop(config, plan, 64) / 64e9 == pytest.approx(gigaflop, rel=0.01)
