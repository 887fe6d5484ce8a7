"""Many clients with many habits at once against few lanes."""

from __future__ import annotations

import asyncio
import random

import pytest

from ninfer.contract.errors import Unavailable
from ninfer.contract.generation import Failed, Finished, FinishReason, GenerationRequest, Progress
from ninfer.contract.sampling import SamplingParams
from tests.helpers.engine_rig import (
    EngineRig,
    Transcript,
    capacity,
    read,
    running_engine,
    solo_tokens,
)
from tests.helpers.scripted_session import ScriptedSession

NUM_REQUESTS = 300
NUM_CLIENTS = 64
LANES = 8
MAX_PENDING = 40


async def test_mixed_load_ends_every_request_once_with_its_own_answer() -> None:
    random_source = random.Random(7)
    async with running_engine(capacity(lanes=LANES, num_pages=14), max_pending=MAX_PENDING) as rig:
        todo = [_request(rig, random_source) for _ in range(NUM_REQUESTS)]
        results: list[tuple[GenerationRequest, Transcript]] = []

        async def client(seed: int) -> None:
            habits = random.Random(seed)
            while todo:
                request = todo.pop()
                rig.clock.advance(0.01)
                results.append((request, await _serve(rig, request, habits)))

        async with asyncio.TaskGroup() as group:
            for seed in range(NUM_CLIENTS):
                group.create_task(client(seed))
        reasons = {_check(request, transcript) for request, transcript in results}
        await asyncio.sleep(0)
        assert len(results) == NUM_REQUESTS
        assert reasons >= {"left", "cancelled", "output_limit", "stop_token", "deadline_exceeded"}
        assert max(call.num_rows for call in rig.executor.calls) == LANES
        assert rig.is_clean()


def _request(rig: EngineRig, source: random.Random) -> GenerationRequest:
    return rig.request(
        source.randint(1, 60),
        source.choice([0, 1, 10, 25, 60]),
        session=ScriptedSession(
            finish_after=source.choice([None, 2, 30]), hold_back=source.choice([0, 2])
        ),
        sampling=SamplingParams(temperature=1.0, seed=source.getrandbits(32)),
        deadline_s=rig.clock.now_s + source.uniform(0, 5) if source.random() < 0.2 else None,
    )


async def _serve(rig: EngineRig, request: GenerationRequest, habits: random.Random) -> Transcript:
    """Submit, retrying while the server is full, and read as this client does."""
    while rig.engine.status().outstanding >= LANES + MAX_PENDING:
        with pytest.raises(Unavailable):
            rig.engine.submit(request)
        await asyncio.sleep(0)
    handle = rig.engine.submit(request)
    habit = habits.choice(["patient", "patient", "patient", "cancels", "leaves", "slow"])
    if habit == "patient":
        return await read(handle)
    transcript = Transcript()
    async with handle:
        async for event in handle:
            transcript.events.append(event)
            if habit == "leaves" and isinstance(event, Progress):
                break
            if habit == "cancels" and habits.random() < 0.3:
                handle.cancel()
            for _ in range(habits.randrange(20) if habit == "slow" else 0):
                await asyncio.sleep(0)
    return transcript


def _check(request: GenerationRequest, transcript: Transcript) -> str:
    """How it ended; its tokens are those of a solo run in any case."""
    tokens = transcript.token_ids
    assert tokens == solo_tokens(request, len(tokens))
    if not transcript.terminals:
        return "left"
    match transcript.terminal:
        case Finished(finish=finish, usage=usage):
            assert len(tokens) == usage.completion_tokens
            if finish.reason is FinishReason.OUTPUT_LIMIT:
                assert len(tokens) == request.max_tokens
            return finish.reason.value
        case Failed(error=error):
            return error.code
