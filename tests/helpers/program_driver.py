"""Steps of a Program that tests repeat: feed a prompt, decode once, compare with the fake model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ninfer.contract.cache import CheckpointId
from ninfer.contract.program import (
    PendingBatch,
    Program,
    SequenceHandle,
    SequenceSpec,
    TransferKind,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from tests.helpers.fake_executor import expected_tokens


def spec_of(
    num_tokens: int,
    name: str = "request",
    *,
    vocab_size: int,
    sampling: SamplingParams | None = None,
    min_tokens: int = 0,
    suppressed_ids: tuple[int, ...] = (),
    positions: bool = False,
    rope_delta: int = 0,
) -> SequenceSpec:
    """A prompt of pseudo-random tokens fixed by name and length; `positions` bends the axes."""
    generator = np.random.default_rng([num_tokens, *name.encode()])
    rotary = None
    if positions:
        steps = np.array([[1], [2], [3]], dtype=np.int32)
        rotary = (np.arange(num_tokens, dtype=np.int32)[None] // steps).astype(np.int32)
    prompt = PreparedPrompt(
        generator.integers(vocab_size, size=num_tokens, dtype=np.int32), rotary, rope_delta
    )
    params = SamplingParams() if sampling is None else sampling
    return SequenceSpec(name, prompt, params, min_tokens, suppressed_ids)


def expected_of(spec: SequenceSpec, num_tokens: int, *, vocab_size: int) -> list[int]:
    return expected_tokens(
        spec.prompt,
        spec.sampling,
        num_tokens,
        vocab_size,
        min_tokens=spec.min_tokens,
        suppressed_ids=spec.suppressed_ids,
    )


def tokens_of(batch: PendingBatch) -> list[int | None]:
    assert batch.outputs is not None
    return [None if output.token is None else output.token.token_id for output in batch.outputs]


async def prefill(
    program: Program, handle: SequenceHandle, spec: SequenceSpec, *, chunk: int
) -> int:
    """Feed the rest of the prompt; returns the first token."""
    while True:
        num_tokens = min(chunk, spec.prompt.num_tokens - program.frontier(handle))
        assert program.reserve_units(handle, num_tokens)
        batch = program.launch_prefill(handle, num_tokens)
        await program.complete(batch)
        token = tokens_of(batch)[0]
        program.commit(batch, [0 if token is None else 1])
        program.check()
        if token is not None:
            return token


async def ready(program: Program, spec: SequenceSpec, *, chunk: int) -> SequenceHandle:
    """A new sequence whose prompt is computed and whose first token is there."""
    handle = program.open_sequence(spec)
    await prefill(program, handle, spec, chunk=chunk)
    return handle


async def move(program: Program, kind: TransferKind, checkpoint: CheckpointId) -> None:
    """A whole transfer of a checkpoint."""
    transfer = program.begin_transfer(kind, checkpoint)
    assert transfer is not None
    done = asyncio.Event()
    transfer.add_done_callback(done.set)
    await done.wait()
    assert program.settle_transfer(transfer)


async def decode(
    program: Program, handles: Sequence[SequenceHandle], *, goes_on: bool = False
) -> list[int]:
    """One committed step; one token a row."""
    assert all(program.reserve_units(handle, 1) for handle in handles)
    batch = program.launch_decode(handles, goes_on=goes_on)
    await program.complete(batch)
    program.commit(batch, [1] * len(handles))
    program.check()
    return [token for token in tokens_of(batch) if token is not None]
