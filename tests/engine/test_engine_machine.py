"""Random arrivals, cancels, deadlines, consumers that leave or read late, against bookkeeping."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from ninfer.contract.errors import Unavailable
from ninfer.contract.generation import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestHandle,
)
from ninfer.contract.sampling import SamplingParams
from tests.helpers.engine_rig import EngineRig, Transcript, capacity, solo_tokens, spin
from tests.helpers.fake_executor import Fault
from tests.helpers.scripted_session import ScriptedSession

T = TypeVar("T")
MAX_PENDING = 3


@dataclass(slots=True, eq=False)
class _Client:
    """One submitted request. `may_fail` lists the codes it may end with."""

    request: GenerationRequest
    handle: RequestHandle
    may_fail: set[str]
    transcript: Transcript = field(default_factory=Transcript)
    may_be_cancelled: bool = False
    has_left: bool = False


class EngineMachine(RuleBasedStateMachine):
    clients: Bundle[_Client] = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.all_clients: list[_Client] = []
        self.num_non_finite = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize(
        lanes=st.integers(1, 3),
        num_pages=st.integers(4, 8),
        prompts=st.lists(st.integers(1, 250), max_size=3),
    )
    def start(self, lanes: int, num_pages: int, prompts: list[int]) -> None:
        async def begin() -> None:
            limits = capacity(lanes=lanes, num_pages=num_pages)
            self.rig = EngineRig(limits, max_pending=MAX_PENDING, queue_timeout_s=50.0)
            self.gate = self.rig.close_gate()
            await self.rig.engine.start()

        self.limit = lanes + MAX_PENDING
        self.do(begin())
        for num_prompt_tokens in prompts:
            client = self._try_submit(self.rig.request(num_prompt_tokens, 10_000), set())
            assert client is not None

    @rule(
        target=clients,
        num_prompt_tokens=st.integers(1, 150),
        max_tokens=st.integers(0, 12) | st.just(10_000),
        finish_after=st.none() | st.integers(1, 15),
        hold_back=st.integers(0, 2),
        timeout_s=st.none() | st.integers(0, 40),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def submit(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        finish_after: int | None,
        hold_back: int,
        timeout_s: int | None,
        temperature: float,
    ) -> Any:
        request = self.rig.request(
            num_prompt_tokens,
            max_tokens,
            session=ScriptedSession(finish_after=finish_after, hold_back=hold_back),
            sampling=SamplingParams(temperature=temperature, seed=num_prompt_tokens),
            deadline_s=None if timeout_s is None else self.rig.clock.now_s + timeout_s,
        )

        deadline_codes = set() if timeout_s is None else {"deadline_exceeded"}
        client = self._try_submit(request, deadline_codes)
        return multiple() if client is None else client

    def _try_submit(self, request: GenerationRequest, may_fail: set[str]) -> _Client | None:
        async def send() -> RequestHandle:
            return self.rig.engine.submit(request)

        if self.rig.engine.status().outstanding >= self.limit:
            with pytest.raises(Unavailable) as caught:
                self.do(send())
            assert caught.value.code == "server_overloaded"
            return None
        client = _Client(request, self.do(send()), may_fail | {"request_queue_timeout"})
        self.all_clients.append(client)
        return client

    @rule(num_units=st.integers(0, 6))
    def run_units(self, num_units: int) -> None:
        async def run() -> None:
            for _ in range(num_units):
                self.gate.step()
                await spin(8)

        self.do(run())

    @rule()
    def spoil_next_unit(self) -> None:
        self.rig.executor.faults[len(self.rig.executor.calls)] = Fault("non_finite")
        self.num_non_finite += 1

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.rig.clock.advance(seconds)

    @rule(client=clients)
    def cancel(self, client: _Client) -> None:
        client.handle.cancel()
        client.may_be_cancelled = True

    @rule(client=clients)
    def read_what_is_there(self, client: _Client) -> None:
        if not client.has_left:
            self.do(self._read(client))

    @rule(client=consumes(clients))
    def leave(self, client: _Client) -> None:
        client.has_left = True
        self.do(client.handle.__aexit__(None, None, None))

    @invariant()
    def counts_hold(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.model_program.check()
        status = self.rig.engine.status()
        assert status.waiting + status.running <= status.outstanding <= self.limit
        num_staying = sum(not client.has_left for client in self.all_clients)
        assert num_staying <= status.outstanding
        assert status.error is None or "no unit has finished" in status.error

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                self.do(self._finish())
        finally:
            self.loop.close()

    async def _finish(self) -> None:
        self.gate.open()
        for client in self.all_clients:
            if not client.has_left:
                async with client.handle:
                    async for event in client.handle:
                        client.transcript.events.append(event)
                self._check_ended(client)
        await spin()
        assert self.rig.is_clean()
        num_ended = sum(self.rig.engine.metrics.requests_total.values())
        assert num_ended == len(self.all_clients)
        assert self.rig.engine.metrics.non_finite_rows_total <= self.num_non_finite
        await self.rig.engine.aclose()
        assert self.rig.executor.is_closed

    async def _read(self, client: _Client) -> None:
        events = client.handle.__aiter__()
        waiter = asyncio.ensure_future(anext(events, None))
        await spin(3)
        if not waiter.done():
            waiter.cancel()
        elif (event := waiter.result()) is not None:
            client.transcript.events.append(event)
        await asyncio.wait([waiter])

    def _check_ended(self, client: _Client) -> None:
        transcript = client.transcript
        terminal = transcript.terminal
        tokens = transcript.token_ids
        num_tokens = terminal.usage.completion_tokens
        assert tokens == solo_tokens(client.request, num_tokens)[: len(tokens)]
        assert sum(isinstance(event, Admitted) for event in transcript.events) <= 1
        match terminal:
            case Finished(finish=finish):
                assert len(tokens) == num_tokens
                self._check_finish(client, finish.reason, num_tokens)
            case Failed(error=error):
                allowed = client.may_fail | (
                    {"non_finite_logits"} if self.num_non_finite else set()
                )
                assert error.code in allowed

    def _check_finish(self, client: _Client, reason: FinishReason, num_tokens: int) -> None:
        rest = self.rig.engine.max_context - client.request.prompt.num_tokens
        match reason:
            case FinishReason.CANCELLED:
                assert client.may_be_cancelled
            case FinishReason.OUTPUT_LIMIT:
                assert num_tokens == client.request.max_tokens
            case FinishReason.CONTEXT_CAPACITY:
                assert num_tokens == rest < client.request.max_tokens
            case _:
                assert num_tokens <= min(rest, client.request.max_tokens)


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
