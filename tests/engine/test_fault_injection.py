"""Any single Program or OutputSession call fails: every request still ends exactly once."""

from __future__ import annotations

import asyncio

import pytest

from ninfer.contract.errors import DeviceError, InvariantError, Unavailable
from ninfer.contract.generation import EngineHealth, Failed, GenerationRequest, RequestHandle
from ninfer.contract.program import Program
from tests.helpers.engine_rig import EngineRig, Transcript, capacity, read, solo_tokens, spin
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.forcing import BoundSession, forcing
from tests.helpers.scripted_session import ScriptedSession


class Scenario:
    """Five requests over two lanes: plain, natural stop, cancelled, deadline, prefill only."""

    limits = capacity()

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.health = EngineHealth.LOADING
        self.is_clean = False
        self._fail_at = fail_at
        self._program_error = error or DeviceError("injected")
        self._session_error = error or ZeroDivisionError("injected")
        self.rig = EngineRig(self.limits, wrap=self._wrap)
        self.requests = self._requests()
        self.transcripts: list[Transcript] = []

    @property
    def failed_call(self) -> str:
        assert self._fail_at is not None
        return self.calls[self._fail_at]

    async def run(self) -> None:
        await self.rig.engine.start()
        try:
            handles = [self.rig.engine.submit(request) for request in self.requests]
            self.transcripts = await asyncio.gather(*map(self._consume, handles))
            await spin()
            self.health = self.rig.engine.status().health
            self.is_clean = self.rig.is_clean()
        finally:
            await self.rig.engine.aclose()

    async def _consume(self, handle: RequestHandle) -> Transcript:
        transcript = Transcript()
        async with handle:
            async for event in handle:
                transcript.events.append(event)
                if handle.request_id == "r3" and len(transcript.token_ids) == 3:
                    handle.cancel()
                if handle.request_id == "r4" and len(transcript.token_ids) == 2:
                    self.rig.clock.advance(10.0)
        return transcript

    def _requests(self) -> list[GenerationRequest]:
        def session(**script: int) -> ScriptedSession:
            return ScriptedSession(hold_back=1, on_call=self._session_called, **script)

        return [
            self.rig.request(20, 5, session=session()),
            self.rig.request(3, 9, session=session(finish_after=4)),
            self.rig.request(5, 50, session=session()),
            self.rig.request(5, 50, session=session(), deadline_s=self.rig.clock.now_s + 5.0),
            self.rig.request(33, 0, session=session()),
        ]

    def _wrap(self, program: Program) -> Program:
        return FaultyProgram(program, self._program_called)

    def _program_called(self, name: str) -> None:
        self._called(f"program.{name}", self._program_error)

    def _session_called(self, name: str) -> None:
        self._called(f"session.{name}", self._session_error)

    def _called(self, name: str, error: Exception) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self._fail_at:
            raise error


class TightScenario(Scenario):
    """Two requests that together outgrow the memory, and a third that waits."""

    limits = capacity(num_pages=4, chunk=64)

    def _requests(self) -> list[GenerationRequest]:
        return [self.rig.request(62, 72) for _ in range(2)] + [self.rig.request(62, 3)]


class TightScenarioWithHost(TightScenario):
    limits = capacity(num_pages=4, chunk=64, host_blocks=16)


class ForcedScenario(Scenario):
    """Two requests with forced tokens."""

    def _requests(self) -> list[GenerationRequest]:
        sessions = [BoundSession(on_call=self._session_called) for _ in range(2)]
        counts: dict[int, int] = {1: 9, 12: 1}
        return [forcing(self.rig.request(7, 16), session, counts) for session in sessions]


async def _faultless(kind: type[Scenario] = Scenario) -> Scenario:
    scenario = kind()
    await scenario.run()
    return scenario


async def test_scenario_reaches_every_call_and_every_way_to_end() -> None:
    scenario = await _faultless()
    kinds = [type(t.terminal).__name__ for t in scenario.transcripts]
    assert kinds == ["Finished", "Finished", "Finished", "Failed", "Finished"]
    assert scenario.is_clean
    assert set(scenario.calls) == {
        "program.open_sequence",
        "program.close_sequence",
        "program.frontier",
        "program.needs_copy",
        "program.reserve_units",
        "program.launch_prefill",
        "program.launch_decode",
        "program.complete",
        "program.commit",
        "session.goes_on_after",
        "session.preview",
        "session.commit",
        "session.reasoning_tokens",
        "session.flush",
    }


@pytest.mark.parametrize(
    "error", [None, InvariantError("injected"), RuntimeError("injected")], ids=repr
)
async def test_every_single_failing_call(error: Exception | None) -> None:
    num_calls = len((await _faultless()).calls)
    assert num_calls > 100
    for index in range(num_calls):
        scenario = Scenario(index, error)
        await scenario.run()
        for request, transcript in zip(scenario.requests, scenario.transcripts, strict=True):
            num_tokens = len(transcript.token_ids)
            assert transcript.token_ids == solo_tokens(request, num_tokens), scenario.failed_call
            assert transcript.terminal.usage.completion_tokens >= num_tokens
        if scenario.failed_call.startswith("session."):
            _check_local(scenario)
        else:
            _check_global(scenario)
        assert scenario.rig.engine.status().outstanding == 0
        assert scenario.rig.executor.is_closed
        assert scenario.rig.is_clean()


def _check_local(scenario: Scenario) -> None:
    codes = [t.terminal.error.code for t in scenario.transcripts if isinstance(t.terminal, Failed)]
    assert codes.count("internal_error") == 1
    assert set(codes) <= {"internal_error", "deadline_exceeded"}
    assert scenario.health is EngineHealth.READY
    assert scenario.is_clean


def _check_global(scenario: Scenario) -> None:
    assert scenario.health is EngineHealth.UNAVAILABLE
    errors = [t.terminal.error for t in scenario.transcripts if isinstance(t.terminal, Failed)]
    assert {error.code for error in errors} <= {"engine_unavailable", "deadline_exceeded"}
    assert any(error.code == "engine_unavailable" for error in errors)
    with pytest.raises(Unavailable):
        scenario.rig.engine.submit(scenario.requests[0])


PAUSE_CALLS = {"missing", "pause", "resume", "num_replay_left"}
TRANSFER_CALLS = {"begin_transfer", "settle_transfer", "checkpoint", "drop_device"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (TightScenario, PAUSE_CALLS),
        (TightScenarioWithHost, PAUSE_CALLS | TRANSFER_CALLS),
        (ForcedScenario, {"force", "launch_replay", "num_replay_left"}),
    ],
)
async def test_failing_calls_under_pressure(kind: type[Scenario], names: set[str]) -> None:
    faultless = await _faultless(kind)
    assert faultless.is_clean
    calls = [call.removeprefix("program.") for call in faultless.calls]
    assert names <= set(calls)
    for name in sorted(names):
        indices = [index for index, call in enumerate(calls) if call == name]
        for index in sorted({indices[0], indices[len(indices) // 2], indices[-1]}):
            scenario = kind(index)
            await scenario.run()
            for request, transcript in zip(scenario.requests, scenario.transcripts, strict=True):
                num_tokens = len(transcript.token_ids)
                assert transcript.token_ids == solo_tokens(request, num_tokens)
            _check_global(scenario)
            assert scenario.rig.engine.status().outstanding == 0
            assert scenario.rig.executor.is_closed
            assert scenario.rig.is_clean()


async def test_program_that_cannot_be_closed_does_not_hide_its_error() -> None:
    rig = EngineRig(capacity())
    await rig.engine.start()
    async with rig.engine.submit(rig.request(max_tokens=1)) as handle:
        assert [event async for event in handle]
    rig.executor.is_running = True
    with pytest.raises(InvariantError):
        await rig.engine.aclose()
    await rig.engine.aclose()
    assert (await read(handle)).events == []
