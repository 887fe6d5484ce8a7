"""Random schemas, a model without sense, drafts with any share of right and of unlawful tokens:
answers are those without drafts, and every whole one is what its schema says."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from ninfer.contract.chat import GenerationParams
from ninfer.contract.generation import Finished, FinishReason, GenerationRequest, Progress
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.units import Capacity
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.program.program import ModelProgram
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, demo_config, demo_frontend
from tests.helpers.engine_rig import Transcript, read
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.grammar_rig import constraint
from tests.helpers.oracle_drafter import oracles
from tests.helpers.random_schemas import random_root

pytestmark = pytest.mark.no_cover

NUM_SCHEMAS = 30
MAX_TOKENS = 60
FRONTEND = demo_frontend()


async def request_of(index: int, schema: dict[str, Any]) -> GenerationRequest:
    prompt = PreparedPrompt(np.array([1, 2, index], np.int32))
    params = GenerationParams(
        constraint=constraint("json_schema", schema),
        temperature=1.0,
        seed=index,
        max_tokens=MAX_TOKENS,
        presence_penalty=0.5 * (index % 2),
    )
    request = FRONTEND.build_request("r", prompt, params, now=0.0)
    assert request.prepare is not None
    await request.prepare()
    return request


async def ask(
    schemas: list[dict[str, Any]], draft_tokens: int, make_drafter: MakeDrafter
) -> tuple[list[Transcript], Engine]:
    limits = Capacity(8, 128, 16, 17, 64, 0, draft_tokens, draft_tokens > 0)
    executor = FakeExecutor(DEMO_VOCAB_SIZE, limits)
    engine = Engine(
        ModelProgram(demo_config(), executor, limits),
        max_pending=1000,
        queue_timeout_s=600.0,
        make_drafter=make_drafter,
    )
    await engine.start()
    try:
        requests = [await request_of(index, schema) for index, schema in enumerate(schemas)]
        found = await asyncio.gather(*(read(engine.submit(request)) for request in requests))
    finally:
        await engine.aclose()
    return list(found), engine


def text_of(seen: Transcript) -> str:
    return "".join(
        delta.text
        for event in seen.events
        if isinstance(event, Progress | Finished)
        for delta in event.deltas
    )


async def test_rounds_keep_to_the_schema() -> None:
    rng = random.Random(11)
    schemas = [random_root(rng) for _ in range(NUM_SCHEMAS)]
    nothing = oracles(lambda request: (), DEMO_VOCAB_SIZE, 0)
    plain, _ = await ask(schemas, 0, nothing)
    known = [seen.token_ids for seen in plain]
    drafters = oracles(lambda request: known[request.sampling.seed], DEMO_VOCAB_SIZE, 3)
    drafted, engine = await ask(schemas, 7, drafters)
    assert [seen.token_ids for seen in drafted] == known
    num_whole = 0
    for schema, seen, alone in zip(schemas, drafted, plain, strict=True):
        text = text_of(seen)
        assert text == text_of(alone)
        assert seen.finished.finish == alone.finished.finish
        if seen.finished.finish.reason is FinishReason.STOP_TOKEN:
            jsonschema.validate(json.loads(text), schema)
            num_whole += 1
    assert num_whole > NUM_SCHEMAS / 4
    drafts = engine.metrics.drafts
    assert drafts.rounds_total > NUM_SCHEMAS
    assert 0 < drafts.accepted_total < drafts.drafted_total
