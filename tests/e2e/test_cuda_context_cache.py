"""The context cache on a device: forks, copies on the host, Snapshots and replays are what the
request gets alone, bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ninfer.contract.cache import CheckpointKind, Tier
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import TransferKind
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import load_cuda
from tests.helpers.cached_engine import (
    CachedModel,
    CopyingCache,
    Running,
    load_cached_model,
    running_on,
)
from tests.helpers.cuda_models import require_device

pytestmark = pytest.mark.gpu

OPTIONS = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=2,
    max_context=256,
    memory_budget=2 << 30,
    cache_slots=8,
    host_cache_bytes=64 << 20,
    prefill_chunk=128,
)
TEXT = "Tell me a story about a little penguin who is afraid of deep water and of the dark. "
PLACE = 130


@pytest.fixture(scope="module")
def demo() -> CachedModel:
    require_device()
    return load_cached_model()


@asynccontextmanager
async def running(
    model: CachedModel,
    *,
    is_cached: bool = True,
    num_pages: int = 16,
    host_cache_bytes: int = 64 << 20,
    copies: tuple[TransferKind, ...] = (),
) -> AsyncIterator[Running]:
    """Fewer pages than the device has, so that memory runs out when a test wants it to."""
    options = replace(OPTIONS, host_cache_bytes=host_cache_bytes)
    built = load_cuda(model.source, options, lambda *_: None)
    limits = replace(built.plan.memory.capacity, num_pages=num_pages)
    made = running_on(
        model.source.config, built.executor, limits, is_cached=is_cached, copies=copies
    )
    async with made as engine:
        yield engine


async def test_fork_and_what_comes_back_from_the_host(demo: CachedModel) -> None:
    ids = await demo.ids(TEXT, 200)
    first, second = ids, [*ids[:PLACE], *ids[20:60]]
    places = {PLACE: CheckpointKind.STABLE_PREFIX}

    def request(token_ids: list[int]) -> GenerationRequest:
        return demo.request(token_ids, max_tokens=8, places=places)

    async with running(demo, is_cached=False) as engine:
        alone = [await engine.ask(request(prompt)) for prompt in (first, second)]
    async with running(demo, copies=(TransferKind.DEMOTE,)) as engine:
        cache = engine.cache
        assert isinstance(cache, CopyingCache)
        assert (await engine.ask(request(first))).output == alone[0].output
        for tier in (Tier.DEVICE, Tier.HOST):
            if tier is Tier.HOST:
                await engine.copied(Tier.HOST)
                await engine.idle()
                cache.give_up_device()
                assert cache.holdings().entries[Tier.DEVICE] == 0
            got = await engine.ask(request(second))
            assert got.output == alone[1].output
            assert got.use is not None
            assert (got.use.num_tokens, got.use.tier) == (PLACE, tier)
        await engine.flush()


@pytest.mark.parametrize("host_cache_bytes", [64 << 20, 0], ids=["snapshot", "replay"])
async def test_paused_in_the_middle_of_an_answer(demo: CachedModel, host_cache_bytes: int) -> None:
    """The first needs a third page of four while the second has two."""
    prompts = (await demo.ids(TEXT, 64), await demo.ids(TEXT, 20))

    def requests() -> list[GenerationRequest]:
        sizes = zip(prompts, (75, 78), strict=True)
        return [demo.request(prompt, max_tokens=n, temperature=0.8) for prompt, n in sizes]

    async with running(demo, is_cached=False) as engine:
        alone = [await engine.ask(request) for request in requests()]
    async with running(demo, num_pages=4, host_cache_bytes=host_cache_bytes) as engine:
        got = await engine.ask_all(requests())
        assert [answer.output for answer in got] == [answer.output for answer in alone]
        metrics = engine.engine.metrics
        assert metrics.num_pauses == metrics.num_resumes == 1
        assert metrics.num_replays == (0 if host_cache_bytes else 1)
        await engine.flush()
