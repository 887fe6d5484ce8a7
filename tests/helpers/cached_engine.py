"""A whole engine with the context cache over a real CPU executor, for tests of what clients get.

async with model.running(limits, folder=tmp_path) as running:
    answer = await running.ask(model.request(token_ids, max_tokens=8))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ninfer.cli.loading import open_named_model
from ninfer.contract.arrays import Float32Array
from ninfer.contract.cache import CacheMode, CacheRequest, CacheUse, CheckpointKind, Tier
from ninfer.contract.chat import GenerationParams
from ninfer.contract.generation import (
    Failed,
    Finish,
    Finished,
    GenerationRequest,
    OutputDelta,
    Progress,
    RequestHandle,
)
from ninfer.contract.model import ModelConfig, ModelSource
from ninfer.contract.program import Amounts, Program, TransferKind
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import GeneratedToken
from ninfer.contract.units import Capacity, Executor
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context.notes import note_of
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.context_protocol import TransferPlan
from ninfer.engine.core import Engine
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import SamplingOptions
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskLayout, DiskStore
from ninfer.program.weight_reader import read_weights
from tests.helpers.model_paths import golden_model

LIMITS = CacheLimits(min_stored_tokens=64)
DISK_BYTES = 1 << 30
Wrapped = TypeVar("Wrapped", bound=Program)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client sees of one request, and what the cache did for it."""

    text: tuple[tuple[str, str], ...]
    tokens: tuple[GeneratedToken, ...]
    finish: Finish
    use: CacheUse | None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> Float32Array:
        """Of the drawn token and the best ones, best first, [n, 1 + top]."""
        rows = [token.logprobs for token in self.tokens if token.logprobs is not None]
        return np.array([[row.logprob, *(best for _, best in row.top)] for row in rows], np.float32)

    @property
    def output(self) -> tuple[object, ...]:
        """All but what the cache did: text, tokens, all log probabilities, the end."""
        return self.text, self.tokens, self.finish


class CopyingCache(ContextCache):
    """Makes every copy of `kinds` that is possible, as soon as it may, instead of only those that
    are worth it."""

    def __init__(
        self, program: Program, memory: CacheMemory, kinds: Iterable[TransferKind] = ()
    ) -> None:
        super().__init__(program, memory, LIMITS)
        self._kinds = frozenset(kinds)
        self._refused: set[object] = set()

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        for entry in self._catalogue:
            if self._program.checkpoint(entry.checkpoint).is_leased:
                continue
            if TransferKind.DEMOTE in self._kinds and not entry.is_on_host and entry.is_on_device:
                return TransferPlan(TransferKind.DEMOTE, entry.checkpoint)
            if TransferKind.STORE in self._kinds and not entry.is_on_disk:
                return TransferPlan(TransferKind.STORE, entry.checkpoint, note_of(entry))
        return None

    def give_up_device(self) -> None:
        """Whatever can go from the device goes."""
        while self.relieve(Amounts(pages=1 << 30, slots=1 << 30)):
            pass


@dataclass(frozen=True, slots=True)
class Running:
    engine: Engine
    program: ModelProgram
    cache: ContextCache | None

    async def ask(
        self, request: GenerationRequest, *, watch: Callable[[RequestHandle], None] | None = None
    ) -> Answer:
        """`watch` gets the handle before the first event."""
        return await ask(self.engine, request, watch=watch)

    async def ask_all(self, requests: Iterable[GenerationRequest]) -> list[Answer]:
        """All at once, in order of arrival."""
        return list(await asyncio.gather(*map(self.ask, requests)))

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for what the engine does by itself."""
        async with asyncio.timeout(20):
            while not reached():  # noqa: ASYNC110, the engine signals no idleness
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """No request is left in the engine."""
        await self.until(lambda: self.engine.status().outstanding == 0)

    async def flush(self) -> None:
        """Everything the cache holds goes; then every count is what it is at the start."""
        await self.idle()

        def is_empty() -> bool:
            self.engine.flush_cache()
            return self.program.occupancy().num_checkpoints == 0

        await self.until(is_empty)
        self.program.check()
        used = self.program.occupancy()
        assert (used.lanes_used, used.pages_used, used.slots_used) == (0, 0, 0)
        assert used.host_blocks_used == 0

    async def copied(self, tier: Tier) -> None:
        """Everything has a copy in `tier`."""
        cache = self.cache
        assert cache is not None

        def is_copied() -> bool:
            holdings = cache.holdings()
            return holdings.entries[tier] == holdings.num_entries > 0

        await self.until(is_copied)


async def ask(
    engine: Engine,
    request: GenerationRequest,
    *,
    watch: Callable[[RequestHandle], None] | None = None,
) -> Answer:
    """`watch` gets the handle before the first event."""
    deltas: list[OutputDelta] = []
    end: Finished | None = None
    async with engine.submit(request) as handle:
        if watch is not None:
            watch(handle)
        async for event in handle:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Progress | Finished):
                deltas += event.deltas
            if isinstance(event, Finished):
                end = event
    assert end is not None
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Answer(_joined(deltas), tokens, end.finish, end.usage.cache)


@asynccontextmanager
async def running_on(
    config: ModelConfig,
    executor: Executor,
    limits: Capacity,
    *,
    is_cached: bool = True,
    copies: Iterable[TransferKind] = (),
    folder: Path | None = None,
    make_cache: Callable[[Program, CacheMemory], ContextCache] | None = None,
    wrap: Callable[[Program], Program] = lambda program: program,
) -> AsyncIterator[Running]:
    """An engine that owns the executor. The clock stands still, so the cache goes by the rates it
    begins with."""
    num_state_blocks = -(-executor.slot_bytes // executor.page_bytes)
    layout = DiskLayout("test", executor.page_bytes, num_state_blocks)
    disk = None if folder is None else DiskStore(folder, DISK_BYTES, layout)
    program = ModelProgram(config, executor, limits, disk)
    memory = CacheMemory(executor.page_bytes, executor.slot_bytes, has_disk=disk is not None)
    wrapped, cache = wrap(program), None
    if is_cached and make_cache is not None:
        cache = make_cache(wrapped, memory)
    elif is_cached:
        cache = CopyingCache(wrapped, memory, copies)
    engine = Engine(wrapped, max_pending=16, queue_timeout_s=600.0, policy=cache, clock=lambda: 0.0)
    await engine.start()
    try:
        yield Running(engine, program, cache)
    finally:
        await engine.aclose()


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model whose weights are in memory; every engine gets an executor of its own."""

    source: ModelSource
    weights: Mapping[str, Float32Array]
    frontend: ModelFrontend

    @asynccontextmanager
    async def running(
        self,
        limits: Capacity,
        *,
        is_cached: bool = True,
        copies: Iterable[TransferKind] = (),
        folder: Path | None = None,
        make_cache: Callable[[Program, CacheMemory], ContextCache] | None = None,
        wrap: Callable[[Program], Program] = lambda program: program,
    ) -> AsyncIterator[Running]:
        """See `running_on`."""
        executor = CpuExecutor(self.source.config, self.weights, limits, num_threads=1)
        made = running_on(
            self.source.config,
            executor,
            limits,
            is_cached=is_cached,
            copies=copies,
            folder=folder,
            make_cache=make_cache,
            wrap=wrap,
        )
        async with made as running:
            yield running

    @asynccontextmanager
    async def running_wrapped(
        self,
        limits: Capacity,
        wrap: Callable[[Program], Wrapped],
        *,
        copies: Iterable[TransferKind] = (),
    ) -> AsyncIterator[tuple[Running, Wrapped]]:
        """The engine sees the Program through what `wrap` made, which comes along."""
        made: list[Wrapped] = []

        def keep(program: Program) -> Program:
            made.append(wrap(program))
            return made[0]

        async with self.running(limits, copies=copies, wrap=keep) as running:
            yield running, made[0]

    async def ids(self, text: str, num_tokens: int) -> list[int]:
        """The first tokens of a text, which is repeated as often as needed."""
        prompt = await self.frontend.prepare_text(text)
        ids: list[int] = prompt.token_ids.tolist()
        return (ids * (1 + num_tokens // len(ids)))[:num_tokens]

    def request(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        places: Mapping[int, CheckpointKind] | None = None,
        is_explicit: bool = False,
        temperature: float = 0.0,
        session_key: str | None = None,
        mode: CacheMode = CacheMode.DEFAULT,
    ) -> GenerationRequest:
        frontiers = tuple(
            PromptFrontier(num_tokens, kind, is_explicit)
            for num_tokens, kind in sorted((places or {}).items())
        )
        prompt = PreparedPrompt(np.array(token_ids, np.int32), frontiers=frontiers)
        return self.build(
            prompt, max_tokens, temperature=temperature, session_key=session_key, mode=mode
        )

    def build(
        self,
        prompt: PreparedPrompt,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        session_key: str | None = None,
        mode: CacheMode = CacheMode.DEFAULT,
    ) -> GenerationRequest:
        params = GenerationParams(
            temperature=temperature,
            seed=7,
            max_tokens=max_tokens,
            ignore_eos=True,
            top_logprobs=3,
            cache=CacheRequest(mode=mode, session_key=session_key),
        )
        return self.frontend.build_request("r", prompt, params, now=0.0)

    async def alone(self, limits: Capacity, *requests: GenerationRequest) -> list[Answer]:
        """Each by itself in an engine without a cache. Sessions are used up: build them anew."""
        async with self.running(replace(limits, num_host_blocks=0), is_cached=False) as running:
            return [await running.ask(request) for request in requests]


def random_ids(seed: int, num_tokens: int, vocab_size: int = 300) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab_size, num_tokens)]


def load_cached_model(golden: str | None = None) -> CachedModel:
    """A golden checkpoint, or the demo model."""
    source = open_named_model(None if golden is None else golden_model(golden))
    weights = {name: np.array(array) for name, array in read_weights(source, lambda *_: None)}
    frontend = ModelFrontend(source.config, source.resources, SamplingOptions())
    return CachedModel(source, weights, frontend)


def cached_capacity(
    *,
    lanes: int = 2,
    max_context: int = 512,
    num_pages: int = 32,
    cache_slots: int = 16,
    host_blocks: int = 256,
) -> Capacity:
    return Capacity(
        max_concurrency=lanes,
        max_context=max_context,
        num_pages=num_pages,
        num_slots=2 * lanes + 1 + cache_slots,
        prefill_chunk=128,
        num_host_blocks=host_blocks,
    )


def _joined(deltas: Iterable[OutputDelta]) -> tuple[tuple[str, str], ...]:
    texts: list[tuple[str, str]] = []
    for delta in deltas:
        if texts and texts[-1][0] == delta.channel:
            texts[-1] = (delta.channel, texts[-1][1] + delta.text)
        else:
            texts.append((delta.channel, delta.text))
    return tuple(texts)
