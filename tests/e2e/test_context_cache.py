"""What a request gets from the context cache is what it gets alone, on every tier.

Where a source was computed at a place that the prompt has too, every bit is the same. What an
answer left was computed token by token, so its sums were taken in another order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.cache import CacheMode, CacheUse, CheckpointKind, MissReason, Tier
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import (
    PausedSequence,
    Program,
    SequenceHandle,
    SequenceSpec,
    Source,
    TransferKind,
)
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.engine.context_cache import ContextCache
from tests.helpers.cached_engine import (
    LIMITS,
    Answer,
    CachedModel,
    CopyingCache,
    Running,
    cached_capacity,
    load_cached_model,
    random_ids,
)
from tests.helpers.faulty_program import FaultyProgram

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

STORY = "Once upon a time there was a little penguin who was afraid of deep water and of the dark. "
OTHER = "The farmer counted his animals: a cow, a horse, two pigs and a small brown dog. "
DECODE_BOUND = 1e-4
"""Log probabilities behind tokens that were decoded instead of being computed as a prompt: float32
sums of magnitude 10 in another order, over twelve layers."""
PLACE = 130
LENGTH = 200
KINDS = [kind for kind in CheckpointKind if kind is not CheckpointKind.SESSION_END]
COPIES = {
    Tier.DEVICE: (),
    Tier.HOST: (TransferKind.DEMOTE,),
    Tier.DISK: (TransferKind.STORE,),
}
SMALL = "qwen3_5-dense"
ATTENTION_ONLY = "qwen3-dense"


@pytest.fixture(scope="module")
def demo() -> CachedModel:
    return load_cached_model()


@pytest.fixture(scope="module")
def small() -> CachedModel:
    return load_cached_model(SMALL)


@pytest.fixture(scope="module")
def edited_alone(demo: CachedModel) -> Answer:
    """The kind of a place changes no number."""

    async def ask() -> Answer:
        request = await edited(demo, CheckpointKind.LONG_ANCHOR)
        (answer,) = await demo.alone(cached_capacity(), request)
        return answer

    return asyncio.run(ask())


async def edited(demo: CachedModel, kind: CheckpointKind) -> GenerationRequest:
    """Begins as STORY does, up to PLACE."""
    story, other = await demo.ids(STORY, PLACE), await demo.ids(OTHER, 50)
    return demo.request([*story, *other], max_tokens=6, places={PLACE: kind})


def assert_close(got: Answer, want: Answer) -> None:
    """The same tokens and text; log probabilities within DECODE_BOUND."""
    assert (got.token_ids, got.text, got.finish) == (want.token_ids, want.text, want.finish)
    assert np.abs(got.logprobs - want.logprobs).max() <= DECODE_BOUND


async def moved_to(running: Running, tier: Tier) -> None:
    """Whatever the cache holds lies in `tier` alone. For the disk the engine has to end as well."""
    cache = running.cache
    assert isinstance(cache, CopyingCache)
    await running.idle()
    if tier is not Tier.DEVICE:
        await running.copied(tier)
        cache.give_up_device()
        entries = cache.holdings().entries
        assert entries[Tier.DEVICE] == 0
        assert entries[tier] > 0


class TestEveryTier:
    """Two requests, the second with the cache's help from `tier`, and the second alone."""

    @pytest.mark.parametrize("tier", Tier)
    @pytest.mark.parametrize("kind", KINDS)
    async def test_place_that_both_prompts_have(
        self,
        demo: CachedModel,
        edited_alone: Answer,
        kind: CheckpointKind,
        tier: Tier,
        tmp_path: Path,
    ) -> None:
        base = await demo.ids(STORY, LENGTH)
        first = demo.request(base, max_tokens=3, places={PLACE: kind})
        second = await edited(demo, kind)
        answers = await self._both(demo, tier, tmp_path, first, second)
        assert answers[0].use == CacheUse(miss=MissReason.NO_ENTRY)
        assert answers[1].output == edited_alone.output
        if tier is Tier.DISK:
            # What was said is not known any more, only what was kept of it.
            assert answers[1].use == CacheUse(PLACE, kind, tier)
        else:
            is_stable = kind is CheckpointKind.STABLE_PREFIX
            miss = None if is_stable else MissReason.HISTORY_EDITED
            assert answers[1].use == CacheUse(PLACE, kind, tier, miss, PLACE)

    @pytest.mark.parametrize("tier", Tier)
    async def test_end_of_a_session(self, demo: CachedModel, tier: Tier, tmp_path: Path) -> None:
        base, other = await demo.ids(STORY, LENGTH), await demo.ids(OTHER, 50)
        (said,) = await demo.alone(cached_capacity(), demo.request(base, max_tokens=3))
        follow_up = [*base, *said.token_ids, *other]
        first, second = demo.request(base, max_tokens=3), demo.request(follow_up, max_tokens=6)
        answers = await self._both(demo, tier, tmp_path, first, second)
        (alone,) = await demo.alone(cached_capacity(), demo.request(follow_up, max_tokens=6))
        assert answers[0].output == said.output
        assert_close(answers[1], alone)
        # The last token of an answer was never fed.
        assert answers[1].use == CacheUse(LENGTH + 2, CheckpointKind.SESSION_END, tier)

    async def _both(
        self,
        demo: CachedModel,
        tier: Tier,
        folder: Path,
        first: GenerationRequest,
        second: GenerationRequest,
    ) -> list[Answer]:
        limits, answers = cached_capacity(), []
        disk = folder if tier is Tier.DISK else None
        async with demo.running(limits, copies=COPIES[tier], folder=disk) as running:
            answers.append(await running.ask(first))
            await moved_to(running, tier)
            if tier is not Tier.DISK:
                answers.append(await running.ask(second))
                await running.flush()
        if tier is Tier.DISK:
            async with demo.running(limits, folder=disk) as running:
                answers.append(await running.ask(second))
                assert (
                    running.engine.metrics.prompt_tokens_total
                    == len(second.prompt.token_ids) - (answers[1].use or CacheUse()).num_tokens
                )
                await running.flush()
        return answers


class TestEveryRemainder:
    """Prompts that end at any place within a page."""

    @pytest.mark.parametrize("remainder", range(PAGE_TOKENS))
    async def test_again_and_longer(self, small: CachedModel, remainder: int) -> None:
        await self._check(small, random_ids(remainder, PAGE_TOKENS + 1 + remainder))

    @pytest.mark.parametrize("remainder", [0, 1, 4, 10, 62, 63])
    async def test_again_and_longer_in_the_demo_model(
        self, demo: CachedModel, remainder: int
    ) -> None:
        await self._check(demo, await demo.ids(STORY, 2 * PAGE_TOKENS + 1 + remainder))

    async def _check(self, model: CachedModel, base: Sequence[int]) -> None:
        limits = cached_capacity(host_blocks=0)
        place, rest = len(base) - 1, random_ids(1, 9)
        places = {place: CheckpointKind.PROMPT_TAIL}

        def first(max_tokens: int) -> GenerationRequest:
            return model.request(base, max_tokens=max_tokens, places=places)

        (said,) = await model.alone(limits, first(5))
        prompts = [[*base, *rest], [*base, *said.token_ids, *rest]]

        def longer(index: int) -> GenerationRequest:
            listed = places if index == 0 else None
            return model.request(prompts[index], max_tokens=5, places=listed)

        again, *alone = await model.alone(limits, first(1), longer(0), longer(1))
        async with model.running(limits) as running:
            assert (await running.ask(first(5))).output == said.output
            got = await running.ask(longer(1))
            assert_close(got, alone[1])
            end = len(base) + len(said.tokens) - 1
            assert got.use == CacheUse(end, CheckpointKind.SESSION_END, Tier.DEVICE)
            for request, want in ((longer(0), alone[0]), (first(1), again)):
                got = await running.ask(request)
                assert got.output == want.output
                assert got.use is not None
                assert (got.use.num_tokens, got.use.kind) == (place, CheckpointKind.PROMPT_TAIL)
            await running.flush()

    @pytest.mark.parametrize("remainder", range(PAGE_TOKENS))
    async def test_paused_there(self, small: CachedModel, remainder: int) -> None:
        """The second goes once it has that many tokens on its second page."""
        frontier = PAGE_TOKENS + remainder
        prompts = random_ids(2, 20), random_ids(3, frontier - 2)

        def requests() -> list[GenerationRequest]:
            return [small.request(prompt, max_tokens=8) for prompt in prompts]

        limits = cached_capacity(max_context=256, num_pages=8, cache_slots=2, host_blocks=16)
        alone = await small.alone(limits, *requests())
        for is_replay in (False, True):
            used = replace(limits, num_host_blocks=0) if is_replay else limits
            paused = await self._together(small, used, requests(), alone, goes_at=frontier)
            assert paused == [frontier]

    @pytest.mark.parametrize("is_replay", [False, True], ids=["snapshot", "replay"])
    @pytest.mark.parametrize("remainder", [1, 33, 63])
    async def test_out_of_pages_there(
        self, small: CachedModel, remainder: int, is_replay: bool
    ) -> None:
        """The second has to go when the first needs its third page, behind 128 tokens. Its
        Snapshot goes to the host."""
        prompts = random_ids(2, PAGE_TOKENS), random_ids(3, remainder + 1)

        def requests() -> list[GenerationRequest]:
            return [small.request(p, max_tokens=n) for p, n in zip(prompts, (75, 78), strict=True)]

        host_blocks = 0 if is_replay else 64
        limits = cached_capacity(
            max_context=256, num_pages=4, cache_slots=2, host_blocks=host_blocks
        )
        alone = await small.alone(limits, *requests())
        paused = await self._together(small, limits, requests(), alone, goes_at=None)
        assert paused == [PAGE_TOKENS + remainder]

    async def _together(
        self,
        model: CachedModel,
        limits: Capacity,
        requests: Sequence[GenerationRequest],
        alone: Sequence[Answer],
        *,
        goes_at: int | None,
    ) -> list[int]:
        """Frontiers at which somebody was paused; every answer is as alone."""
        is_replay = limits.num_host_blocks == 0
        max_tokens = {request.max_tokens for request in requests}
        made = model.running_wrapped(limits, lambda p: Watched(p, goes_at, max_tokens))
        async with made as (running, watched):
            got = await running.ask_all(requests)
            assert [answer.output for answer in got] == [answer.output for answer in alone]
            assert running.engine.metrics.num_replays == is_replay
            await running.flush()
        return watched.frontiers


class Watched(FaultyProgram):
    """Notes who is paused in the middle of an answer. Refuses the first sequence memory once, when
    the second is at `goes_at`, so that the second has to go."""

    def __init__(self, program: Program, goes_at: int | None, max_tokens: set[int]) -> None:
        super().__init__(program, lambda name: None)
        self.frontiers: list[int] = []
        self._goes_at = goes_at
        self._max_tokens = max_tokens
        self._opened: list[SequenceHandle] = []
        self.denies = self._is_denied

    def open_sequence(self, spec: SequenceSpec, source: Source | None = None) -> SequenceHandle:
        self._opened.append(super().open_sequence(spec, source))
        return self._opened[-1]

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        paused = super().pause(handle, keeps_state=keeps_state)
        if len(paused.accepted) not in self._max_tokens:
            self.frontiers.append(paused.frontier)
        return paused

    def _is_denied(self, handle: SequenceHandle) -> bool:
        if self.frontiers or len(self._opened) < 2 or handle is not self._opened[0]:
            return False
        return self.frontier(self._opened[1]) == self._goes_at


class TestAttentionOnly:
    @pytest.mark.parametrize("num_common", [63, 64, 127, 128, 130, 199])
    async def test_whole_pages_of_any_history_are_used(self, num_common: int) -> None:
        model = load_cached_model(ATTENTION_ONLY)
        limits = cached_capacity(max_context=256, cache_slots=0, host_blocks=0)
        base, rest = random_ids(5, LENGTH), random_ids(6, 20)
        assert base[num_common] != rest[0]
        prompt = [*base[:num_common], *rest]
        (alone,) = await model.alone(limits, model.request(prompt, max_tokens=5))
        async with model.running(limits) as running:
            await running.ask(model.request(base, max_tokens=3))
            got = await running.ask(model.request(prompt, max_tokens=5))
            assert_close(got, alone)
            num_used = num_common - num_common % PAGE_TOKENS
            assert got.use is not None
            assert got.use.num_tokens == num_used
            assert got.use.kind is (CheckpointKind.SESSION_END if num_used else None)
            await running.flush()


class TestOff:
    async def test_neither_reads_nor_leaves_anything(self, demo: CachedModel) -> None:
        base = await demo.ids(STORY, LENGTH)
        async with demo.running(cached_capacity()) as running:
            first = await running.ask(demo.request(base, max_tokens=3))
            assert running.program.occupancy().num_checkpoints == 1
            got = await running.ask(demo.request(base, max_tokens=3, mode=CacheMode.OFF))
            assert got.output == first.output
            assert got.use is not None
            assert (got.use.num_tokens, got.use.miss) == (0, MissReason.DISABLED)
            assert running.program.occupancy().num_checkpoints == 1
            await running.flush()


class TestOnItsOwn:
    """The cache's own transfers, without a test's help."""

    async def test_what_a_large_request_pushes_out_comes_back_from_the_host(
        self, demo: CachedModel
    ) -> None:
        limits = cached_capacity(lanes=1, max_context=512, num_pages=8, cache_slots=3)
        base, other = await demo.ids(STORY, 300), await demo.ids(OTHER, 500)
        (said,) = await demo.alone(limits, demo.request(base, max_tokens=3))
        prompt = [*base, *said.token_ids, *other[:20]]
        (alone,) = await demo.alone(limits, demo.request(prompt, max_tokens=4))
        make = lambda program, memory: ContextCache(program, memory, LIMITS)  # noqa: E731
        async with demo.running(limits, make_cache=make) as running:
            await running.ask(demo.request(base, max_tokens=3))
            await running.copied(Tier.HOST)
            await running.ask(demo.request(other, max_tokens=3, mode=CacheMode.OFF))
            assert running.cache is not None
            assert running.cache.holdings().entries[Tier.DEVICE] == 0
            got = await running.ask(demo.request(prompt, max_tokens=4))
            assert_close(got, alone)
            assert got.use == CacheUse(302, CheckpointKind.SESSION_END, Tier.HOST)
            await running.flush()
