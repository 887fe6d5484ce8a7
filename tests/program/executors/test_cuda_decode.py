"""Decode on the device: rows do not see each other, nothing grows, failures are final."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.sampling import SamplingParams
from ninfer.convert.source import open_model
from ninfer.ops import sampling
from ninfer.program.executors.cuda import CudaExecutor
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import cuda_executor
from tests.helpers.executor_driver import DrivenSequence
from tests.helpers.model_paths import DEMO_MODEL, golden_model

pytestmark = pytest.mark.gpu

CASES = ("qwen3_5-dense-tied-realheads", "qwen3_5-moe", "demo")
STEPS = 200
MANY_STEPS = 10_000
NUM_SEQUENCES = 8


@pytest.fixture(scope="module", params=CASES)
def executor(request: pytest.FixtureRequest) -> Iterator[CudaExecutor]:
    path = DEMO_MODEL if request.param == "demo" else golden_model(request.param)
    with cuda_executor(open_model(path)) as opened:
        yield opened


def logits_of(executor: CudaExecutor, num_rows: int) -> NDArray[np.float32]:
    """What the last unit sampled from, [num_rows, V]."""
    source = executor.workspace.logits(num_rows)
    padded = np.empty((num_rows, source.row_stride), np.float32)
    executor.driver.download(padded, source.address)
    executor.driver.synchronize()
    return padded[:, : source.shape[1]]


async def start(executor: CudaExecutor, params: SamplingParams) -> list[DrivenSequence]:
    """Sequences with prompts of different lengths, on scattered pages."""
    rng = np.random.default_rng(5)
    targets = []
    for index in range(NUM_SEQUENCES):
        target = driver.sequence(index, params, rng=rng)
        prompt = rng.integers(0, 300, 3 + 29 * index).tolist()
        await driver.prefill(executor, target, prompt, (64,))
        targets.append(target)
    return targets


async def run_steps(
    executor: CudaExecutor, batches: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[list[int]], list[list[NDArray[np.float32]]]]:
    """Tokens and logits of each sequence when step i decodes the sequences of batches[i]."""
    targets = await start(executor, params)
    tokens: list[list[int]] = [[7 + index] for index in range(NUM_SEQUENCES)]
    logits: list[list[NDArray[np.float32]]] = [[] for _ in range(NUM_SEQUENCES)]
    for batch in batches:
        chosen = await driver.decode(
            executor, [targets[index] for index in batch], [tokens[index][-1] for index in batch]
        )
        rows = logits_of(executor, len(batch))
        for place, index in enumerate(batch):
            tokens[index].append(chosen[place].token_id)
            logits[index].append(rows[place].copy())
    return tokens, logits


async def test_a_row_is_the_same_bits_in_any_company(executor: CudaExecutor) -> None:
    """Each alone, all together, and in shuffled groups of any size; three runs of the last."""
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    steps = STEPS // NUM_SEQUENCES
    alone = [[index] for _ in range(steps) for index in range(NUM_SEQUENCES)]
    together = [list(range(NUM_SEQUENCES))] * steps
    rng = np.random.default_rng(1)
    shuffled: list[list[int]] = []
    for _ in range(steps):
        order = rng.permutation(NUM_SEQUENCES).tolist()
        while order:
            size = int(rng.integers(1, len(order) + 1))
            shuffled.append(order[:size])
            order = order[size:]
    want_tokens, want_logits = await run_steps(executor, alone, params)
    for batches in (together, shuffled, shuffled, shuffled):
        tokens, logits = await run_steps(executor, batches, params)
        assert tokens == want_tokens
        for got, want in zip(logits, want_logits, strict=True):
            np.testing.assert_array_equal(np.array(got), np.array(want))


async def test_small_chunks_of_a_prompt_are_the_same_bits(executor: CudaExecutor) -> None:
    """Up to 16 columns take the decode kernels, whose bits do not depend on the cut."""
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 300, 97).tolist()
    want = await driver.score(executor, driver.sequence(), prompt, (1,))
    for chunks in ((16,), (2,), (3, 9, 1, 15), (8,)):
        got = await driver.score(executor, driver.sequence(1), prompt, chunks)
        np.testing.assert_array_equal(got, want)


async def test_steps_that_start_ahead_make_the_same_tokens(executor: CudaExecutor) -> None:
    """Rows leave and come back, and prompts run in between."""
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, top_logprobs=5)
    runs = []
    for goes_on in (False, True):
        targets, rng = await start(executor, params), np.random.default_rng(4)
        newest, found = [1] * NUM_SEQUENCES, []
        chosen: list[int] = []
        for step in range(STEPS):
            if step % 7 == 0:
                size = 1 + step // 7 % NUM_SEQUENCES
                chosen = rng.permutation(NUM_SEQUENCES)[:size].tolist()
            if step % 31 == 30:
                prompt = rng.integers(0, 300, 40).tolist()
                targets[0] = driver.sequence(0, params)
                output = await driver.prefill(executor, targets[0], prompt, (64,))
                newest[0] = driver.taken(output).token_id
            tokens = await driver.decode(
                executor,
                [targets[index] for index in chosen],
                [newest[index] for index in chosen],
                goes_on=goes_on,
            )
            for index, token in zip(chosen, tokens, strict=True):
                newest[index] = token.token_id
            found.append(tokens)
        runs.append(found)
    assert runs[0] == runs[1]


async def test_memory_does_not_grow() -> None:
    """Over many conversations of all lanes, on the device and on the host."""
    params = SamplingParams(temperature=1.0, seed=9, top_logprobs=20)
    with cuda_executor(open_model(DEMO_MODEL)) as executor:
        figures = []
        for _ in range(MANY_STEPS // STEPS):
            targets, newest = await start(executor, params), [1] * NUM_SEQUENCES
            for _ in range(STEPS):
                chosen = await driver.decode(executor, targets, newest, goes_on=True)
                newest = [token.token_id for token in chosen]
            figures.append((executor.driver.memory_info()[0], resident_bytes()))
    (free_before, resident_before), (free_after, resident_after) = figures[4], figures[-1]
    print(
        f"after {STEPS * 5} and {MANY_STEPS} steps: device free {free_before:,} and {free_after:,}"
        f" bytes, host resident {resident_before:,} and {resident_after:,} bytes"
    )
    assert free_after == free_before
    assert resident_after - resident_before < 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_penalties_and_logprobs_agree_with_the_reference(executor: CudaExecutor) -> None:
    """The sampled token is the reference's choice from the same logits."""
    params = SamplingParams(
        temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.1, logit_bias=((5, 2.0), (9, -3.0)), seed=11, top_logprobs=5,
    )  # fmt: skip
    target = driver.sequence(0, params)
    await driver.prefill(executor, target, list(range(40)), (64,))
    tokens, misses = [3], 0
    for _ in range(40):
        row = target.row(tokens[-1:], samples=False)
        sample = driver.sample_row(
            target.frontier + 1, params, generated=tokens, prompt=list(range(40)), suppressed=(2,)
        )
        row = driver.with_sample(row, sample)
        output = (await executor.decode((row,)))[0]
        target.advance(tokens[-1:])
        got = driver.taken(output)
        want = sampling.reference(logits_of(executor, 1)[0], sample)
        assert want is not None
        assert want.logprobs is not None
        assert got.logprobs is not None
        misses += got.token_id != want.token_id
        assert [item[0] for item in got.logprobs.top] == [item[0] for item in want.logprobs.top]
        np.testing.assert_allclose(
            [item[1] for item in got.logprobs.top],
            [item[1] for item in want.logprobs.top],
            atol=1e-4,
        )
        tokens.append(got.token_id)
    assert misses <= 1, "cuts may fall one token elsewhere, rarely"
