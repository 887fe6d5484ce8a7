"""Drafts on the device change nothing: tokens, log probabilities, texts and ends of plain decoding
there, with every setting, whoever drafts and however much of it is right."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ninfer.contract.generation import GenerationRequest
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.engine.speculation.row_drafter import RowDrafter
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import load_cuda
from ninfer.program.dflash_loading import open_dflash_draft
from ninfer.program.program import ModelProgram
from tests.helpers.cuda_models import require_device
from tests.helpers.dflash_checkpoints import DEMO_DRAFT, write_dflash
from tests.helpers.guided_rig import (
    MAX_CONTEXT,
    GuidedAnswer,
    GuidedModel,
    answers,
    load_guided_model,
)
from tests.helpers.oracle_drafter import oracles
from tests.helpers.speculation_matrix import KINDS, cases, request_of, shown

pytestmark = pytest.mark.gpu

DRAFTS = {
    "dflash": replace(DEMO_DRAFT, head_dim=64, block_size=16),
    "dflash2": replace(
        DEMO_DRAFT,
        head_dim=32,
        block_size=16,
        is_second=True,
        is_causal=False,
        selector_rank=16,
        selector_top_k=16,
    ),
}
OPTIONS = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=4,
    max_context=MAX_CONTEXT,
    memory_budget=4 << 30,
    host_cache_bytes=64 << 20,
    prefill_chunk=128,
)


@asynccontextmanager
async def engine_on_device(
    model: GuidedModel, make_drafter: MakeDrafter = RowDrafter, **options: object
) -> AsyncIterator[Engine]:
    require_device()
    chosen = dataclasses.replace(OPTIONS, **options)  # type: ignore[arg-type]
    draft = open_dflash_draft(model.source, chosen)
    built = load_cuda(model.source, chosen, lambda *_: None, draft)
    program = ModelProgram(model.source.config, built.executor, built.plan.memory.capacity)
    engine = Engine(program, max_pending=256, queue_timeout_s=600.0, make_drafter=make_drafter)
    await engine.start()
    try:
        yield engine
        program.check()
    finally:
        await engine.aclose()


async def requests(model: GuidedModel) -> list[GenerationRequest]:
    return [await request_of(model, case) for case in cases(len(KINDS), 50)]


@pytest.fixture(scope="module")
def model() -> GuidedModel:
    return load_guided_model()


@pytest.fixture(scope="module")
def plain(model: GuidedModel) -> list[GuidedAnswer]:
    async def ask() -> list[GuidedAnswer]:
        async with engine_on_device(model) as engine:
            return await answers(engine, await requests(model))

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def drafts_of(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """Options of each kind of speculation."""
    kinds = {"ngram": {"spec": "ngram"}, "mtp": {"spec": "mtp"}}
    for name, draft in DRAFTS.items():
        folder = write_dflash(tmp_path_factory.mktemp(name), draft)
        kinds[name] = {"spec": "dflash", "draft_model": str(folder)}
    return kinds


@pytest.mark.parametrize(("draft_tokens", "lanes"), [(1, 2), (3, 4), (15, 8)])
@pytest.mark.parametrize("spec", ["ngram", "mtp", "dflash", "dflash2"])
async def test_random_drafts_change_nothing(
    model: GuidedModel,
    plain: list[GuidedAnswer],
    drafts_of: Mapping[str, Mapping[str, str]],
    spec: str,
    draft_tokens: int,
    lanes: int,
) -> None:
    """They know what is coming and are wrong from some place on; with a draft model every other one
    is its proposal."""
    vocab_size = model.source.config.vocab_size
    drafters = oracles(
        lambda request: plain[request.sampling.seed].token_ids, vocab_size, draft_tokens
    )
    async with engine_on_device(
        model, drafters, **drafts_of[spec], draft_tokens=draft_tokens, max_concurrency=lanes
    ) as engine:
        found = await answers(engine, await requests(model))
        assert list(map(shown, found)) == list(map(shown, plain))
        drafts = engine.metrics.drafts
        assert drafts.accepted_at[draft_tokens - 1] > 0
        assert drafts.accepted_total < drafts.drafted_total


@pytest.mark.parametrize("spec", ["ngram", "mtp"])
async def test_the_own_drafter_changes_nothing(
    model: GuidedModel, plain: list[GuidedAnswer], spec: str
) -> None:
    async with engine_on_device(model, spec=spec) as engine:
        found = await answers(engine, await requests(model))
        assert list(map(shown, found)) == list(map(shown, plain))
        drafts = engine.metrics.drafts
        print(f"{spec}: {drafts.accepted_total} of {drafts.drafted_total} accepted")
        assert drafts.accepted_total > 0
