"""`--spec dflash`: whole engines answer as they do without a draft model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.cli.loading import load_model, make_cache, make_engine, open_named_model
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.model import ModelSource
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.convert.source import open_model
from ninfer.engine.core import Engine
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import EngineOptions, SamplingOptions
from tests.helpers.dflash_checkpoints import DEMO_DRAFT, write_dflash
from tests.helpers.dflash_models import write_bigram_pair
from tests.helpers.guided_rig import GuidedAnswer, GuidedModel, answers, constraint
from tests.helpers.scripted_session import ScriptedSession

pytestmark = pytest.mark.no_cover

STORY = "Tell me a story about a little penguin who is afraid of deep water."
COPY = "Repeat after me: the red fox, the red hen, the red fox, the red hen, the red fox."
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (STORY, {"top_logprobs": 2}),
    (STORY, {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.4}),
    (COPY, {"temperature": 0.7, "stop": ("hen, the",)}),
    ("Who are you?", {"constraint": constraint("regex", "[A-Z][a-z ]{8,30}[.]")}),
)
DEMO_SPECS = {
    "first": replace(DEMO_DRAFT, num_kv_heads=4),
    "second": replace(
        DEMO_DRAFT, tap_layers=(1, 11), is_second=True, is_causal=False, selector_top_k=16
    ),
}


@dataclass(frozen=True)
class Served:
    engine: Engine
    frontend: ModelFrontend


@asynccontextmanager
async def served(
    source: ModelSource, draft: Path | None = None, **options: Any
) -> AsyncIterator[Served]:
    """As the commands run a model, but for the times they measure."""
    if draft is not None:
        options |= {"spec": "dflash", "draft_model": str(draft)}
    asked = EngineOptions(
        executor="cpu", cpu_threads=1, max_concurrency=4, max_context=512, **options
    )
    model = load_model(source, asked, SamplingOptions(), lambda *_: None)
    engine = make_engine(model, asked, make_cache(model, asked))
    await engine.start()
    try:
        yield Served(engine, model.frontend)
    finally:
        await engine.aclose()


async def told(served_model: Served, source: ModelSource) -> list[GuidedAnswer]:
    model = GuidedModel(source, {}, served_model.frontend)
    requests = [
        await model.request(text, seed=seed, **{"max_tokens": 24, **fields})
        for seed, (text, fields) in enumerate(ASKED)
    ]
    return await answers(served_model.engine, requests)


def shown(found: Sequence[GuidedAnswer]) -> list[tuple[Any, ...]]:
    return [
        (item.content, item.tokens, item.finish, item.error and item.error.code) for item in found
    ]


@pytest.fixture(scope="module")
def demo() -> ModelSource:
    return open_named_model(None)


@pytest.fixture(scope="module")
def plain(demo: ModelSource) -> list[GuidedAnswer]:
    async def ask() -> list[GuidedAnswer]:
        async with served(demo) as model:
            return await told(model, demo)

    return asyncio.run(ask())


@pytest.mark.parametrize("name", DEMO_SPECS)
async def test_a_draft_that_knows_nothing_changes_nothing(
    tmp_path: Path, demo: ModelSource, plain: list[GuidedAnswer], name: str
) -> None:
    async with served(demo, write_dflash(tmp_path, DEMO_SPECS[name])) as model:
        assert shown(await told(model, demo)) == shown(plain)
        assert model.engine.metrics.drafts.drafted_total > 0


def bigram_requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt=PreparedPrompt(np.array([1 + index, 7, 3], np.int32)),
            sampling=SamplingParams(temperature=0.6 * index, seed=index),
            session=ScriptedSession(),
            max_tokens=60,
        )
        for index in range(count)
    ]


async def test_a_draft_that_knows_its_target_is_always_right(tmp_path: Path) -> None:
    """Four rows that are drawn in different ways take far fewer rounds than tokens."""
    target, draft = write_bigram_pair(tmp_path)
    source = open_model(target)
    async with served(source) as model:
        wanted = [item.token_ids for item in await answers(model.engine, bigram_requests(4))]
    async with served(source, draft) as model:
        found = [item.token_ids for item in await answers(model.engine, bigram_requests(4))]
        drafts = model.engine.metrics.drafts
    assert found == wanted
    assert [len(token_ids) for token_ids in found] == [60] * 4
    assert drafts.accepted_total == drafts.drafted_total
    assert drafts.accepted_total > 100
