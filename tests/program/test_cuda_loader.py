"""plan_on and CudaCosts: which weight format, how much context, exact to the byte."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OptionError
from ninfer.contract.units import Capacity
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.options import EngineOptions
from ninfer.program.cuda_costs import RESERVE_BYTES, CudaCosts
from ninfer.program.cuda_loader import plan_on
from ninfer.program.executors.cuda_tensor import Arena
from ninfer.program.executors.cuda_weights import WEIGHT_FORMATS, plan_weights
from ninfer.program.executors.cuda_workspace import carve_workspace
from tests.helpers.fake_cuda import H200, FakeCuda

GIB = 1 << 30
LARGE = SYNTHETIC_MODELS["qwen3.5-27b"]


@pytest.mark.parametrize(
    ("free_gib", "expected"), [(140, "bf16"), (60, "bf16"), (50, "fp8"), (30, "nvfp4")]
)
def test_auto_takes_the_widest_format_with_a_useful_context(free_gib: int, expected: str) -> None:
    cuda = FakeCuda(free_bytes=free_gib * GIB, has_memory=False)
    plan = plan_on(LARGE, cuda, EngineOptions(max_concurrency=1))
    assert plan.weight_format == expected
    assert plan.memory.capacity.max_context >= 16_384
    assert plan.memory.total_bytes <= free_gib * GIB - RESERVE_BYTES


def test_auto_that_fits_nowhere_names_the_budget() -> None:
    cuda = FakeCuda(free_bytes=12 * GIB, has_memory=False)
    with pytest.raises(OptionError, match="--memory-budget: the least that runs needs"):
        plan_on(LARGE, cuda, EngineOptions())


def test_an_explicit_format_is_kept_or_refused() -> None:
    cuda = FakeCuda(free_bytes=40 * GIB, has_memory=False)
    assert plan_on(LARGE, cuda, EngineOptions(weights="nvfp4")).weight_format == "nvfp4"
    with pytest.raises(OptionError, match="--memory-budget"):
        plan_on(LARGE, cuda, EngineOptions(weights="bf16"))


def test_a_format_that_the_sizes_rule_out_is_refused_by_name() -> None:
    config = dataclasses.replace(SYNTHETIC_MODELS["qwen3.5-0.8b"], intermediate_size=3592)
    cuda = FakeCuda(free_bytes=100 * GIB, has_memory=False)
    with pytest.raises(OptionError, match="--weights: nvfp4 does not fit this model"):
        plan_on(config, cuda, EngineOptions(weights="nvfp4"))


def test_the_default_chunk_is_larger_than_on_the_cpu() -> None:
    cuda = FakeCuda(free_bytes=100 * GIB, has_memory=False)
    config = SYNTHETIC_MODELS["qwen3.5-0.8b"]
    assert plan_on(config, cuda, EngineOptions()).memory.capacity.prefill_chunk == 2048
    options = EngineOptions(prefill_chunk=100)
    assert plan_on(config, cuda, options).memory.capacity.prefill_chunk == 100


@given(
    name=st.sampled_from(("qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3-8b")),
    kv_dtype=st.sampled_from(("bf16", "fp8", "int8")),
    weights=st.sampled_from(tuple(WEIGHT_FORMATS)),
    lanes=st.integers(1, 40),
    pages=st.integers(1, 5000),
    context=st.integers(1, 100_000),
    chunk=st.integers(1, 9000),
)
def test_what_is_planned_is_what_is_carved(
    name: str, kv_dtype: str, weights: str, lanes: int, pages: int, context: int, chunk: int
) -> None:
    config = SYNTHETIC_MODELS[name]
    plan = plan_weights(config, WEIGHT_FORMATS[weights])
    costs = CudaCosts(config, plan, H200, kv_dtype)
    capacity = Capacity(lanes, context, pages, 2 * lanes + 1, min(chunk, context))
    arena = Arena()
    carve_workspace(arena, config, plan, capacity, H200, kv_dtype=kv_dtype)
    planned = (
        pages * costs.page_bytes()
        + capacity.num_slots * costs.slot_bytes()
        + sum(costs.workspace_bytes(capacity).values())
    )
    assert arena.used_bytes == planned
    more = dataclasses.replace(capacity, max_context=context + 500, prefill_chunk=chunk + 7)
    assert sum(costs.workspace_bytes(more).values()) >= sum(
        costs.workspace_bytes(capacity).values()
    )


def test_pages_cost_what_their_formats_say() -> None:
    values = 2 * LARGE.num_attention_layers * 64 * LARGE.attention.num_kv_heads
    plan = plan_weights(LARGE, WEIGHT_FORMATS["bf16"])
    sizes = {
        kv_dtype: CudaCosts(LARGE, plan, H200, kv_dtype).page_bytes()
        for kv_dtype in ("bf16", "fp8", "int8")
    }
    assert sizes == {"bf16": values * 512, "fp8": values * 260, "int8": values * 264}
