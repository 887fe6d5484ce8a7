"""Token masks in both executors: what is queued and copied, what is drawn, whom they concern."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import RowOutput, UnitRow
from ninfer.convert.source import open_model
from ninfer.ops import sampling
from ninfer.program.executors.cuda import CudaExecutor
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import cuda_executor
from tests.helpers.executor_driver import DrivenSequence
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fixed_mask import FixedMask, packed
from tests.helpers.model_paths import DEMO_MODEL, golden_model
from tests.program.executors.test_cuda import build
from tests.program.executors.test_cuda_decode import logits_of

VOCAB = 101
WARM = SamplingParams(temperature=0.9, top_p=0.95, seed=4, top_logprobs=3)


def masked(target: DrivenSequence, token_id: int, mask: FixedMask | None) -> UnitRow:
    row = target.row([token_id], samples=False)
    sample = driver.sample_row(target.frontier + 1, target.params)
    if mask is not None:
        sample = driver.with_mask(sample, mask)
    return driver.with_sample(row, sample)


async def test_a_masked_step_chooses_once_with_the_masks_on_the_device() -> None:
    cuda = FakeCuda()
    executor = build(cuda).executor
    mask = FixedMask((3, 40, 100))
    targets = [driver.sequence(index) for index in range(2)]
    plain = tuple(masked(target, 1, None) for target in targets)
    await executor.decode(plain)
    before = len(cuda.launches())
    await executor.decode(plain)
    num_plain = len(cuda.launches()) - before
    before = len(cuda.launches())
    await executor.decode((masked(targets[0], 1, mask), plain[1]))
    launches = cuda.launches()[before:]
    assert len(launches) == num_plain
    (chosen,) = (launch.arguments for launch in launches if launch.family == "sampling")
    assert mask.num_fills == 1
    words = -(-VOCAB // 32)
    at_device = cuda.memory(int(chosen["masks"]), 4 * words).view(np.uint32)
    np.testing.assert_array_equal(at_device, packed(mask.token_ids, VOCAB))
    assert int(chosen["mask_words"]) == words
    before = len(cuda.launches())
    await executor.decode(plain)
    assert len(cuda.launches()) - before == num_plain


async def test_layers_run_ahead_of_a_masked_choice() -> None:
    """Also when a row has left and when the masks changed: those of the step that is asked for."""
    cuda = FakeCuda()
    executor = build(cuda).executor
    targets = [driver.sequence(index) for index in range(3)]
    for index, target in enumerate(targets):
        target.tokens, target.slot = [0] * 5, 1 + 2 * index
    newest = [1, 2, 3]
    for allowed in (3, 40, 100, 7):
        if allowed == 100:
            del targets[0], newest[0]
        rows = tuple(
            masked(target, token_id, FixedMask((allowed,)))
            for target, token_id in zip(targets, newest, strict=True)
        )
        before = len(cuda.launches())
        outputs = await executor.decode(rows, goes_on=True)
        families = [launch.family for launch in cuda.launches()[before:]]
        assert families.count("sampling") == 1
        is_ahead = allowed != 3
        assert (families[0] == "sampling") == is_ahead
        for index, (target, output) in enumerate(zip(targets, outputs, strict=True)):
            target.advance([newest[index]])
            newest[index] = driver.taken(output).token_id


async def test_a_masked_prompt_chooses_once() -> None:
    cuda = FakeCuda()
    executor = build(cuda).executor
    mask = FixedMask((7,))
    row = driver.sequence(0).row([1, 2, 3], samples=True)
    assert row.sample is not None
    before = len(cuda.launches())
    await executor.prefill(driver.with_sample(row, driver.with_mask(row.sample, mask)))
    sampled = [item for item in cuda.launches()[before:] if item.family == "sampling"]
    assert len(sampled) == 1
    assert int(sampled[0].arguments["masks"]) != 0
    assert mask.num_fills == 1


@pytest.mark.parametrize("params", [driver.GREEDY, WARM], ids=["greedy", "sampled"])
async def test_the_cpu_draws_what_the_mask_allows(params: SamplingParams) -> None:
    executor = driver.build_executor(open_model(golden_model("qwen3_5-dense")))
    try:
        allowed = (5, 9, 77)
        targets = [driver.sequence(index, params) for index in range(2)]
        for step in range(12):
            free = await executor.decode(tuple(masked(target, step, None) for target in targets))
            bound = await executor.decode(
                (masked(targets[0], step, FixedMask(allowed)), masked(targets[1], step, None))
            )
            assert driver.taken(bound[0]).token_id in allowed
            assert bound[1] == free[1]
            logprobs = [driver.taken(output[0]).logprobs for output in (free, bound)]
            tops = [None if item is None else item.top for item in logprobs]
            assert tops[0] == tops[1]
            for target in targets:
                target.advance([step])
        dead = await executor.decode((masked(targets[0], 1, FixedMask(())),))
        assert dead == (RowOutput(None, is_dead_end=True),)
    finally:
        executor.close()


@pytest.fixture(scope="module")
def device() -> Iterator[CudaExecutor]:
    with cuda_executor(open_model(DEMO_MODEL)) as opened:
        yield opened


@pytest.mark.gpu
@pytest.mark.parametrize("params", [driver.GREEDY, WARM], ids=["greedy", "sampled"])
async def test_the_device_draws_what_the_reference_does(
    device: CudaExecutor, params: SamplingParams
) -> None:
    rng = np.random.default_rng(3)
    targets = [driver.sequence(index, params) for index in range(3)]
    for target in targets:
        await driver.prefill(device, target, rng.integers(0, 300, 9).tolist(), (64,))
    misses = 0
    for step in range(40):
        allowed = tuple(np.unique(rng.integers(0, 4096, 1 + step * 20)).tolist())
        masks = [FixedMask(allowed), None, FixedMask((step,))]
        free = await device.decode(tuple(masked(target, step, None) for target in targets))
        rows = tuple(masked(*item) for item in zip(targets, [step] * 3, masks, strict=True))
        bound = await device.decode(rows)
        assert bound[1] == free[1]
        assert driver.taken(bound[2]).token_id == step
        sample = rows[0].sample
        assert sample is not None
        want = sampling.reference(logits_of(device, 3)[0], sample, packed(allowed, 4096))
        assert want is not None
        misses += driver.taken(bound[0]).token_id != want.token_id
        assert driver.taken(bound[0]).token_id in allowed
        for target in targets:
            target.advance([step])
    assert misses <= 1, "cuts may fall one token elsewhere, rarely"


@pytest.mark.gpu
async def test_a_dead_end_on_the_device_is_one_row_s_own(device: CudaExecutor) -> None:
    targets = [driver.sequence(index) for index in range(2)]
    dead, alive = await device.decode(
        (masked(targets[0], 1, FixedMask(())), masked(targets[1], 1, FixedMask((8,))))
    )
    assert dead == RowOutput(None, is_dead_end=True)
    assert driver.taken(alive).token_id == 8


@pytest.mark.gpu
async def test_replayed_tokens_have_the_bits_of_decode_steps(device: CudaExecutor) -> None:
    rng = np.random.default_rng(8)
    token_ids = rng.integers(0, 300, 37).tolist()
    found = []
    for parts in ((1,) * 36, (16, 16, 4), (5, 13, 16, 2)):
        target = driver.sequence(0)
        await driver.prefill(device, target, list(range(70)), (64,))
        place = 0
        for count in parts:
            inputs = token_ids[place : place + count]
            row = target.row(inputs, samples=False)
            if len(parts) == 36:
                await device.decode((row,))
            else:
                await device.prefill(dataclasses.replace(row, is_replayed=True))
            target.advance(inputs)
            place += count
        await device.decode((target.row(token_ids[-1:], samples=True),))
        found.append(logits_of(device, 1).copy())
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
