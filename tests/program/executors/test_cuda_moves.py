"""Copies, saves and loads on a real device: a sequence goes on bit for bit wherever it lies."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Move
from ninfer.convert.source import open_model
from ninfer.program.executors.cuda import CudaExecutor
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import SMALL_OPTIONS, cuda_executor
from tests.helpers.model_paths import golden_model

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(temperature=0.8, seed=3, top_logprobs=8)
PROMPT = np.random.default_rng(5).integers(0, 300, 130).tolist()


@pytest.fixture(scope="module", params=["bf16", "fp8", "int8"])
def executor(request: pytest.FixtureRequest) -> Iterator[CudaExecutor]:
    options = dataclasses.replace(SMALL_OPTIONS, kv_dtype=request.param)
    with cuda_executor(open_model(golden_model("qwen3_5-dense-tied-realheads")), options) as built:
        yield built


async def opened(executor: CudaExecutor, index: int) -> tuple[driver.DrivenSequence, int]:
    target = driver.sequence(index, PARAMS)
    output = await driver.prefill(executor, target, PROMPT, (100, 30))
    return target, driver.taken(output).token_id


def move_of(executor: CudaExecutor, target: driver.DrivenSequence) -> Move:
    count = -(-executor.slot_bytes // executor.page_bytes)
    pages = tuple((int(page), 2 * i + 1) for i, page in enumerate(target.pages[:3]))
    return Move(pages, target.slot, tuple(range(20, 20 + 3 * count, 3)))


async def test_a_sequence_that_went_through_the_host_goes_on_bit_for_bit(
    executor: CudaExecutor,
) -> None:
    target, token = await opened(executor, 0)
    saved = move_of(executor, target)
    await executor.save(saved)
    moved = driver.sequence(5, PARAMS)
    moved.tokens, moved.slot = list(target.tokens), 11
    pages = tuple((int(moved.pages[i]), block) for i, (_, block) in enumerate(saved.pages))
    await executor.load(Move(pages, moved.slot, saved.state_blocks))
    inputs = [token, token]
    for _ in range(40):
        outputs = await driver.decode(executor, [target, moved], inputs)
        assert outputs[0] == outputs[1]
        inputs = [output.token_id for output in outputs]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
async def test_a_shared_page_is_copied_before_it_is_read(executor: CudaExecutor, kind: str) -> None:
    target, token = await opened(executor, 0)
    original = target.row([token], samples=True)
    spare = 8 * driver.PAGES_PER_SEQUENCE - 1
    table = original.page_table.copy()
    tail, table[2] = int(table[2]), spare
    copied = dataclasses.replace(original, page_table=table, copies=((tail, spare),), write_slot=16)
    if kind == "decode":
        assert await executor.decode((copied,)) == await executor.decode((original,))
    else:
        assert await executor.prefill(copied) == await executor.prefill(original)


async def test_moves_beside_units_change_nothing_of_either(executor: CudaExecutor) -> None:
    target, token = await opened(executor, 0)
    kept, kept_token = await opened(executor, 1)
    saved = move_of(executor, kept)
    await executor.save(saved)
    want = executor.host_blocks[[block for _, block in saved.pages]].copy()
    alone = [await executor.decode((target.row([token], samples=True),)) for _ in range(3)]
    for _ in range(20):
        save = asyncio.create_task(executor.save(saved))
        outputs = await executor.decode((target.row([token], samples=True),))
        await save
        assert outputs == alone[0]
        assert np.array_equal(executor.host_blocks[[block for _, block in saved.pages]], want)
    assert kept_token >= 0
