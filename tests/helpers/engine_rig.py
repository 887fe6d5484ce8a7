"""EngineRig: a real Engine and Program over the FakeExecutor, with a clock and a step gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import numpy as np

from ninfer.contract.cache import CacheRequest
from ninfer.contract.generation import (
    Admitted,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    OutputSession,
    Progress,
    RequestHandle,
)
from ninfer.contract.masks import TokenMask
from ninfer.contract.program import Program
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import PromptScoring, SamplingParams
from ninfer.contract.units import Capacity
from ninfer.engine.context_protocol import ContextPolicy
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.engine.speculation.row_drafter import RowDrafter
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskStore
from tests.helpers.fake_executor import FakeExecutor, expected_tokens
from tests.helpers.masked_session import MaskedSession
from tests.helpers.model_configs import hybrid_config
from tests.helpers.scripted_session import ScriptedSession

VOCAB_SIZE = 97
Made = TypeVar("Made")


def capacity(
    *,
    lanes: int = 2,
    max_context: int = 256,
    num_pages: int | None = None,
    chunk: int = 16,
    cache_slots: int = 0,
    host_blocks: int = 0,
    draft_tokens: int = 0,
    has_draft_model: bool = False,
) -> Capacity:
    """As the planner makes it: two StateImages a lane, the root, and what the cache gets."""
    pages = lanes * -(-max_context // 64) if num_pages is None else num_pages
    slots = 2 * lanes + 1 + cache_slots
    return Capacity(
        lanes, max_context, pages, slots, chunk, host_blocks, draft_tokens, has_draft_model
    )


class ManualClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class StepGate(asyncio.Event):
    """Lets so many executor calls pass as it was told to; `open` lets all pass."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = asyncio.Semaphore(0)

    def step(self, num_calls: int = 1) -> None:
        for _ in range(num_calls):
            self._permits.release()

    def open(self) -> None:
        self.set()
        self._permits.release()

    async def wait(self) -> Literal[True]:
        if not self.is_set():
            await self._permits.acquire()
        return True


@dataclass(slots=True)
class Transcript:
    """What a consumer saw."""

    events: list[Event] = field(default_factory=list)

    @property
    def terminals(self) -> list[Finished | Failed]:
        return [event for event in self.events if isinstance(event, Finished | Failed)]

    @property
    def terminal(self) -> Finished | Failed:
        """The one terminal event, which must be the last."""
        assert len(self.terminals) == 1
        assert self.events[-1] is self.terminals[0]
        return self.terminals[0]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.terminal, Finished), self.terminal
        return self.terminal

    @property
    def error_code(self) -> str:
        assert isinstance(self.terminal, Failed), self.terminal
        return self.terminal.error.code

    @property
    def token_ids(self) -> list[int]:
        return [
            token.token_id
            for event in self.events
            if isinstance(event, Progress | Finished)
            for delta in event.deltas
            for token in delta.tokens
        ]

    @property
    def was_admitted(self) -> bool:
        return isinstance(self.events[0], Admitted)


async def read(handle: RequestHandle) -> Transcript:
    """Consume a request to its end and let go of it."""
    transcript = Transcript()
    async with handle:
        async for event in handle:
            transcript.events.append(event)
    return transcript


class Maker(Generic[Made]):
    """Makes what an engine is built with from its Program, and shows it to the test as `made`."""

    made: Made

    def __init__(self, make: Callable[[Program], Made]) -> None:
        self._make = make

    def __call__(self, program: Program) -> Made:
        self.made = self._make(program)
        return self.made


async def spin(num_turns: int = 40) -> None:
    """Let everything that can run without a step do so."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def step_until(gate: StepGate, reached: Callable[[], bool]) -> None:
    """Run units until `reached` says so."""
    for _ in range(2000):
        if reached():
            return
        gate.step()
        await spin(12)
    raise AssertionError("never reached")


def prompt_of(num_tokens: int, seed: int = 0) -> PreparedPrompt:
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens)
    return PreparedPrompt(token_ids.astype(np.int32))


class EngineRig:
    """Made by `running_engine` or, for a loop of one's own, by hand."""

    def __init__(
        self,
        limits: Capacity,
        *,
        max_pending: int = 16,
        queue_timeout_s: float = 100.0,
        max_decode_gap_s: float | None = None,
        wrap: Callable[[Program], Program] = lambda program: program,
        make_policy: Callable[[Program], ContextPolicy] | None = None,
        has_states: bool = True,
        disk: DiskStore | None = None,
        make_drafter: MakeDrafter = RowDrafter,
    ) -> None:
        self.clock = ManualClock()
        self.executor = FakeExecutor(VOCAB_SIZE, limits, has_states=has_states)
        self.model_program = ModelProgram(
            hybrid_config(vocab_size=VOCAB_SIZE), self.executor, limits, disk
        )
        program = wrap(self.model_program)
        self.engine = Engine(
            program,
            max_pending=max_pending,
            queue_timeout_s=queue_timeout_s,
            policy=None if make_policy is None else make_policy(program),
            max_decode_gap_s=max_decode_gap_s,
            clock=self.clock,
            make_drafter=make_drafter,
        )
        self._num_requests = 0

    def close_gate(self) -> StepGate:
        """From now on executor calls wait for `step`."""
        gate = StepGate()
        self.executor.gate = gate
        return gate

    def request(
        self,
        num_prompt_tokens: int = 5,
        max_tokens: int = 4,
        *,
        prompt: PreparedPrompt | None = None,
        cache: CacheRequest | None = None,
        session: OutputSession | None = None,
        sampling: SamplingParams | None = None,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
        scoring: PromptScoring | None = None,
        mask: TokenMask | None = None,
    ) -> GenerationRequest:
        """A request with a prompt of its own, unless `prompt` is given."""
        self._num_requests += 1
        return GenerationRequest(
            request_id=f"r{self._num_requests}",
            prompt=prompt or prompt_of(num_prompt_tokens, self._num_requests),
            sampling=sampling or SamplingParams(),
            session=session or ScriptedSession(),
            max_tokens=max_tokens,
            deadline_s=deadline_s,
            queue_timeout_s=queue_timeout_s,
            cache=cache or CacheRequest(),
            scoring=scoring,
            mask=mask,
        )

    def is_clean(self) -> bool:
        """Nothing is outstanding and every physical count is back at its start value."""
        self.model_program.check()
        occupancy = self.model_program.occupancy()
        device_used = occupancy.lanes_used, occupancy.pages_used, occupancy.slots_used
        used = (*device_used, occupancy.host_blocks_used, occupancy.num_checkpoints)
        status = self.engine.status()
        return not any(used) and (status.waiting, status.running, status.outstanding) == (
            0,
            0,
            0,
        )


def solo_tokens(
    request: GenerationRequest, num_tokens: int, *, has_states: bool = True
) -> list[int]:
    """What the request generates when it is alone."""
    session = request.session
    return expected_tokens(
        request.prompt,
        request.sampling,
        num_tokens,
        VOCAB_SIZE,
        min_tokens=request.min_tokens,
        suppressed_ids=request.suppressed_ids,
        has_states=has_states,
        allows=session.rule.allows if isinstance(session, MaskedSession) else None,
    )


@asynccontextmanager
async def running_engine(
    limits: Capacity | None = None,
    *,
    max_pending: int = 16,
    queue_timeout_s: float = 100.0,
    max_decode_gap_s: float | None = None,
    wrap: Callable[[Program], Program] = lambda program: program,
    make_policy: Callable[[Program], ContextPolicy] | None = None,
    make_drafter: MakeDrafter = RowDrafter,
) -> AsyncIterator[EngineRig]:
    rig = EngineRig(
        limits or capacity(),
        max_pending=max_pending,
        queue_timeout_s=queue_timeout_s,
        max_decode_gap_s=max_decode_gap_s,
        wrap=wrap,
        make_policy=make_policy,
        make_drafter=make_drafter,
    )
    await rig.engine.start()
    try:
        yield rig
    finally:
        if isinstance(rig.executor.gate, StepGate):
            rig.executor.gate.open()
        await rig.engine.aclose()
    rig.model_program.check()
