"""Scores of a prompt's tokens as units give them, against the logits of the same executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import PromptScores, SamplingParams
from ninfer.contract.units import Executor, RowOutput, ScoreRow
from ninfer.convert.source import open_model
from ninfer.ops import prompt_logprobs
from ninfer.ops.device_sampling import MAX_TOP
from ninfer.program.executors.cpu import PASS_TOKENS, CpuExecutor
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import cuda_executor
from tests.helpers.fake_cuda import FakeCuda, Launch
from tests.helpers.model_paths import golden_model
from tests.helpers.tolerance import FLOAT32_REDUCTION, GOLDEN, Tolerance, assert_close
from tests.program.executors.test_cuda import built_executor

LENGTH = PASS_TOKENS + 60
CHUNKINGS = [(1000,), (64,), (PASS_TOKENS, 7), (1, 129)]


@pytest.fixture(scope="module")
def hybrid() -> Iterator[CpuExecutor]:
    built = driver.build_executor(open_model(golden_model("qwen3_5-dense")))
    yield built
    built.close()


def prompt_ids() -> list[int]:
    ids: list[int] = np.random.default_rng(2).integers(0, 300, LENGTH).tolist()
    return ids


async def check_scores(
    executor: Executor, chunks: Sequence[int], first: int, tolerance: Tolerance
) -> None:
    """Equal to those of the executor's own logits, and the drawn token is the same as without."""
    prompt, params = prompt_ids(), SamplingParams(top_logprobs=3)
    logits = await driver.score(executor, driver.sequence(0), prompt, chunks)
    want = prompt_logprobs.reference(
        logits[first - 1 : -1], np.array(prompt[first:], np.int32), first=first, num_top=5
    )
    assert want is not None
    got, output = await driver.prefill_scored(
        executor, driver.sequence(1, params), prompt, chunks, first=first, num_top=5
    )
    check_same(got, want, logits[first - 1 : -1], tolerance)
    plain = await driver.prefill(executor, driver.sequence(2, params), prompt, chunks)
    assert output.token == plain.token


def check_same(
    got: PromptScores, want: PromptScores, logits: np.ndarray, tolerance: Tolerance
) -> None:
    assert (got.first, got.stop) == (want.first, want.stop)
    assert_close(got.logprobs, want.logprobs, tolerance)
    assert_close(got.top_logprobs, want.top_logprobs, tolerance)
    if tolerance is not FLOAT32_REDUCTION:
        np.testing.assert_array_equal(got.top_ids, want.top_ids)
    rows = np.arange(logits.shape[0])[:, None]
    best = logits[rows, want.top_ids]
    assert (np.abs(logits[rows, got.top_ids] - best) <= 1e-4).all()


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("first", [1, 64, PASS_TOKENS + 1, LENGTH - 1])
async def test_scores_are_those_of_the_logits(
    hybrid: CpuExecutor, chunks: tuple[int, ...], first: int
) -> None:
    await check_scores(hybrid, chunks, first, GOLDEN)


async def test_logits_that_are_not_finite_give_neither_token_nor_scores() -> None:
    source = open_model(golden_model("qwen3_5-dense"))
    weights = {item.name: array.copy() for item, array in source.read_float32()}
    name = next(name for name in weights if "norm" in name)
    weights[name][0] = np.nan
    broken = CpuExecutor(source.config, weights, driver.default_capacity(), num_threads=1)
    try:
        target = driver.sequence(0)
        row = dataclasses.replace(
            target.row([1, 2, 3], samples=True), score=ScoreRow(0, np.array([2, 3], np.int32), 1)
        )
        output = await broken.prefill(row)
        assert (output.token, output.is_finite, output.scores) == (None, False, None)
    finally:
        broken.close()


class ScoringCuda(FakeCuda):
    """Plays the sampler: every row chooses the token that its one bias names, plus `shift`, and
    finds it the likelier the smaller its id is."""

    shift = 0
    is_finite = 1

    def queue(self, item: Any) -> None:
        super().queue(item)
        if not isinstance(item, Launch) or item.family != "sampling" or self._capture is not None:
            return
        addresses = {name: int(item.arguments[name]) for name in ("ids", "token_ids", "is_finite")}
        num_rows = (addresses["is_finite"] - addresses["token_ids"]) // 4
        ids = self.memory(addresses["ids"], 4 * num_rows).view(np.int32)
        results = np.zeros((3 + 2 * MAX_TOP, num_rows), np.int32)
        results[0], results[1] = ids + self.shift, self.is_finite
        results[2] = (-0.25 * ids).astype(np.float32).view(np.int32)
        results[3 : 3 + MAX_TOP].reshape(num_rows, MAX_TOP)[:] = np.arange(MAX_TOP)
        self.write_results(results.reshape(-1))


async def scored_on(cuda: FakeCuda) -> RowOutput:
    """37 targets, more than the sampler has rows at once."""
    executor = built_executor(cuda)
    sizes, pinned = dict(cuda.sizes), len(cuda.pinned)
    target = driver.sequence(0)
    row = dataclasses.replace(
        target.row(list(range(40)), samples=False),
        score=ScoreRow(3, np.arange(50, 87, dtype=np.int32), 2),
    )
    output = await executor.prefill(row)
    assert (cuda.sizes, len(cuda.pinned)) == (sizes, pinned), "running allocates nothing"
    return output


async def test_the_device_scores_a_few_rows_at_a_time() -> None:
    output = await scored_on(ScoringCuda())
    assert output.scores is not None
    assert (output.scores.first, output.scores.stop, output.token) == (4, 41, None)
    assert output.scores.logprobs.tolist() == [-0.25 * target for target in range(50, 87)]
    assert output.scores.top_ids.tolist() == [[0, 1]] * 37
    assert output.scores.top_logprobs.tolist() == [[0.0, 0.0]] * 37


async def test_a_device_that_scores_another_token_is_found_out() -> None:
    cuda = ScoringCuda()
    cuda.shift = 1
    with pytest.raises(InvariantError, match="scored token 51, not 50"):
        await scored_on(cuda)


async def test_rows_that_are_not_finite_spoil_the_unit() -> None:
    cuda = ScoringCuda()
    cuda.is_finite = 0
    output = await scored_on(cuda)
    assert (output.token, output.is_finite, output.scores) == (None, False, None)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3_5-dense", "qwen3-moe"])
@pytest.mark.parametrize("chunks", [(1000,), (16,), (17,)])
async def test_device_scores_are_those_of_its_logits(case: str, chunks: tuple[int, ...]) -> None:
    with cuda_executor(open_model(golden_model(case))) as executor:
        for first in (1, 64):
            await check_scores(executor, chunks, first, FLOAT32_REDUCTION)
