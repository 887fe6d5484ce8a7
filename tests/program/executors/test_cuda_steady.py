"""The same decode many times on the device: the same tokens and log probabilities, to the bit.

Kernels of a step overlap, so what a step makes must not depend on which blocks share a
multiprocessor when. The sizes decide that: those of a real model, a few layers of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.program.cuda_loader import build_cuda, open_device
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.synthetic_weights import fill_synthetic
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import SMALL_OPTIONS, require_device

pytestmark = pytest.mark.gpu

NUM_RUNS = 50
NUM_TOKENS = 30
NUM_LAYERS = 4
PARAMS = SamplingParams(top_logprobs=8)
PROMPT = np.random.default_rng(1).integers(0, 100_000, 200).tolist()


@pytest.fixture(scope="module", params=["none", "mtp"])
def executor(request: pytest.FixtureRequest) -> Iterator[CudaExecutor]:
    require_device()
    full = SYNTHETIC_MODELS["qwen3.5-4b"]
    config = dataclasses.replace(full, layers=full.layers[:NUM_LAYERS])
    num_drafted = None if request.param == "none" else 3
    options = dataclasses.replace(
        SMALL_OPTIONS, spec=request.param, draft_tokens=num_drafted, memory_budget=16 << 30
    )
    device = open_device(options)
    built = build_cuda(config, device, options, lambda store: fill_synthetic(device, config, store))
    try:
        yield built.executor
    finally:
        built.executor.close()


async def said(executor: CudaExecutor) -> list[GeneratedToken]:
    """One run: steps that follow each other without a gap where the executor has them, else
    windows of one column."""
    target = driver.sequence(0, PARAMS)
    tokens = [driver.taken(await driver.prefill(executor, target, PROMPT, (len(PROMPT),)))]
    while len(tokens) < NUM_TOKENS:
        row = target.row([tokens[-1].token_id], samples=True)
        if executor.max_draft_tokens:
            (output,) = await executor.verify((row,))
        else:
            (output,) = await executor.decode((row,), goes_on=len(tokens) + 1 < NUM_TOKENS)
        target.advance(row.token_ids.tolist())
        tokens.append(driver.taken(output))
    return tokens


async def test_a_decode_gives_the_same_bits_every_time(executor: CudaExecutor) -> None:
    first = await said(executor)
    odd = [run for run in range(1, NUM_RUNS) if await said(executor) != first]
    assert odd == []
