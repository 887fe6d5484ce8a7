"""The engine as a state machine: random programs over real stores, Scheduler, worker and policy.

An episode is a random machine (lanes, pages, slots, host blocks, disk) with random arrivals,
prompts that share beginnings, drafts, cancels, deadlines, clients that leave, bad rows, failing
copies and flushes. After every step all counts must hold; at the end every request has ended once
with the tokens it has alone, and nothing is left. A failure names its seed, and
`asyncio.run(run_episode(seed))` plays it again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from ninfer.contract.cache import CacheMode, CacheRequest, CheckpointKind
from ninfer.contract.generation import (
    Admitted,
    EngineHealth,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestHandle,
)
from ninfer.contract.program import Program
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.context_protocol import ContextPolicy
from tests.helpers.chaos_policy import ChaosPolicy
from tests.helpers.engine_rig import VOCAB_SIZE, EngineRig, StepGate, Transcript, solo_tokens, spin
from tests.helpers.fake_executor import PAGE_BYTES, SLOT_BYTES, Fault
from tests.helpers.memory_disk import MemoryDisk
from tests.helpers.oracle_drafter import oracles
from tests.helpers.scripted_session import ScriptedSession

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

STEPS_PER_EPISODE = 500
EPISODES_PER_PART = 14
PARTS = range(0, 112, EPISODES_PER_PART)
"""The first seed of each part."""
MIN_STEPS = 10**5
MAX_CONTEXT = 200


@dataclass(slots=True, eq=False)
class Client:
    """One request and what is allowed to happen to it."""

    request: GenerationRequest
    handle: RequestHandle
    submitted_s: float
    transcript: Transcript = field(default_factory=Transcript)
    reader: asyncio.Task[None] | None = None
    was_cancelled: bool = False
    has_left: bool = False

    async def read(self) -> None:
        async with self.handle:
            async for event in self.handle:
                self.transcript.events.append(event)


class Episode:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clients: list[Client] = []
        self.num_spoiled = 0
        self.rig = self._rig()
        self.chaos: ChaosPolicy | None
        self.cache: ContextCache | None
        self.gate = self.rig.close_gate()
        self.move_gate: StepGate | None = None
        if self.random.random() < 0.5:
            self.move_gate = self.rig.executor.move_gate = StepGate()
        self.are_talkers = self.random.random() < 0.6
        self.families = [self._tokens(MAX_CONTEXT) for _ in range(3)]
        self.num_steps = 0

    async def run(self) -> Counter[str]:
        """What was reached, for the test that everything is."""
        await self.rig.engine.start()
        try:
            for _ in range(STEPS_PER_EPISODE):
                self._act()
                await self._step()
            return await self._finish()
        finally:
            self.gate.open()
            if self.move_gate is not None:
                self.move_gate.open()
            await self.rig.engine.aclose()

    async def _step(self) -> None:
        self.num_steps += 1
        self.rig.clock.advance(0.01)
        self.gate.step()
        if self.move_gate is not None and self.random.random() < 0.3:
            self.move_gate.step()
        await spin(6)
        self._check()

    def _check(self) -> None:
        self.rig.model_program.check()
        status = self.rig.engine.status()
        assert status.health is EngineHealth.READY, status.error
        assert status.running <= status.max_concurrency
        assert status.waiting + status.running <= status.outstanding

    def _act(self) -> None:
        choice = self.random.random()
        if choice < 0.15:
            self._submit()
        elif choice < 0.155 and self.clients:
            client = self.random.choice(self.clients)
            client.handle.cancel()
            client.was_cancelled = True
        elif choice < 0.16 and self.clients:
            self._leave(self.random.choice(self.clients))
        elif choice < 0.165:
            self.rig.executor.faults[len(self.rig.executor.calls) + 1] = Fault("non_finite")
            self.num_spoiled += 1
        elif choice < 0.17:
            self.rig.clock.advance(self.random.uniform(0.0, 2.0))
        elif choice < 0.175:
            self.rig.engine.flush_cache()

    def _leave(self, client: Client) -> None:
        if client.reader is not None and not client.has_left:
            client.has_left = client.was_cancelled = True
            client.reader.cancel()

    def _submit(self) -> None:
        status = self.rig.engine.status()
        if status.outstanding >= status.max_concurrency + status.max_pending:
            return
        request = self._request()
        client = Client(request, self.rig.engine.submit(request), self.rig.clock.now_s)
        client.reader = asyncio.create_task(client.read())
        self.clients.append(client)

    def _request(self) -> GenerationRequest:
        source = self.random
        prompt = self._prompt()
        is_talker = self.are_talkers and source.random() < 0.8
        deadline_s = self.rig.clock.now_s + source.uniform(0.1, 3.0)
        is_random = source.random() < 0.3
        return self.rig.request(
            prompt=prompt,
            max_tokens=source.randint(70, 140) if is_talker else source.choice((0, 3, 20, 80, 200)),
            session=ScriptedSession(
                finish_after=None if is_talker else source.choice((None, None, 2, 90)),
                hold_back=source.choice((0, 0, 2)),
            ),
            sampling=SamplingParams(
                temperature=1.0, seed=source.getrandbits(30), presence_penalty=0.5
            )
            if is_random
            else SamplingParams(),
            deadline_s=deadline_s if source.random() < 0.1 else None,
            queue_timeout_s=source.choice((0.0, 0.5, 2.0)) if source.random() < 0.1 else None,
            cache=CacheRequest(
                mode=CacheMode.OFF if source.random() < 0.1 else CacheMode.DEFAULT,
                session_key=source.choice((None, "a", "b")),
            ),
        )

    def _prompt(self) -> PreparedPrompt:
        """Mostly the beginning of a family or of what was said before, with an end of its own."""
        source = self.random
        base = source.choice(self.families)
        finished = [c for c in self.clients if c.transcript.token_ids]
        if finished and source.random() < 0.4:
            known = source.choice(finished)
            base = (*known.request.prompt.token_ids.tolist(), *known.transcript.token_ids)
        lengths = (0, 40, 58, 61) if self.are_talkers else (0, 40, 64, 100, 150)
        num_shared = min(len(base), source.choice(lengths))
        rest = self._tokens(source.choice((1, 3, 8) if self.are_talkers else (1, 5, 30, 90)))
        tokens = (*base[:num_shared], *rest)[: MAX_CONTEXT - source.choice((1, 1, 40))]
        places = sorted(
            {*source.sample(range(1, len(tokens) + 1), min(len(tokens), 2)), num_shared}
        )
        frontiers = tuple(
            PromptFrontier(place, CheckpointKind.STABLE_PREFIX)
            for place in places
            if 1 <= place < len(tokens)
        )
        return PreparedPrompt(np.array(tokens, dtype=np.int32), frontiers=frontiers)

    def _tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCAB_SIZE) for _ in range(num_tokens))

    def _rig(self) -> EngineRig:
        source = self.random
        lanes = source.randint(1, 6)
        limits = Capacity(
            max_concurrency=lanes,
            max_context=MAX_CONTEXT,
            num_pages=source.choice((4, 4, 5, 6, 7, 8, 14)),
            num_slots=2 * lanes + 1 + source.choice((0, 0, 1, 4, 12)),
            prefill_chunk=source.choice((32, 64, 200)),
            num_host_blocks=source.choice((0, 0, 6, 16, 60)),
            max_draft_tokens=(0, 0, 1, 3, 8)[self.seed % 5],
        )

        disk = None
        if limits.num_host_blocks and source.random() < 0.6:
            disk = MemoryDisk(self.seed, max_files=source.randint(1, 5), failures=0.2)

        has_states = source.random() < 0.8

        def make_chaos(program: Program) -> ContextPolicy:
            self.chaos = ChaosPolicy(program, self.seed, may_store=disk is not None)
            return self.chaos

        def make_cache(program: Program) -> ContextPolicy:
            slot_bytes = SLOT_BYTES if has_states else 0
            memory = CacheMemory(PAGE_BYTES, slot_bytes, has_disk=disk is not None)
            limits = CacheLimits(max_entries=20, min_tokens=16, min_stored_tokens=64)
            self.cache = ContextCache(program, memory, limits)
            return self.cache

        self.chaos, self.cache = None, None
        return EngineRig(
            limits,
            max_pending=source.choice((2, 6, 12)),
            queue_timeout_s=50.0,
            max_decode_gap_s=source.choice((None, 0.1)),
            make_policy=source.choice((None, make_chaos, make_cache, make_cache)),
            has_states=has_states,
            disk=disk,
            make_drafter=oracles(self._answer_of, VOCAB_SIZE, self.seed),
        )

    def _answer_of(self, request: GenerationRequest) -> list[int]:
        return self._solo_tokens(request, min(request.max_tokens, MAX_CONTEXT))

    async def _finish(self) -> Counter[str]:
        for _ in range(100_000):
            if not self.rig.engine.status().outstanding:
                break
            await self._step()
            if self.move_gate is not None:
                self.move_gate.step()
        reached: Counter[str] = Counter(steps=self.num_steps)
        for client in self.clients:
            if not client.has_left:
                reached[self._check_ended(client)] += 1
        self._check_overtaking()
        await self._check_clean()
        metrics = self.rig.engine.metrics
        assert sum(metrics.requests_total.values()) == len(self.clients)
        for name in ("num_pauses", "num_resumes", "num_replays", "num_snapshots_lost"):
            reached[name] += getattr(metrics, name)
        reached["accepted_drafts"] += metrics.drafts.accepted_total
        reached["wrong_drafts"] += metrics.drafts.drafted_total - metrics.drafts.accepted_total
        reached["snapshot_resumes"] += metrics.num_resumes - metrics.num_replays
        if self.chaos is not None:
            reached["hits"] += self.chaos.num_hits
            reached["moves"] += self.chaos.num_moves
        if self.cache is not None:
            reached["cache_hits"] += self.cache.metrics.hits.total()
            reached["cache_moves"] += self.cache.metrics.transfers.total()
        return reached

    def _check_ended(self, client: Client) -> str:
        transcript, request = client.transcript, client.request
        terminal, tokens = transcript.terminal, transcript.token_ids
        num_tokens = terminal.usage.completion_tokens
        assert tokens == self._solo_tokens(request, num_tokens)[: len(tokens)]
        assert sum(isinstance(event, Admitted) for event in transcript.events) <= 1
        if isinstance(terminal, Failed):
            allowed = {"non_finite_logits"} if self.num_spoiled else set()
            if request.deadline_s is not None:
                allowed.add("deadline_exceeded")
            assert terminal.error.code in allowed | {"request_queue_timeout"}
            return terminal.error.code
        assert len(tokens) == num_tokens
        rest = MAX_CONTEXT - request.prompt.num_tokens
        match terminal.finish.reason:
            case FinishReason.CANCELLED:
                assert client.was_cancelled
            case FinishReason.OUTPUT_LIMIT:
                assert num_tokens == request.max_tokens
            case FinishReason.CONTEXT_CAPACITY:
                assert num_tokens == rest < request.max_tokens
            case FinishReason.STOP_TOKEN | FinishReason.STOP_STRING | FinishReason.TOOL_CALL:
                assert 0 < num_tokens <= min(rest, request.max_tokens)
        return terminal.finish.reason.value

    def _solo_tokens(self, request: GenerationRequest, num_tokens: int) -> list[int]:
        return solo_tokens(request, num_tokens, has_states=self.rig.executor.has_states)

    def _check_overtaking(self) -> None:
        """Each request was overtaken by at most as many younger ones as there are lanes."""
        times = [
            (client.submitted_s + terminal.timings.queue_s)
            for client in self.clients
            if client.transcript.terminals
            and isinstance(terminal := client.transcript.terminal, Finished)
            and client.transcript.was_admitted
        ]
        lanes = self.rig.model_program.capacity.max_concurrency
        for index, time_s in enumerate(times):
            assert sum(younger < time_s - 1e-6 for younger in times[index + 1 :]) <= lanes

    async def _check_clean(self) -> None:
        """After a flush, everything is as at the start."""
        occupancy = self.rig.model_program.occupancy()
        for _ in range(200):
            self.rig.engine.flush_cache()
            if self.move_gate is not None:
                self.move_gate.step()
            await spin(10)
            occupancy = self.rig.model_program.occupancy()
            if not occupancy.num_checkpoints:
                break
        assert self.rig.is_clean()
        assert (occupancy.host_blocks_used, occupancy.num_checkpoints) == (0, 0)


async def run_episode(seed: int) -> Counter[str]:
    episode = Episode(seed)
    try:
        return await episode.run()
    except BaseException as error:
        error.add_note(f"episode {seed}")
        raise


async def run_part(first: int) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in range(first, first + EPISODES_PER_PART):
        reached += await run_episode(seed)
    return reached


@pytest.fixture(scope="module")
def reached() -> dict[int, Counter[str]]:
    """Of the parts that were run."""
    return {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", PARTS)
async def test_random_programs(first: int, reached: dict[int, Counter[str]]) -> None:
    reached[first] = await run_part(first)


@pytest.mark.timeout(600)
async def test_all_of_it_happens(reached: dict[int, Counter[str]]) -> None:
    """In all parts together: one alone may have no replay."""
    for first in PARTS:
        if first not in reached:
            reached[first] = await run_part(first)
    total = sum(reached.values(), Counter[str]())
    expected = (
        "num_pauses",
        "num_replays",
        "snapshot_resumes",
        "accepted_drafts",
        "wrong_drafts",
        "hits",
        "moves",
        "cache_hits",
        "cache_moves",
        "cancelled",
        "non_finite_logits",
        "deadline_exceeded",
        "request_queue_timeout",
        "context_capacity",
    )
    assert all(total[name] for name in expected), total
    assert total["steps"] >= MIN_STEPS
