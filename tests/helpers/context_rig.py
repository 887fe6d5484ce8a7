"""ContextRig: a ContextCache over a real Program, driven request by request without an Engine.

rig = ContextRig()
served = await rig.serve(tokens, num_output=8, places={100: STABLE_PREFIX}, key="chat")
served.use, served.history
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ninfer.contract.cache import CacheRequest, CacheUse, CheckpointKind
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import (
    Amounts,
    SequenceHandle,
    SequenceSpec,
    TransferKind,
    UnitKind,
)
from ninfer.contract.prompt import MediaSpan, PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, Capacity
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.context_protocol import SourceChoice, TransferPlan
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskStore
from tests.helpers.engine_rig import VOCAB_SIZE
from tests.helpers.fake_executor import PAGE_BYTES, SLOT_BYTES, FakeExecutor, expected_tokens
from tests.helpers.model_configs import hybrid_config
from tests.helpers.scripted_session import ScriptedSession

CHUNK = 64
MAX_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Served:
    """`history` is the prompt and all accepted tokens; the last one is not in State and KV."""

    use: CacheUse
    history: tuple[int, ...]
    output: tuple[int, ...]
    ticket: int


@dataclass(frozen=True, slots=True)
class Running:
    """A request whose prompt is done."""

    ticket: int
    handle: SequenceHandle
    spec: SequenceSpec
    use: CacheUse
    first: int


class ContextRig:
    """prompt_of_choice   token ids of the request that arrived last
    spoils_copies      copies to the host turn out bad
    """

    def __init__(
        self,
        *,
        lanes: int = 1,
        pages: int = 512,
        slots: int = 64,
        host_blocks: int = 0,
        has_states: bool = True,
        disk: DiskStore | None = None,
        limits: CacheLimits | None = None,
    ) -> None:
        capacity = Capacity(lanes, MAX_CONTEXT, pages, slots, CHUNK, host_blocks)
        self.executor = FakeExecutor(VOCAB_SIZE, capacity, has_states=has_states)
        self.program = ModelProgram(
            hybrid_config(vocab_size=VOCAB_SIZE), self.executor, capacity, disk
        )
        slot_bytes = SLOT_BYTES if has_states else 0
        self.memory = CacheMemory(PAGE_BYTES, slot_bytes, has_disk=disk is not None)
        self.cache = ContextCache(self.program, self.memory, limits)
        self.prompt_of_choice: tuple[int, ...] = ()
        self.spoils_copies = False
        self._num_tickets = 0
        self._specs: dict[int, SequenceSpec] = {}

    async def serve(
        self,
        prompt: PreparedPrompt | tuple[int, ...],
        *,
        num_output: int = 2,
        places: Mapping[int, CheckpointKind] | None = None,
        marks: frozenset[int] = frozenset(),
        key: str | None = None,
        salt: str = "",
    ) -> Served:
        """A request from arrival to end, its tokens checked against those it has alone."""
        running = await self.start(prompt, places=places, marks=marks, key=key, salt=salt)
        return await self.end(running, num_output)

    async def start(
        self,
        prompt: PreparedPrompt | tuple[int, ...],
        *,
        places: Mapping[int, CheckpointKind] | None = None,
        marks: frozenset[int] = frozenset(),
        key: str | None = None,
        salt: str = "",
    ) -> Running:
        """A request from arrival to its first token."""
        ticket = self.arrive(prompt, places=places, marks=marks, key=key, salt=salt)
        choice = await self.choose(ticket)
        spec = self._specs[ticket]
        handle = self.program.open_sequence(spec, choice.source)
        self.cache.bound(ticket, choice)
        first = await self._prefill(ticket, handle, spec)
        return Running(ticket, handle, spec, choice.use, first)

    def arrive(
        self,
        prompt: PreparedPrompt | tuple[int, ...],
        *,
        places: Mapping[int, CheckpointKind] | None = None,
        marks: frozenset[int] = frozenset(),
        key: str | None = None,
        salt: str = "",
    ) -> int:
        """Only the arrival; the ticket."""
        if isinstance(prompt, tuple):
            prompt = prompt_of(prompt, places or {}, marks)
        self.prompt_of_choice = tuple(prompt.token_ids.tolist())
        ticket = self._num_tickets
        self._num_tickets += 1
        request = GenerationRequest(
            request_id=f"r{ticket}",
            prompt=prompt,
            sampling=SamplingParams(),
            session=ScriptedSession(),
            max_tokens=1,
            cache=CacheRequest(session_key=key, salt=salt),
        )
        self._specs[ticket] = SequenceSpec(request.request_id, prompt, request.sampling)
        self.cache.arrive(ticket, request)
        return ticket

    async def choose(self, ticket: int) -> SourceChoice:
        """Choose until nothing has to be moved."""
        choice = self.cache.choose(ticket)
        while choice.move is not None:
            await self.transfer(choice.move)
            choice = self.cache.choose(ticket)
        return choice

    async def transfer(self, plan: TransferPlan) -> bool:
        """Do what a plan says; room is made on the device as the worker does."""
        transfer = self.program.begin_transfer(plan.kind, plan.checkpoint, plan.note)
        while transfer is None:
            need = Amounts(slots=1)
            pages = self.program.pages_needed(self.program.checkpoint(plan.checkpoint).frontier)
            if pages > self.program.free().pages:
                need = Amounts(pages=pages - self.program.free().pages)
            if plan.kind is not TransferKind.RESTORE or not self.cache.relieve(need):
                self.cache.transferred(plan, None, is_ok=False)
                return False
            transfer = self.program.begin_transfer(plan.kind, plan.checkpoint, plan.note)
        done = asyncio.Event()
        transfer.add_done_callback(done.set)
        await done.wait()
        is_ok = self.program.settle_transfer(transfer)
        if self.spoils_copies:
            assert plan.kind is TransferKind.DEMOTE
            self.program.drop_host(plan.checkpoint)
            is_ok = False
        self.cache.transferred(plan, transfer, is_ok=is_ok)
        return is_ok

    async def idle(self) -> list[TransferKind]:
        """All background transfers there are; their kinds."""
        kinds = []
        while (plan := self.cache.next_transfer(is_idle=True)) is not None:
            kinds.append(plan.kind)
            await self.transfer(plan)
        return kinds

    async def end(self, running: Running, num_output: int) -> Served:
        handle, spec, output = running.handle, running.spec, [running.first]
        while len(output) < num_output:
            self._reserve(handle, 1)
            batch = self.program.launch_decode([handle])
            await self.program.complete(batch)
            assert batch.outputs is not None
            token = batch.outputs[0].token
            assert token is not None
            self.program.commit(batch, [1])
            output.append(token.token_id)
        assert output == expected_tokens(
            spec.prompt,
            spec.sampling,
            num_output,
            VOCAB_SIZE,
            has_states=self.memory.has_states,
        )
        frontier = self.program.frontier(handle)
        if not self.cache.finished(running.ticket, handle, tuple(output), frontier):
            self.program.close_sequence(handle)
        self.cache.left(running.ticket)
        self.program.check()
        history = (*spec.prompt.token_ids.tolist(), *output)
        return Served(running.use, history, tuple(output), running.ticket)

    def cancel(self, running: Running) -> None:
        self.program.close_sequence(running.handle)
        self.cache.left(running.ticket)

    async def _prefill(self, ticket: int, handle: SequenceHandle, spec: SequenceSpec) -> int:
        stops = self.cache.stops(ticket)
        while True:
            frontier = self.program.frontier(handle)
            ends = [stop for stop in stops if stop > frontier]
            ends += [frontier - frontier % CHUNK + CHUNK, spec.prompt.num_tokens]
            num_tokens = min(ends) - frontier
            self._reserve(handle, num_tokens)
            batch = self.program.launch_prefill(handle, num_tokens)
            await self.program.complete(batch)
            assert batch.kind is UnitKind.PREFILL
            assert batch.outputs is not None
            token = batch.outputs[0].token
            self.program.commit(batch, [0 if token is None else 1])
            if token is not None:
                return token.token_id
            if self.program.frontier(handle) in stops:
                self.cache.reached(ticket, handle, self.program.frontier(handle))

    def _reserve(self, handle: SequenceHandle, num_tokens: int) -> None:
        while not self.program.reserve_units(handle, num_tokens):
            assert self.cache.relieve(self.program.missing(handle, num_tokens))


def tokens(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist())


def prompt_of(
    token_ids: tuple[int, ...],
    places: Mapping[int, CheckpointKind],
    marks: frozenset[int] = frozenset(),
    media: tuple[MediaSpan, ...] = (),
) -> PreparedPrompt:
    frontiers = tuple(
        PromptFrontier(frontier, kind, is_explicit=frontier in marks)
        for frontier, kind in sorted(places.items())
    )
    return PreparedPrompt(np.array(token_ids, np.int32), media=media, frontiers=frontiers)


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
