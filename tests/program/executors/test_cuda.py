"""CudaExecutor over a driver without a device: what is queued, copied, read and given back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ninfer.contract.errors import DeviceError, InvariantError, OptionError
from ninfer.contract.model import GdnConfig, ModelConfig, ModelObject, MoeConfig
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import RowOutput, UnitRow
from ninfer.models.parameters import model_objects
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.ops.device_sampling import MAX_TOP
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import BuiltExecutor, build_cuda
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_dflash_weights import PREFIX
from ninfer.program.executors.cuda_weight_store import WeightStore
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.synthetic_weights import fill_synthetic
from tests.helpers import executor_driver as driver
from tests.helpers.expert_choices import watched_router
from tests.helpers.fake_cuda import FakeCuda, Launch, Product
from tests.helpers.model_configs import hybrid_config

OPTIONS = EngineOptions(
    max_concurrency=3,
    max_context=512,
    prefill_chunk=64,
    weights="bf16",
    memory_budget=96 << 20,
    host_cache_bytes=2 << 20,
)
MOE = MoeConfig(8, 2, 32, 48, True)


def small_config(
    mixers: str = "GGGA", moe: MoeConfig | None = None, *, head_dim: int = 64
) -> ModelConfig:
    """Sizes that have kernels; the vocabulary is no multiple of anything."""
    config = hybrid_config(mixers=mixers, vocab_size=101, moe=moe)
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, head_dim=head_dim),
        gdn=GdnConfig(2, 4, 32, 32, 4) if "G" in mixers else None,
    )


def put_random(store: WeightStore, objects: Iterable[ModelObject], prefix: str = "") -> None:
    rng = np.random.default_rng(0)
    for item in objects:
        if store.expects(prefix + item.name):
            store.put(prefix + item.name, rng.standard_normal(item.shape).astype(np.float32))


def build(
    cuda: FakeCuda,
    config: ModelConfig | None = None,
    options: EngineOptions = OPTIONS,
    dflash: DflashSetup | None = None,
) -> BuiltExecutor:
    chosen = config or small_config()

    def fill(store: WeightStore) -> None:
        put_random(store, model_objects(chosen))
        if dflash is not None:
            put_random(store, dflash.objects, PREFIX)

    return build_cuda(chosen, cuda, options, fill, dflash=dflash)


def built_executor(cuda: FakeCuda) -> CudaExecutor:
    return build(cuda).executor


def answer(cuda: FakeCuda, token_ids: list[int], *, is_finite: bool = True) -> None:
    """Let every replayed graph choose these tokens."""

    def play(graph: list[Any]) -> None:
        num_rows = len(token_ids)
        results = np.zeros(num_rows * (3 + 2 * MAX_TOP), np.int32)
        results[:num_rows] = token_ids
        results[num_rows : 2 * num_rows] = is_finite
        results[2 * num_rows : 3 * num_rows].view(np.float32)[:] = -0.5
        tops = results[3 * num_rows : (3 + MAX_TOP) * num_rows].reshape(num_rows, MAX_TOP)
        tops[:] = np.arange(MAX_TOP)
        values = results[(3 + MAX_TOP) * num_rows :].view(np.float32).reshape(num_rows, MAX_TOP)
        values[:] = -np.arange(MAX_TOP)
        cuda.write_results(results)

    cuda.on_replay = play


async def decode(executor: CudaExecutor, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
    return await executor.decode(rows)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(
    "config",
    [
        small_config(), small_config("AA"), small_config("GG"), small_config(moe=MOE),
        small_config("A", moe=dataclasses.replace(MOE, shared_intermediate_size=None)),
        small_config("GA", head_dim=32),
    ],
    ids=["hybrid", "attention", "gdn", "moe", "moe without shared", "heads of 32"],
)  # fmt: skip
async def test_every_launch_of_every_unit_meets_its_contract(
    config: ModelConfig, weights: str, kv_dtype: str
) -> None:
    cuda = FakeCuda()
    options = dataclasses.replace(OPTIONS, weights=weights, kv_dtype=kv_dtype)
    executor = build(cuda, config, options).executor
    allocations = dict(cuda.sizes)
    pinned = len(cuda.pinned)
    target = driver.sequence(0)
    for count in (1, 15, 16, 17, 63, 64):
        await executor.prefill(target.row(list(range(count)), samples=count != 63))
        scores = await executor.score(target.row(list(range(count)), samples=False))
        assert scores.shape == (count, config.vocab_size)
    rows = tuple(driver.sequence(index).row([index], samples=True) for index in range(3))
    for count in (1, 2, 3):
        await executor.decode(rows[:count])
    assert cuda.sizes == allocations, "running allocates nothing"
    assert len(cuda.pinned) == pinned


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen3.5-0.8b", "bf16"), ("qwen3.5-27b", "nvfp4"), ("qwen3.5-35b-a3b", "bf16"),
        ("qwen3-8b", "fp8"),
    ],
)  # fmt: skip
async def test_real_sizes_meet_every_contract(name: str, weights: str) -> None:
    config = SYNTHETIC_MODELS[name]
    cuda = FakeCuda(free_bytes=140 << 30, has_memory=False)
    options = EngineOptions(
        max_concurrency=2, max_context=8192, weights=weights, host_cache_bytes=0
    )
    built = build_cuda(config, cuda, options, lambda store: fill_synthetic(cuda, config, store))
    assert sum(cuda.sizes.values()) == built.plan.memory.total_bytes
    row = driver.sequence(0).row(list(range(300)), samples=True)
    await built.executor.prefill(row)
    launches = cuda.launches(built.executor.graphs.of(1))
    layers = len(config.layers)
    assert layers * 5 <= len(launches) <= layers * 13 + 3


@pytest.mark.parametrize("config", [small_config(), small_config(moe=MOE)], ids=["dense", "moe"])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_the_plan_is_what_is_allocated(config: ModelConfig, weights: str) -> None:
    cuda = FakeCuda()
    built = build(cuda, config, dataclasses.replace(OPTIONS, weights=weights))
    assert sum(cuda.sizes.values()) == built.plan.memory.total_bytes


async def test_decode_replays_the_graph_of_its_size_and_nothing_else() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    for count in (2, 1, 3):
        rows = tuple(driver.sequence(index).row([index], samples=True) for index in range(count))
        await decode(executor, rows)
        before = len(cuda.launches())
        await decode(executor, rows)
        graph = executor.graphs.of(count)
        assert cuda.launches()[before:] == cuda.launches(graph)
        embedding = cuda.launches(graph)[0]
        assert embedding.family == "embedding"
        assert embedding.grid == (count, 1, 1)
        assert not embedding.is_programmatic
        assert all(launch.is_programmatic for launch in cuda.launches(graph)[1:])


async def test_inputs_reach_the_device_as_they_are() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    rng = np.random.default_rng(1)
    targets = [driver.sequence(index, rng=rng) for index in range(3)]
    for index, target in enumerate(targets):
        target.tokens = [0] * (70 * index + 5)
        target.slot = 1 + 2 * index
    targets[1].rope_delta = -3
    targets[1].positions = np.zeros((3, 70), np.int32)
    rows = tuple(target.row([50 + i], samples=True) for i, target in enumerate(targets))
    await executor.decode(rows)
    unit = executor.workspace.decode_inputs.tensors(3, 3)
    assert cuda.read(unit.token_ids).tolist() == [50, 51, 52]
    assert cuda.read(unit.ordinals).tolist() == [5, 75, 145]
    assert cuda.read(unit.rope_positions).tolist() == [[5, 72, 145]] * 3
    assert cuda.read(unit.column_rows).tolist() == [0, 1, 2]
    assert cuda.read(unit.row_starts).tolist() == [0, 1, 2, 3]
    assert cuda.read(unit.read_slots).tolist() == [1, 3, 5]
    assert cuda.read(unit.write_slots).tolist() == [2, 4, 6]
    for index, row in enumerate(rows):
        table = cuda.read(unit.page_tables)[index]
        assert table[: row.page_table.size].tolist() == row.page_table.tolist()


async def test_page_tables_are_copied_when_they_change() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    first, second = driver.sequence(1), driver.sequence(2)

    async def copies(*rows: UnitRow) -> int:
        """Beside those of tokens, inputs and sampling in, and of results out."""
        before = len(cuda.queued)
        await executor.decode(rows)
        return sum(callable(item) for item in cuda.queued[before : len(cuda.queued)]) - 4

    row, other = first.row([1], samples=True), second.row([1], samples=True)
    await copies(row)
    assert await copies(row) == 0
    assert await copies(other) == 1
    assert await copies(other, row) == 1
    first.tokens = [0] * 64
    assert await copies(other, first.row([1], samples=True)) == 1


async def test_results_of_every_row_are_read() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    answer(cuda, [7, 100])
    rows = tuple(
        driver.sequence(index, SamplingParams(top_logprobs=2 if index else None)).row(
            [1], samples=True
        )
        for index in range(2)
    )
    first, second = await executor.decode(rows)
    assert (driver.taken(first).token_id, driver.taken(second).token_id) == (7, 100)
    assert driver.taken(first).logprobs is None
    logprobs = driver.taken(second).logprobs
    assert logprobs is not None
    assert logprobs.logprob == -0.5
    assert logprobs.top == ((0, 0.0), (1, -1.0))


async def test_rows_without_finite_logits_say_so() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    row = driver.sequence(0).row([1], samples=True)
    answer(cuda, [5], is_finite=False)
    assert await executor.decode((row,)) == (RowOutput(None, is_finite=False),)
    answer(cuda, [-1])
    assert await executor.decode((row,)) == (RowOutput(None, is_dead_end=True),)
    answer(cuda, [101])
    with pytest.raises(InvariantError, match="chose token 101"):
        await executor.decode((row,))


async def test_a_row_that_asks_for_no_token_gets_none() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    answer(cuda, [5])
    assert await executor.decode((driver.sequence(0).row([1], samples=False),)) == (
        RowOutput(None),
    )


async def test_large_units_multiply_and_small_ones_do_not() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    for count, products in ((16, 0), (17, 16), (64, 16)):
        before = len(cuda.queued)
        await executor.prefill(driver.sequence(0).row([1] * count, samples=True))
        queued = cuda.queued[before:]
        assert sum(isinstance(item, Product) for item in queued) == products
        families = Counter(item.family for item in queued if isinstance(item, Launch))
        assert (families["dequantise"] > 0) == (products > 0)


async def test_the_loop_turns_between_the_blocks_of_a_prompt() -> None:
    cuda = FakeCuda(polls=3)
    executor = built_executor(cuda)
    task = asyncio.create_task(executor.prefill(driver.sequence(0).row([1] * 40, samples=True)))
    turns, most, before = 0, 0, len(cuda.queued)
    while not task.done():
        await asyncio.sleep(0)
        turns, most, before = turns + 1, max(most, len(cuda.queued) - before), len(cuda.queued)
    assert turns >= 2 * 4 + 3
    assert most <= 16


async def test_a_lost_device_fails_this_call_and_all_later_ones() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    row = driver.sequence(0).row([1], samples=True)
    await executor.decode((row,))
    cuda.fails_at = cuda.num_queued + 5
    with pytest.raises(DeviceError, match="illegal memory access"):
        await executor.decode((row,))
    queued = len(cuda.queued)
    cuda.fails_at = None
    for call in (executor.decode((row,)), executor.prefill(row), executor.score(row)):
        with pytest.raises(DeviceError, match=r"after a failure: .*illegal memory access"):
            await call
    assert len(cuda.queued) == queued


async def test_a_cancelled_unit_leaves_nothing_queued() -> None:
    cuda = FakeCuda(polls=10**9)
    executor = built_executor(cuda)
    task = asyncio.create_task(executor.decode((driver.sequence(0).row([1], samples=True),)))
    for _ in range(5):
        await asyncio.sleep(0)
    synchronised = cuda.num_synchronised
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cuda.num_synchronised == synchronised + 1


async def test_close_gives_everything_back_once() -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    executor.close()
    executor.close()
    assert cuda.is_closed
    assert not cuda.sizes
    with pytest.raises(DeviceError, match="after close"):
        await executor.decode((driver.sequence(0).row([1], samples=True),))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: dataclasses.replace(row, write_slot=row.read_slot),
        lambda row: dataclasses.replace(row, start=64 * 8),
        lambda row: dataclasses.replace(row, token_ids=np.empty(0, np.int32)),
    ],
)
async def test_broken_rows_are_refused_before_anything_is_queued(spoil: Any) -> None:
    cuda = FakeCuda()
    executor = built_executor(cuda)
    queued = len(cuda.queued)
    row = spoil(driver.sequence(0).row([1], samples=True))
    for call in (executor.decode((row,)), executor.prefill(row), executor.score(row)):
        with pytest.raises(InvariantError):
            await call
    assert len(cuda.queued) == queued


def test_a_model_without_kernels_is_refused_and_the_device_given_back() -> None:
    cuda = FakeCuda()
    with pytest.raises(OptionError, match=r"--executor: cuda cannot run this model: .*heads of 16"):
        build(cuda, hybrid_config())
    assert cuda.is_closed


def test_a_failing_load_gives_the_device_back() -> None:
    cuda = FakeCuda()

    def stop(store: WeightStore) -> None:
        raise InvariantError("the file ends here")

    with pytest.raises(InvariantError, match="ends here"):
        build_cuda(small_config(), cuda, OPTIONS, stop)
    assert cuda.is_closed


def test_missing_weights_are_named() -> None:
    with pytest.raises(InvariantError, match=r"weights .*embed_tokens.* are missing"):
        build_cuda(small_config(), FakeCuda(), OPTIONS, lambda store: None)


def test_too_little_memory_names_the_budget() -> None:
    with pytest.raises(OptionError, match=r"--memory-budget: .*is free on the device less 1 GiB"):
        build(
            FakeCuda(free_bytes=(1 << 30) + 1000),
            options=dataclasses.replace(OPTIONS, memory_budget=None),
        )


async def test_routers_are_watched_in_units_of_any_size() -> None:
    """What tests on the device compare: of every input, without columns of padding."""
    cuda = FakeCuda()
    config = small_config(moe=MOE)
    executor = build(cuda, config).executor
    target = driver.sequence()
    with watched_router(executor, config) as log:
        await driver.score(executor, target, [1] * 48, (3, 16, 17, 12))
    assert log.logits().shape == (len(config.layers), 48, MOE.num_experts)
