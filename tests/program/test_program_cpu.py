"""ModelProgram over the CPU executor: settlements are exact to the bit on real models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from ninfer.contract.program import PendingBatch, SequenceHandle
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import RowOutput
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions
from ninfer.program.loader import load_program
from ninfer.program.program import ModelProgram
from tests.helpers.model_paths import golden_model
from tests.helpers.program_driver import prefill, spec_of

SAMPLING = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, top_logprobs=8)


@pytest.fixture(params=["qwen3_5-moe", "qwen3-dense"])
def program(request: pytest.FixtureRequest) -> Iterator[ModelProgram]:
    source = open_model(golden_model(request.param))
    loaded, _ = load_program(source, EngineOptions(max_concurrency=2, max_context=256), _ignore)
    yield loaded
    loaded.close()


def _ignore(stage: str, done: int, total: int) -> None:
    pass


async def outputs_of(program: ModelProgram, batch: PendingBatch) -> tuple[RowOutput, ...]:
    await program.complete(batch)
    assert batch.outputs is not None
    return batch.outputs


async def generate(
    program: ModelProgram, *, num_aborts: int, num_steps: int
) -> list[tuple[RowOutput, ...]]:
    """Outputs of a prompt in two chunks and some steps, each unit aborted so often before."""
    spec = spec_of(75, vocab_size=128, sampling=SAMPLING)
    handle = program.open_sequence(spec)
    outputs = []
    for num_tokens in [70, 5] + [1] * num_steps:
        assert program.reserve_units(handle, num_tokens)
        for _ in range(num_aborts):
            batch = launch(program, handle, num_tokens)
            await program.complete(batch)
            program.abort(batch)
        batch = launch(program, handle, num_tokens)
        outputs.append(await outputs_of(program, batch))
        program.commit(batch, [0 if outputs[-1][0].token is None else 1])
        program.check()
    program.close_sequence(handle)
    return outputs


def launch(program: ModelProgram, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
    if program.frontier(handle) < 75:
        return program.launch_prefill(handle, num_tokens)
    return program.launch_decode([handle])


async def test_aborted_units_leave_no_trace_in_the_bits(program: ModelProgram) -> None:
    plain = await generate(program, num_aborts=0, num_steps=6)
    assert await generate(program, num_aborts=2, num_steps=6) == plain


async def test_a_reused_lane_starts_from_nothing(program: ModelProgram) -> None:
    first = await generate(program, num_aborts=0, num_steps=2)
    other = spec_of(130, "other", vocab_size=128)
    handle = program.open_sequence(other)
    await prefill(program, handle, other, chunk=64)
    program.close_sequence(handle)
    assert await generate(program, num_aborts=0, num_steps=2) == first


async def test_a_cancelled_score_leaves_no_trace_in_the_bits(program: ModelProgram) -> None:
    spec = spec_of(200, vocab_size=128)
    scores = []
    for is_cancelled in (False, True):
        handle = program.open_sequence(spec)
        assert program.reserve_units(handle, 200)
        if is_cancelled:
            task = asyncio.ensure_future(program.score(handle, 200))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert program.frontier(handle) == 0
        scores.append(await program.score(handle, 200))
        program.close_sequence(handle)
    np.testing.assert_array_equal(scores[0], scores[1], strict=True)
    program.check()
