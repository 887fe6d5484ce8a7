"""The engine as a state machine: random programs over real stores, Scheduler, worker and policy.

An episode is a random machine (lanes, pages, slots, host blocks, disk) with random arrivals,
prompts that share beginnings, siblings, drafts, proposals, masks, scores of prompts, cancels,
deadlines, clients that leave, bad rows, copies that fail and flushes. After every step all counts
must hold; at the end every request has ended once with the tokens it has alone, and nothing is
left. In some episodes the device itself fails at a copy, which ends them. A failure names its seed,
and `asyncio.run(run_episode(seed))` plays it again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import (
    Admitted,
    EngineHealth,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
)
from ninfer.contract.program import Program, TransferKind
from ninfer.contract.units import Capacity
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.context_protocol import ContextPolicy
from ninfer.engine.request_record import Phase
from tests.helpers.chaos_policy import ChaosPolicy
from tests.helpers.client import Client
from tests.helpers.engine_rig import VOCAB_SIZE, EngineRig, StepGate, solo_tokens, spin
from tests.helpers.failing_copies import FailingCopies
from tests.helpers.fake_executor import PAGE_BYTES, SLOT_BYTES, Fault
from tests.helpers.masked_session import MaskedSession
from tests.helpers.memory_disk import MemoryDisk
from tests.helpers.oracle_drafter import oracles
from tests.helpers.prompt_scores import assert_scored
from tests.helpers.random_requests import MAX_CONTEXT, RandomRequests

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

STEPS_PER_EPISODE = 500
EPISODES_PER_PART = 15
PARTS = range(0, 120, EPISODES_PER_PART)
"""The first seed of each part."""
MIN_STEPS = 10**5
FATAL_SEEDS = range(1000, 1012)
SELDOM = (Phase.MATERIALIZING, Phase.PAUSED, Phase.REPLAY)
FREQUENT = (Phase.WAITING, Phase.PREFILL, Phase.DECODE_READY)


class Episode:
    """`fatal_move`: the number of the copy at which the device fails."""

    def __init__(self, seed: int, *, fatal_move: int | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clients: list[Client] = []
        self.num_uses: Counter[int] = Counter()
        self.num_spoiled = 0
        self.num_steps = 0
        self.reached: Counter[str] = Counter()
        self.is_fatal = fatal_move is not None
        self.are_talkers = self.random.random() < 0.6
        self.chaos: ChaosPolicy | None
        self.cache: ContextCache | None
        self.program: FailingCopies
        self.rig = self._rig()
        if fatal_move is not None:
            self.rig.executor.move_faults.add(fatal_move)
        self.gate = self.rig.close_gate()
        self.move_gate: StepGate | None = None
        if self.random.random() < 0.5:
            self.move_gate = self.rig.executor.move_gate = StepGate()
        self.requests = RandomRequests(self.rig, self.random, are_talkers=self.are_talkers)

    async def run(self) -> Counter[str]:
        """What was reached, for the test that everything is."""
        await self.rig.engine.start()
        try:
            for _ in range(STEPS_PER_EPISODE):
                self._act()
                await self._step()
                if self.rig.engine.status().has_ended:
                    break
            await self._finish()
        finally:
            self.gate.open()
            if self.move_gate is not None:
                self.move_gate.open()
            await self.rig.engine.aclose()
        assert self.rig.is_clean()
        return self.reached

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
        if status.has_ended:
            assert self.is_fatal
            assert status.error == "DeviceError: injected move error"
        else:
            assert status.health is EngineHealth.READY, status.error
        assert status.running <= status.max_concurrency
        assert status.waiting + status.running <= status.outstanding

    def _act(self) -> None:
        choice = self.random.random()
        if choice < 0.13:
            self._submit()
        elif choice < 0.135:
            self.rig.executor.faults[len(self.rig.executor.calls) + 1] = Fault("non_finite")
            self.num_spoiled += 1
        elif choice < 0.14:
            self.rig.clock.advance(self.random.uniform(0.0, 2.0))
        elif choice < 0.145:
            self.rig.engine.flush_cache()
        elif choice < (0.8 if self.program.is_restoring else 0.175):
            self._cut_off(may_be_any=choice < 0.15)

    def _cut_off(self, *, may_be_any: bool) -> None:
        """A client cancels, or leaves; if possible one that is where requests seldom are."""
        phases = [
            (self.program.phase_of(client.request.request_id), client)
            for client in self.clients
            if client.is_running
        ]
        seldom = [(phase, client) for phase, client in phases if phase in SELDOM]
        if not (seldom or (may_be_any and phases)):
            return
        phase, client = self.random.choice(seldom or phases)
        self.reached[f"cut off in {phase.name}"] += 1
        client.was_cancelled = True
        if self.random.random() < 0.5:
            client.handle.cancel()
        elif client.reader is not None:
            client.has_left = True
            client.reader.cancel()

    def _submit(self) -> None:
        known = [client for client in self.clients if len(client.transcript.events) > 1]
        history = self.random.choice(known).history if known else None
        for request in self.requests.next(history):
            status = self.rig.engine.status()
            if status.outstanding >= status.max_concurrency + status.max_pending:
                return
            client = Client(request, self.rig.engine.submit(request), self.rig.clock.now_s)
            client.reader = asyncio.create_task(client.read())
            self.clients.append(client)
            self.num_uses[id(request.prompt)] += 1

    def _rig(self) -> EngineRig:
        source = self.random
        lanes = source.randint(2 if self.are_talkers else 1, 6)
        limits = Capacity(
            max_concurrency=lanes,
            max_context=MAX_CONTEXT,
            num_pages=source.choice((4, 4, 5, 6, 7, 8, 14)[: 4 if self.are_talkers else 7]),
            num_slots=2 * lanes + 1 + source.choice((0, 0, 1, 4, 12)),
            prefill_chunk=source.choice((32, 64, 200)),
            num_host_blocks=source.choice((16, 60) if self.is_fatal else (0, 0, 6, 16, 60)),
            max_draft_tokens=(0, 0, 1, 3, 8)[self.seed % 5],
            has_draft_model=self.seed % 5 > 1 and self.seed % 2 == 0,
        )

        disk = None
        if limits.num_host_blocks and source.random() < 0.6:
            disk = MemoryDisk(self.seed, max_files=source.randint(1, 5), failures=0.3)

        has_states = source.random() < 0.8
        failures = source.choice((0.0, 0.3))

        def wrap(program: Program) -> FailingCopies:
            self.program = FailingCopies(program, self.seed, failures)
            return self.program

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
            wrap=wrap,
            make_policy=source.choice(
                (make_chaos, make_cache, make_cache, None)[: 2 if self.is_fatal else 4]
            ),
            has_states=has_states,
            disk=disk,
            make_drafter=oracles(self._answer_of, VOCAB_SIZE, self.seed),
        )

    def _answer_of(self, request: GenerationRequest) -> list[int]:
        """What it may come to say; the drafter is wrong about what no budget allows."""
        has_states = self.rig.executor.has_states
        return solo_tokens(request, min(request.max_tokens, MAX_CONTEXT), has_states=has_states)

    async def _finish(self) -> None:
        for _ in range(100_000):
            if not self.rig.engine.status().outstanding:
                break
            await self._step()
            if self.move_gate is not None:
                self.move_gate.step()
        self._check_overtaking()
        if not self.rig.engine.status().has_ended:
            await self._check_clean()
        self._note_reached()
        for client in self.clients:
            if not client.has_left:
                self.reached[self._check_ended(client)] += 1

    def _note_reached(self) -> None:
        reached, metrics = self.reached, self.rig.engine.metrics
        assert sum(metrics.requests_total.values()) == len(self.clients)
        reached["steps"] = self.num_steps
        for name in ("num_pauses", "num_resumes", "num_replays", "num_snapshots_lost"):
            reached[name] += getattr(metrics, name)
        reached["accepted_drafts"] += metrics.drafts.accepted_total
        reached["wrong_drafts"] += metrics.drafts.drafted_total - metrics.drafts.accepted_total
        reached["accepted_proposals"] += metrics.drafts.by_source[DraftSource.MODEL].accepted_total
        reached["forced_units"] += self.program.num_forced_units
        reached["snapshot_resumes"] += metrics.num_resumes - metrics.num_replays
        for kind, count in self.program.failed.items():
            reached[f"failed {kind.name}"] += count
        if self.chaos is not None:
            reached["hits"] += self.chaos.num_hits
            reached["moves"] += self.chaos.num_moves
        if self.cache is not None:
            reached["cache_hits"] += self.cache.metrics.hits.total()
            reached["cache_moves"] += self.cache.metrics.transfers.total()

    def _check_ended(self, client: Client) -> str:
        """How it ended, which must be a way that it may."""
        transcript, request = client.transcript, client.request
        terminal, tokens = transcript.terminal, transcript.token_ids
        num_tokens = terminal.usage.completion_tokens
        has_states = self.rig.executor.has_states
        solo = solo_tokens(request, num_tokens, has_states=has_states)
        assert len(solo) == num_tokens
        assert tokens == solo[: len(tokens)]
        assert sum(isinstance(event, Admitted) for event in transcript.events) <= 1
        if request.scoring is not None:
            assert_scored(transcript, request, is_whole=bool(tokens), has_states=has_states)
            self.reached["scored"] += bool(tokens)
        if self.num_uses[id(request.prompt)] > 1:
            self.reached["siblings_shared"] += terminal.usage.cached_tokens > 0
        if isinstance(terminal, Failed):
            assert terminal.error.code in self._allowed_errors(request, num_tokens)
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

    def _allowed_errors(self, request: GenerationRequest, num_tokens: int) -> set[str]:
        codes = {"request_queue_timeout"}
        if self.num_spoiled:
            codes.add("non_finite_logits")
        if request.deadline_s is not None:
            codes.add("deadline_exceeded")
        if (
            isinstance(request.session, MaskedSession)
            and request.session.rule.dead_end == num_tokens
        ):
            codes.add("constraint_dead_end")
        if self.is_fatal:
            codes.add("engine_unavailable")
        return codes

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


async def run_episode(seed: int, *, fatal_move: int | None = None) -> Counter[str]:
    episode = Episode(seed, fatal_move=fatal_move)
    try:
        return await episode.run()
    except BaseException as error:
        error.add_note(f"episode {seed}, fatal move {fatal_move}")
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


@pytest.mark.timeout(600)
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
        "num_snapshots_lost",
        "snapshot_resumes",
        "accepted_drafts",
        "wrong_drafts",
        "accepted_proposals",
        "hits",
        "moves",
        "cache_hits",
        "cache_moves",
        "scored",
        "siblings_shared",
        "forced_units",
        "cancelled",
        "constraint_dead_end",
        "non_finite_logits",
        "deadline_exceeded",
        "request_queue_timeout",
        "context_capacity",
        *(f"failed {kind.name}" for kind in TransferKind),
        *(f"cut off in {phase.name}" for phase in (*SELDOM, *FREQUENT)),
    )
    assert all(total[name] for name in expected), total
    assert total["steps"] >= MIN_STEPS


@pytest.mark.timeout(600)
async def test_a_device_that_fails_at_a_copy_ends_everything_once() -> None:
    total: Counter[str] = Counter()
    for seed in FATAL_SEEDS:
        total += await run_episode(seed, fatal_move=seed % 4)
    assert total["engine_unavailable"], total
