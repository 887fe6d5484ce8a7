"""The context cache over a server's life: clients that leave, restarts, damaged files, chats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from ninfer.cli.loading import LoadedModel, load_model, open_named_model, running_engine
from ninfer.contract.cache import CheckpointId, CheckpointKind, MissReason, Tier
from ninfer.contract.chat import ChatMessage, ChatPrompt, TextPart
from ninfer.contract.generation import Finish, FinishReason, GenerationRequest, RequestHandle
from ninfer.contract.program import (
    Draft,
    PausedSequence,
    PendingBatch,
    Program,
    SequenceHandle,
    SequenceSpec,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.contract.units import Capacity
from ninfer.options import EngineOptions, SamplingOptions
from ninfer.program.stores import disk_store
from tests.helpers.cached_engine import (
    Answer,
    CachedModel,
    CopyingCache,
    Running,
    ask,
    cached_capacity,
    load_cached_model,
    random_ids,
)
from tests.helpers.faulty_program import FaultyProgram

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

TARGET = "target"
CANCELLED = Finish(FinishReason.CANCELLED)


@pytest.fixture(scope="module")
def small() -> CachedModel:
    return load_cached_model("qwen3_5-dense")


@pytest.fixture(scope="module")
def demo() -> CachedModel:
    return load_cached_model()


class Leaving(FaultyProgram):
    """Cancels the target when the Program is asked for what `moment` names."""

    def __init__(self, program: Program, moment: str) -> None:
        super().__init__(program, lambda name: None)
        self._moment = moment
        self._targets: set[SequenceHandle] = set()
        self.handle: RequestHandle | None = None
        self.num_met = 0

    def watch(self, handle: RequestHandle) -> None:
        self.handle = handle

    def open_sequence(self, spec: SequenceSpec, source: Source | None = None) -> SequenceHandle:
        opened = super().open_sequence(spec, source)
        if spec.request_id == TARGET:
            self._targets.add(opened)
        return opened

    def launch_prefill(self, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
        if handle in self._targets:
            self._meet("prefill")
        return super().launch_prefill(handle, num_tokens)

    def launch_decode(
        self,
        handles: Sequence[SequenceHandle],
        *,
        drafts: Sequence[Draft] = (),
        num_proposed: Sequence[int] = (),
        goes_on: bool = False,
    ) -> PendingBatch:
        if not self._targets.isdisjoint(handles):
            self._meet("decode")
        return super().launch_decode(
            handles, drafts=drafts, num_proposed=num_proposed, goes_on=goes_on
        )

    def pause(self, handle: SequenceHandle, *, keeps_state: bool) -> PausedSequence:
        paused = super().pause(handle, keeps_state=keeps_state)
        if handle in self._targets:
            self._meet("paused")
        return paused

    def resume(self, paused: PausedSequence, source: Source | None = None) -> SequenceHandle:
        handle = super().resume(paused, source)
        if paused.spec.request_id == TARGET and self.num_replay_left(handle) > 0:
            self._meet("replay")
        return handle

    def begin_transfer(
        self, kind: TransferKind, checkpoint: CheckpointId, note: Mapping[str, object] | None = None
    ) -> Transfer | None:
        transfer = super().begin_transfer(kind, checkpoint, note)
        if kind is TransferKind.RESTORE:
            self._meet("materializing")
        return transfer

    def _meet(self, moment: str) -> None:
        if moment == self._moment and self.handle is not None:
            self.num_met += 1
            self.handle.cancel()


class TestClientsThatLeave:
    """The target goes in one state; who is there with it answers as alone, and nothing stays."""

    async def test_waiting(self, small: CachedModel) -> None:
        limits = cached_capacity(lanes=1)
        (alone,) = await small.alone(limits, small.request(random_ids(1, 70), max_tokens=20))
        async with small.running(limits) as running:
            other = asyncio.create_task(
                running.ask(small.request(random_ids(1, 70), max_tokens=20))
            )
            await running.until(lambda: running.engine.status().running == 1)
            target = small.request(random_ids(2, 70), max_tokens=20)
            got = await running.ask(target, watch=lambda handle: handle.cancel())
            assert (got.finish, got.tokens, got.use) == (CANCELLED, (), None)
            assert (await other).output == alone.output
            await running.flush()

    async def test_materializing(self, small: CachedModel) -> None:
        base = random_ids(1, 150)
        async with self._leaving(small, cached_capacity(), "materializing") as (running, leaving):
            await running.ask(small.request(base, max_tokens=3, places=tail_of(base)))
            await running.copied(Tier.HOST)
            await running.idle()
            assert isinstance(running.cache, CopyingCache)
            running.cache.give_up_device()
            got = await running.ask(target_of(small, base, 5), watch=leaving.watch)
            assert (got.finish, got.tokens) == (CANCELLED, ())
            assert leaving.num_met == 1
            # What was on its way is of use to the next.
            got = await running.ask(small.request(base, max_tokens=5, places=tail_of(base)))
            (alone,) = await small.alone(
                cached_capacity(), small.request(base, max_tokens=5, places=tail_of(base))
            )
            assert got.output == alone.output
            assert got.use is not None
            assert got.use.num_tokens == len(base) - 1
            await running.flush()

    @pytest.mark.parametrize("moment", ["prefill", "decode"])
    async def test_running(self, small: CachedModel, moment: str) -> None:
        other, base = small.request(random_ids(1, 70), max_tokens=20), random_ids(2, 300)
        async with self._leaving(small, cached_capacity(), moment) as (running, leaving):
            task = asyncio.create_task(running.ask(other))
            got = await running.ask(target_of(small, base, 20), watch=leaving.watch)
            assert got.finish == CANCELLED
            assert leaving.num_met >= 1
            assert (len(got.tokens) == 0) == (moment == "prefill")
            await self._check_other(small, await task, 20)
            await running.flush()

    @pytest.mark.parametrize("moment", ["paused", "replay"])
    async def test_out_of_memory(self, small: CachedModel, moment: str) -> None:
        """The first needs a third page of four; the target has two by then."""
        limits = cached_capacity(
            max_context=256,
            num_pages=4,
            cache_slots=2,
            host_blocks=64 if moment == "paused" else 0,
        )
        other, base = small.request(random_ids(1, 64), max_tokens=75), random_ids(2, 20)
        (alone,) = await small.alone(limits, target_of(small, base, 78))
        async with self._leaving(small, limits, moment) as (running, leaving):
            target = target_of(small, base, 78)
            beside, got = await asyncio.gather(
                running.ask(other), running.ask(target, watch=leaving.watch)
            )
            assert got.finish == CANCELLED
            assert leaving.num_met == 1
            assert 40 < len(got.tokens) < 78
            assert got.tokens == alone.tokens[: len(got.tokens)]
            metrics = running.engine.metrics
            assert (metrics.num_pauses, metrics.num_replays) == (1, int(moment == "replay"))
            await self._check_other(small, beside, 75, num_prompt_tokens=64)
            await running.flush()

    def _leaving(
        self, small: CachedModel, limits: Capacity, moment: str
    ) -> AbstractAsyncContextManager[tuple[Running, Leaving]]:
        return small.running_wrapped(
            limits, lambda program: Leaving(program, moment), copies=(TransferKind.DEMOTE,)
        )

    async def _check_other(
        self, small: CachedModel, got: Answer, max_tokens: int, *, num_prompt_tokens: int = 70
    ) -> None:
        request = small.request(random_ids(1, num_prompt_tokens), max_tokens=max_tokens)
        (alone,) = await small.alone(cached_capacity(), request)
        assert got.output == alone.output


def tail_of(base: Sequence[int]) -> dict[int, CheckpointKind]:
    return {len(base) - 1: CheckpointKind.PROMPT_TAIL}


def target_of(model: CachedModel, base: Sequence[int], max_tokens: int) -> GenerationRequest:
    request = model.request(base, max_tokens=max_tokens, places=tail_of(base))
    return replace(request, request_id=TARGET)


def files_of(folder: Path, count: int) -> list[Path]:
    paths = list(folder.glob(f"*{disk_store.SUFFIX}"))
    assert len(paths) == count
    return paths


class TestRestart:
    """The product's own wiring: options in, files on disk, another engine on the same folder."""

    NUM_TOKENS = 700

    async def test_known_history_is_not_computed_again(
        self, demo: CachedModel, tmp_path: Path
    ) -> None:
        base, said, alone = await self._first_life(demo, tmp_path)
        files_of(tmp_path, 1)
        async with running_engine(*self._load(tmp_path)) as engine:
            got = await ask(engine, demo.request([*base, *said], max_tokens=4))
            assert got.token_ids == alone
            assert got.use is not None
            assert (got.use.tier, got.use.kind) == (Tier.DISK, CheckpointKind.SESSION_END)
            assert got.use.num_tokens == self.NUM_TOKENS + len(said) - 1
            assert engine.metrics.prompt_tokens_total == 1

    @pytest.mark.parametrize("place", ["header", "middle", "end", "cut"])
    async def test_damaged_file_is_a_miss_and_a_line_in_the_log(
        self, demo: CachedModel, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        base, said, alone = await self._first_life(demo, tmp_path)
        (path,) = files_of(tmp_path, 1)
        data = bytearray(path.read_bytes())
        position = {"header": 40, "middle": len(data) // 2, "end": len(data) - 1, "cut": 0}[place]
        data[position] ^= 1 if place != "cut" else 0
        path.write_bytes(data[:-1000] if place == "cut" else data)
        with caplog.at_level(logging.WARNING):
            async with running_engine(*self._load(tmp_path)) as engine:
                got = await ask(engine, demo.request([*base, *said], max_tokens=4))
        assert got.token_ids == alone
        assert got.use is not None
        is_found = place in ("middle", "end")
        assert (got.use.num_tokens, got.use.miss) == (
            0,
            MissReason.NOT_RESTORED if is_found else MissReason.NO_ENTRY,
        )
        line = "was not fetched" if is_found else "is not used"
        assert sum(line in record.getMessage() for record in caplog.records) == 1

    async def _first_life(
        self, demo: CachedModel, folder: Path
    ) -> tuple[list[int], list[int], list[int]]:
        """(a prompt, the answer to it, the answer to both together), each the first time."""
        base = await demo.ids("The cat sat near the river and looked at the fish. ", 700)
        async with running_engine(*self._load(folder)) as engine:
            said = (await ask(engine, demo.request(base, max_tokens=5))).token_ids
        request = demo.request([*base, *said], max_tokens=4)
        (alone,) = await demo.alone(cached_capacity(lanes=1, max_context=1024), request)
        return base, said, alone.token_ids

    def _load(self, folder: Path) -> tuple[LoadedModel, EngineOptions]:
        options = EngineOptions(
            executor="cpu", max_concurrency=1, max_context=1024, cache_dir=str(folder)
        )
        source = open_named_model(None)
        return load_model(source, options, SamplingOptions(), lambda *_: None), options


class TestChats:
    SYSTEM = "You are a patient teacher of small children, and you know all about animals. " * 6
    QUESTIONS = ("What is a penguin?", "Where does it live?", "What does it eat?")

    async def test_conversation_goes_on_from_what_it_has(self, demo: CachedModel) -> None:
        """Prompts by the Frontend, with the places it finds."""
        limits = cached_capacity(max_context=512)
        messages = [ChatMessage("system", (TextPart(self.SYSTEM),))]
        num_cached: list[int] = []
        async with demo.running(limits) as running:
            for question in self.QUESTIONS:
                messages.append(ChatMessage("user", (TextPart(question),)))
                chat = ChatPrompt(messages=tuple(messages))
                prompt = await demo.frontend.prepare_chat(chat)
                assert prompt.frontiers
                got = await running.ask(demo.build(prompt, 12))
                (alone,) = await demo.alone(limits, demo.build(prompt, 12))
                assert (got.token_ids, got.text) == (alone.token_ids, alone.text)
                assert got.use is not None
                num_cached.append(got.use.num_tokens)
                answer = "".join(text for channel, text in got.text if channel == "content")
                messages.append(ChatMessage("assistant", (TextPart(answer),)))
            assert num_cached == sorted(set(num_cached))
            assert num_cached[0] == 0
            # Another conversation under the same instructions.
            other = (messages[0], ChatMessage("user", (TextPart("Who are you?"),)))
            prompt = await demo.frontend.prepare_chat(ChatPrompt(messages=other))
            got = await running.ask(demo.build(prompt, 12))
            (alone,) = await demo.alone(limits, demo.build(prompt, 12))
            assert got.output == alone.output
            assert got.use is not None
            assert (got.use.kind, got.use.miss) == (CheckpointKind.STABLE_PREFIX, None)
            await running.flush()
