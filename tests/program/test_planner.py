"""plan_memory: never above the budget, more memory never means less, errors name their flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig, MoeConfig
from ninfer.contract.units import MemoryPlan
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions
from ninfer.program import memory_costs
from ninfer.program.executors import cpu_memory
from ninfer.program.planner import plan_memory
from tests.helpers.model_configs import hybrid_config
from tests.helpers.model_paths import DEMO_MODEL, all_models

MIB = 2**20
PLENTY = 2**50
WEIGHTS = 3 * MIB
CONFIGS = st.builds(
    hybrid_config,
    mixers=st.sampled_from(("GGGA", "AA", "GG", "GAGA")),
    vocab_size=st.sampled_from((97, 4096)),
    max_position_embeddings=st.sampled_from((1, 63, 64, 65, 1000, 4096, 262_144)),
    moe=st.sampled_from((None, MoeConfig(8, 2, 32, 48, True))),
)
OPTIONS = st.builds(
    EngineOptions,
    max_concurrency=st.integers(1, 20),
    prefill_chunk=st.sampled_from((1, 64, 256, 4096)),
)


def plan_within(budget: int, config: ModelConfig, options: EngineOptions) -> MemoryPlan | None:
    """None when the least that runs does not fit."""
    options = dataclasses.replace(options, memory_budget=budget)
    try:
        return plan_memory(
            config, options, weights_bytes=WEIGHTS, available_bytes=PLENTY, host_bytes=PLENTY
        )
    except OptionError:
        return None


@given(CONFIGS, OPTIONS, st.integers(1, 2000 * MIB))
def test_a_plan_stays_within_the_budget(
    config: ModelConfig, options: EngineOptions, budget: int
) -> None:
    plan = plan_within(budget, config, options)
    if plan is None:
        return
    assert plan.total_bytes <= budget == plan.budget_bytes
    capacity = plan.capacity
    needed = -(-capacity.max_context // 64)
    assert 1 <= capacity.max_context <= config.max_position_embeddings
    assert needed <= capacity.num_pages
    assert capacity.prefill_chunk == min(options.prefill_chunk or 256, capacity.max_context)
    assert capacity.num_slots >= 2 * options.max_concurrency + 1
    assert capacity.max_concurrency == options.max_concurrency


@given(CONFIGS, OPTIONS, st.integers(1, 500 * MIB), st.integers(0, 200 * MIB))
def test_more_memory_never_means_less(
    config: ModelConfig, options: EngineOptions, budget: int, more: int
) -> None:
    small = plan_within(budget, config, options)
    large = plan_within(budget + more, config, options)
    if small is None:
        return
    assert large is not None
    assert large.capacity.max_context >= small.capacity.max_context
    assert large.capacity.num_pages >= small.capacity.num_pages
    if config.num_attention_layers:
        assert large.capacity.num_slots >= small.capacity.num_slots


@given(CONFIGS, OPTIONS)
def test_the_named_need_is_enough_and_one_byte_less_is_not(
    config: ModelConfig, options: EngineOptions
) -> None:
    with pytest.raises(OptionError) as caught:
        plan_memory(
            config,
            dataclasses.replace(options, memory_budget=1),
            weights_bytes=WEIGHTS,
            available_bytes=PLENTY,
            host_bytes=PLENTY,
        )
    needed = int(caught.value.message.split(" needs ")[1].split(" bytes")[0].replace(",", ""))
    plan = plan_within(needed, config, options)
    assert plan is not None
    assert plan.total_bytes == needed
    assert plan_within(needed - 1, config, options) is None


@given(CONFIGS, OPTIONS, st.integers(4 * MIB, 300 * MIB))
def test_a_plan_takes_just_what_it_says(
    config: ModelConfig, options: EngineOptions, budget: int
) -> None:
    plan = plan_within(budget, config, options)
    if plan is None:
        return
    exact = plan_within(plan.total_bytes, config, options)
    assert exact is not None
    assert exact.capacity == plan.capacity
    less = plan_within(plan.total_bytes - 1, config, options)
    assert less is None or less.total_bytes < plan.total_bytes


@given(CONFIGS, OPTIONS, st.integers(1, 300 * MIB), st.integers(1, 5000))
def test_an_explicit_context_is_kept_or_refused(
    config: ModelConfig, options: EngineOptions, budget: int, max_context: int
) -> None:
    """Slots that were not asked for yield to it; those that were asked for do not."""
    wanted = dataclasses.replace(options, max_context=max_context)
    bare = dataclasses.replace(options, cache_slots=0)
    longest = plan_within(budget, config, bare)
    plan = plan_within(budget, config, wanted)
    if longest is None or max_context > longest.capacity.max_context:
        assert plan is None
    else:
        assert plan is not None
        assert plan.capacity.max_context == max_context
        assert plan.total_bytes <= budget
        slots = plan_within(budget, config, dataclasses.replace(wanted, cache_slots=40))
        assert slots is None or slots.capacity.num_slots == 2 * options.max_concurrency + 41


def test_plenty_of_memory_gives_every_lane_the_whole_context_and_the_cache_its_default() -> None:
    config = hybrid_config(max_position_embeddings=1000)
    plan = plan_memory(
        config, EngineOptions(), weights_bytes=WEIGHTS, available_bytes=PLENTY, host_bytes=PLENTY
    )
    capacity, detail = plan.capacity, plan.detail
    assert (capacity.max_concurrency, capacity.max_context, capacity.prefill_chunk) == (
        8,
        1000,
        256,
    )
    cache_bytes = (capacity.num_pages - 8 * 16) * detail["page_bytes"]
    cache_bytes += (capacity.num_slots - 17) * detail["slot_bytes"]
    assert 48 * MIB - detail["page_bytes"] - detail["slot_bytes"] < cache_bytes <= 48 * MIB
    assert capacity.num_host_blocks == 48 * MIB // detail["page_bytes"]
    assert plan.host_bytes == capacity.num_host_blocks * detail["page_bytes"]


def test_a_budget_that_was_asked_for_is_used_whole() -> None:
    config = hybrid_config(max_position_embeddings=1000)
    plan = plan_within(900 * MIB, config, EngineOptions())
    assert plan is not None
    least = plan.detail["page_bytes"] + plan.detail["slot_bytes"]
    assert 900 * MIB - least < plan.total_bytes <= 900 * MIB
    assert plan.capacity.num_pages > 8 * 16


def test_an_eighth_of_what_grows_is_for_saved_states() -> None:
    config = hybrid_config(max_position_embeddings=1000)
    plan = plan_within(900 * MIB, config, EngineOptions())
    assert plan is not None
    slots = (plan.capacity.num_slots - 17) * plan.detail["slot_bytes"]
    share = slots / (slots + plan.kv_bytes)
    assert share <= 1 / 8 or plan.capacity.num_slots == 17 + plan.capacity.num_pages // 4


@pytest.mark.parametrize(("wanted", "blocks"), [(0, 0), (3 * MIB, None), (PLENTY, None)])
def test_host_memory_is_what_was_asked_for(wanted: int, blocks: int | None) -> None:
    options = EngineOptions(host_cache_bytes=wanted, memory_budget=90 * MIB)

    def plan_with(host_bytes: int) -> MemoryPlan:
        return plan_memory(
            hybrid_config(),
            options,
            weights_bytes=WEIGHTS,
            available_bytes=PLENTY,
            host_bytes=host_bytes,
        )

    plan = plan_with(PLENTY)
    expected = wanted // plan.detail["page_bytes"] if blocks is None else blocks
    assert plan.capacity.num_host_blocks == expected
    if wanted:
        with pytest.raises(OptionError, match=r"--host-cache-bytes: .* bytes are free"):
            plan_with(wanted - 1)


def test_a_model_without_kv_pages_has_no_host_tier() -> None:
    plan = plan_within(90 * MIB, hybrid_config(mixers="GG"), EngineOptions(cache_slots=5))
    assert plan is not None
    assert (plan.capacity.num_host_blocks, plan.capacity.num_slots) == (0, 22)


def test_the_default_budget_is_half_of_what_is_free() -> None:
    plan = plan_memory(
        hybrid_config(),
        EngineOptions(),
        weights_bytes=WEIGHTS,
        available_bytes=101 * MIB + 1,
        host_bytes=0,
    )
    assert plan.budget_bytes == 101 * MIB // 2


def test_a_short_budget_shortens_the_context_to_one_pool() -> None:
    config = hybrid_config(max_position_embeddings=262_144)
    plan = plan_within(40 * MIB, config, EngineOptions())
    assert plan is not None
    assert plan.capacity.max_context == plan.capacity.num_pages * 64
    assert 64 < plan.capacity.max_context < 262_144
    least = plan.detail["page_bytes"] + plan.detail["slot_bytes"]
    assert plan.budget_bytes - plan.total_bytes < least


@pytest.mark.parametrize(
    ("options", "available", "message"),
    [
        (EngineOptions(memory_budget=MIB), PLENTY, "--memory-budget: the least that runs needs"),
        (EngineOptions(), 4 * MIB, r"the budget is 2,097,152 bytes, half of what is free"),
        (
            EngineOptions(memory_budget=20 * MIB, max_context=200_000),
            PLENTY,
            r"--max-context: 200,000 tokens need [\d,]+ bytes; .* 20,971,520 bytes",
        ),
        (EngineOptions(max_context=262_145), PLENTY, "--max-context: .*262,144 positions"),
        (
            EngineOptions(memory_budget=PLENTY, max_context=200_000),
            100 * MIB,
            r"--memory-budget: the plan needs [\d,]+ bytes and 104,857,600 bytes are free",
        ),
    ],
)
def test_what_does_not_fit_names_flag_need_and_budget(
    options: EngineOptions, available: int, message: str
) -> None:
    config = hybrid_config(max_position_embeddings=262_144)
    with pytest.raises(OptionError, match=message):
        plan_memory(
            config, options, weights_bytes=WEIGHTS, available_bytes=available, host_bytes=available
        )


def test_a_model_without_gdn_needs_no_state_memory() -> None:
    plan = plan_within(50 * MIB, hybrid_config(mixers="AA"), EngineOptions())
    assert plan is not None
    assert plan.state_bytes == 0
    assert plan.capacity.num_slots == 17


@pytest.mark.parametrize("path", all_models(), ids=lambda path: path.parent.name)
def test_planned_bytes_are_what_the_executor_allocates(path: Path) -> None:
    source = open_model(path)
    weights_bytes = memory_costs.weights_bytes_of(source.objects)
    assert weights_bytes == sum(array.nbytes for _, array in source.read_float32())
    plan = plan_memory(
        source.config,
        EngineOptions(max_concurrency=2, max_context=100),
        weights_bytes=weights_bytes,
        available_bytes=PLENTY,
        host_bytes=PLENTY,
    )
    memory = cpu_memory.allocate(source.config, plan.capacity)
    assert plan.kv_bytes == memory.k_pages.nbytes + memory.v_pages.nbytes
    assert plan.state_bytes == memory.windows.nbytes + memory.states.nbytes


def test_the_demo_model_with_eight_lanes_stays_under_400_megabytes() -> None:
    source = open_model(DEMO_MODEL)
    plan = plan_memory(
        source.config,
        EngineOptions(),
        weights_bytes=memory_costs.weights_bytes_of(source.objects),
        available_bytes=PLENTY,
        host_bytes=PLENTY,
    )
    assert plan.total_bytes + plan.host_bytes < 300e6
    assert plan.capacity.num_pages > 8 * 32
