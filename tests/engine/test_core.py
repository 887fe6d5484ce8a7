from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from ninfer.contract.cache import CacheUse, MissReason
from ninfer.contract.errors import InvariantError, RequestError, Unavailable
from ninfer.contract.generation import (
    Admitted,
    EngineHealth,
    Failed,
    FinishReason,
    GenerationRequest,
    Progress,
    Usage,
)
from ninfer.contract.program import Program, SequenceHandle
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.engine.core import Engine
from ninfer.engine.metrics import Outcome
from tests.helpers.engine_rig import (
    VOCAB_SIZE,
    EngineRig,
    capacity,
    prompt_of,
    read,
    running_engine,
    solo_tokens,
    spin,
)
from tests.helpers.fake_executor import Fault
from tests.helpers.faulty_program import FaultyProgram
from tests.helpers.scripted_session import ScriptedSession

NO_CACHE = CacheUse(miss=MissReason.DISABLED)


class TestAnswer:
    async def test_events_come_in_order_and_tokens_equal_the_oracle(self) -> None:
        async with running_engine() as rig:
            request = rig.request(40, max_tokens=6)
            transcript = await read(rig.engine.submit(request))
            first, *middle, last = transcript.events
            assert isinstance(first, Admitted)
            assert first.usage == Usage(prompt_tokens=40, cache=NO_CACHE)
            assert all(isinstance(event, Progress) for event in middle)
            assert last is transcript.finished
            assert transcript.token_ids == solo_tokens(request, 6)
            assert transcript.finished.finish.reason is FinishReason.OUTPUT_LIMIT
            assert transcript.finished.usage == Usage(40, completion_tokens=6, cache=NO_CACHE)
            assert rig.is_clean()

    async def test_many_requests_over_few_lanes_equal_their_solo_runs(self) -> None:
        async with running_engine(capacity(lanes=3), max_pending=40) as rig:
            requests = [
                rig.request(
                    1 + 7 * index % 50,
                    max_tokens=1 + 5 * index % 23,
                    sampling=SamplingParams(temperature=1.0, seed=index, presence_penalty=0.5),
                )
                for index in range(40)
            ]
            transcripts = await asyncio.gather(*(read(rig.engine.submit(r)) for r in requests))
            for request, transcript in zip(requests, transcripts, strict=True):
                assert transcript.token_ids == solo_tokens(request, request.max_tokens)
            assert max(call.num_rows for call in rig.executor.calls) == 3
            assert rig.is_clean()

    async def test_prefill_only_request_ends_without_output(self) -> None:
        async with running_engine() as rig:
            session = ScriptedSession()
            transcript = await read(rig.engine.submit(rig.request(20, 0, session=session)))
            assert transcript.was_admitted
            assert transcript.token_ids == []
            assert transcript.finished.finish.reason is FinishReason.OUTPUT_LIMIT
            assert transcript.finished.usage.completion_tokens == 0
            assert session.num_committed == 0
            assert [call.num_tokens for call in rig.executor.calls] == [16, 4]
            assert rig.is_clean()

    async def test_natural_stop_wins_over_the_limit_at_the_same_token(self) -> None:
        async with running_engine() as rig:
            request = rig.request(max_tokens=3, session=ScriptedSession(finish_after=3))
            finish = (await read(rig.engine.submit(request))).finished.finish
            assert finish.reason is FinishReason.STOP_TOKEN
            assert finish.matched == solo_tokens(request, 3)[-1]

    async def test_budget_beyond_the_context_ends_at_context_capacity(self) -> None:
        async with running_engine(capacity(max_context=64)) as rig:
            request = rig.request(60, max_tokens=1000)
            transcript = await read(rig.engine.submit(request))
            assert transcript.token_ids == solo_tokens(request, 4)
            assert transcript.finished.finish.reason is FinishReason.CONTEXT_CAPACITY

    async def test_budget_that_just_fits_ends_at_the_output_limit(self) -> None:
        async with running_engine(capacity(max_context=64)) as rig:
            transcript = await read(rig.engine.submit(rig.request(60, max_tokens=4)))
            assert transcript.finished.finish.reason is FinishReason.OUTPUT_LIMIT

    async def test_prompt_that_fills_the_context_can_be_prefilled(self) -> None:
        async with running_engine(capacity(max_context=64)) as rig:
            transcript = await read(rig.engine.submit(rig.request(64, max_tokens=0)))
            assert transcript.finished.usage == Usage(prompt_tokens=64, cache=NO_CACHE)

    async def test_reasoning_tokens_are_counted_by_the_session(self) -> None:
        async with running_engine() as rig:
            request = rig.request(max_tokens=5, session=ScriptedSession(num_reasoning=3))
            transcript = await read(rig.engine.submit(request))
            assert transcript.finished.usage.reasoning_tokens == 3
            events = [event for event in transcript.events if isinstance(event, Progress)]
            channels = [delta.channel for event in events for delta in event.deltas]
            assert channels == ["reasoning"] * 3 + ["content"]
            assert [event.usage.reasoning_tokens for event in events] == [1, 2, 3, 3]

    async def test_timings_follow_the_clock(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            gate = rig.close_gate()
            blocker = rig.engine.submit(rig.request(max_tokens=1))
            waiting = rig.engine.submit(rig.request(20, max_tokens=3))
            for _ in range(6):
                rig.clock.advance(1.0)
                gate.step()
                await spin()
            timings = (await read(waiting)).finished.timings
            assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (1.0, 2.0, 2.0)
            assert timings.total_s == 5.0
            await read(blocker)


class TestSchedulingOfUnits:
    async def test_next_unit_runs_before_the_last_ones_output_is_seen(self) -> None:
        async with running_engine() as rig:
            handle = rig.engine.submit(rig.request(max_tokens=5))
            calls_when_seen = []
            async with handle:
                async for event in handle:
                    if isinstance(event, Progress):
                        calls_when_seen.append(len(rig.executor.calls))
            # One prefill call made the first token; each Progress arrives with a further unit
            # already started.
            assert calls_when_seen == [2, 3, 4, 5]

    async def test_what_a_token_shows_is_asked_while_the_next_unit_runs(self) -> None:
        calls: list[str] = []
        async with running_engine(wrap=lambda program: FaultyProgram(program, calls.append)) as rig:
            session = ScriptedSession(on_call=lambda name: calls.append(f"session.{name}"))
            await read(rig.engine.submit(rig.request(max_tokens=4, session=session)))
        watched = ("launch_decode", "commit", "session.goes_on_after", "session.preview")
        first = ["session.preview", "commit", "launch_decode"]
        inner = ["session.goes_on_after", "commit", "launch_decode", "session.preview"]
        last = ["session.preview", "commit"]
        assert [call for call in calls if call in watched] == [*first, *inner, *inner, *last]

    async def test_a_session_that_ends_a_sure_row_after_all_ends_its_request(self) -> None:
        class Fickle(ScriptedSession):
            def goes_on_after(self, token: GeneratedToken) -> bool:
                return True

        async with running_engine() as rig:
            requests = [rig.request(max_tokens=9, session=Fickle(finish_after=3)), rig.request()]
            broken, other = await asyncio.gather(
                *(read(rig.engine.submit(request)) for request in requests)
            )
            assert broken.error_code == "internal_error"
            assert broken.token_ids == solo_tokens(requests[0], 2)
            assert other.token_ids == solo_tokens(requests[1], 4)
            assert rig.is_clean()

    @pytest.mark.parametrize("hold_back", [0, 2])
    async def test_a_cancelled_request_shows_all_it_accepted(self, hold_back: int) -> None:
        async with running_engine() as rig:
            gate = rig.close_gate()
            request = rig.request(max_tokens=9, session=ScriptedSession(hold_back=hold_back))
            handle = rig.engine.submit(request)
            task = asyncio.create_task(read(handle))
            gate.step(3)
            await spin()
            handle.cancel()
            gate.step()
            transcript = await task
            assert transcript.token_ids == solo_tokens(request, 3)
            assert transcript.finished.usage.completion_tokens == 3

    @pytest.mark.parametrize("is_evicted", [False, True])
    async def test_a_request_cut_off_shows_what_its_last_unit_made(self, is_evicted: bool) -> None:
        async with running_engine() as rig:
            gate = rig.close_gate()
            deadline_s = None if is_evicted else rig.clock.now_s + 5.0
            request = rig.request(max_tokens=9, deadline_s=deadline_s)
            task = asyncio.create_task(read(rig.engine.submit(request)))
            gate.step(2)
            await spin()
            rig.clock.advance(10.0)
            drained = asyncio.create_task(rig.engine.drain(0.0)) if is_evicted else None
            await spin()
            gate.step()
            transcript = await task
            assert transcript.token_ids == solo_tokens(request, 3)
            code = "server_draining" if is_evicted else "deadline_exceeded"
            assert transcript.error_code == code
            if drained is not None:
                assert not await drained

    async def test_a_step_may_go_on_when_a_step_is_next(self) -> None:
        async with running_engine() as rig:
            await read(rig.engine.submit(rig.request(max_tokens=5)))
            steps = [call for call in rig.executor.calls if call.kind == "decode"]
            assert (len(steps), rig.executor.num_going_on) == (4, 3)

    async def test_no_step_goes_on_while_a_prompt_is_to_be_read(self) -> None:
        async with running_engine() as rig:
            gate = rig.close_gate()
            first = asyncio.create_task(read(rig.engine.submit(rig.request(max_tokens=9))))
            gate.step()
            await spin()
            second = asyncio.create_task(read(rig.engine.submit(rig.request(40, max_tokens=1))))
            await spin()
            before = rig.executor.num_going_on
            for _ in range(5):
                gate.step()
                await spin()
            kinds = [call.kind for call in rig.executor.calls[1:7]]
            assert kinds == ["decode", "prefill"] * 3
            assert (before, rig.executor.num_going_on) == (0, 1)
            gate.open()
            await asyncio.gather(first, second)

    async def test_ready_rows_decode_in_one_batch_of_their_exact_number(self) -> None:
        async with running_engine(capacity(lanes=3)) as rig:
            requests = [rig.request(5, max_tokens=n) for n in (4, 6, 8)]
            await asyncio.gather(*(read(rig.engine.submit(request)) for request in requests))
            rows = [call.num_rows for call in rig.executor.calls if call.kind == "decode"]
            assert sum(rows) == 3 + 5 + 7
            assert max(rows) == 3
            assert rows[-1] == 1

    async def test_prefill_chunks_take_turns_with_decode_and_with_each_other(self) -> None:
        async with running_engine(capacity(lanes=3)) as rig:
            gate = rig.close_gate()
            decoding = asyncio.create_task(read(rig.engine.submit(rig.request(3, max_tokens=12))))
            await spin()
            long = [rig.request(n, max_tokens=1) for n in (50, 36)]
            tasks = [asyncio.create_task(read(rig.engine.submit(request))) for request in long]
            gate.open()
            await asyncio.gather(decoding, *tasks)
            kinds = [call.kind for call in rig.executor.calls]
            assert kinds[1:14] == ["decode", "prefill"] * 6 + ["decode"]
            chunks = [call.num_tokens for call in rig.executor.calls if call.kind == "prefill"]
            assert chunks == [3, 16, 16, 16, 16, 16, 4, 2]

    async def test_admission_follows_arrival(self) -> None:
        async with running_engine(capacity(lanes=1), max_pending=8) as rig:
            order: list[str] = []

            async def watch(request: GenerationRequest) -> None:
                async with rig.engine.submit(request) as handle:
                    async for event in handle:
                        if isinstance(event, Admitted):
                            order.append(handle.request_id)

            requests = [rig.request(1 + 40 * (i % 2), max_tokens=2) for i in range(6)]
            await asyncio.gather(*map(watch, requests))
            assert order == [request.request_id for request in requests]

    async def test_large_head_waits_for_pages_and_is_overtaken_by_as_many_as_there_are_lanes(
        self,
    ) -> None:
        limits = capacity(lanes=2, max_context=256, num_pages=4)
        async with running_engine(limits) as rig:
            admitted: list[str] = []

            async def watch(request: GenerationRequest) -> None:
                async with rig.engine.submit(request) as handle:
                    async for event in handle:
                        if isinstance(event, Admitted):
                            admitted.append(handle.request_id)

            gate = rig.close_gate()
            first = rig.request(60, max_tokens=40)
            large = rig.request(200, max_tokens=50)
            small = [rig.request(1, max_tokens=2) for _ in range(5)]
            tasks = [asyncio.create_task(watch(request)) for request in (first, large, *small)]
            await spin()
            assert (rig.engine.status().running, rig.engine.status().waiting) == (2, 5)
            gate.open()
            await asyncio.gather(*tasks)
            assert admitted == ["r1", "r3", "r4", "r2", "r5", "r6", "r7"]
            assert rig.is_clean()

    async def test_youngest_row_that_is_refused_waits_while_the_others_go_on(self) -> None:
        programs: list[FaultyProgram] = []

        def wrap(program: Program) -> FaultyProgram:
            programs.append(FaultyProgram(program, lambda name: None))
            return programs[0]

        async with running_engine(capacity(lanes=3), wrap=wrap) as rig:
            starved: list[SequenceHandle] = []

            def deny(handle: SequenceHandle) -> bool:
                is_denied = handle.lane == 2 and len(starved) < 3
                starved.extend([handle] if is_denied else [])
                return is_denied

            gate = rig.close_gate()
            requests = [rig.request(5, max_tokens=8) for _ in range(3)]
            tasks = [asyncio.create_task(read(rig.engine.submit(r))) for r in requests]
            await spin()
            programs[0].denies = deny
            gate.open()
            for request, transcript in zip(requests, await asyncio.gather(*tasks), strict=True):
                assert transcript.token_ids == solo_tokens(request, 8)
            assert len(starved) == 3

    async def test_resident_that_can_never_move_stops_the_engine(self) -> None:
        def wrap(program: Program) -> FaultyProgram:
            faulty = FaultyProgram(program, lambda name: None)
            faulty.denies = lambda handle: True
            return faulty

        async with running_engine(wrap=wrap) as rig:
            transcript = await read(rig.engine.submit(rig.request()))
            assert transcript.error_code == "engine_unavailable"
            assert rig.engine.status().health is EngineHealth.UNAVAILABLE


class TestRefusals:
    async def test_long_prompt_is_refused_with_the_agreed_sentence(self) -> None:
        async with running_engine(capacity(max_context=64)) as rig:
            with pytest.raises(RequestError) as caught:
                rig.engine.submit(rig.request(65, max_tokens=1))
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.param == "prompt"
            assert caught.value.message == (
                "This model's maximum context length is 64 tokens. However, your request has 65"
                " prompt tokens (prompt is too long: 65 tokens > 64 maximum). Please reduce the"
                " length of the prompt. [context_length_exceeded]"
            )
            assert rig.is_clean()

    async def test_refused_requests_take_no_place(self) -> None:
        async with running_engine(capacity(lanes=1), max_pending=0) as rig:
            for _ in range(3):
                with pytest.raises(RequestError):
                    rig.engine.submit(rig.request(0))
            assert (await read(rig.engine.submit(rig.request()))).finished
            assert rig.engine.metrics.requests_rejected == 3

    async def test_overload_names_a_time_and_a_place_frees_with_response_and_consumer(
        self,
    ) -> None:
        async with running_engine(capacity(lanes=1), max_pending=1) as rig:
            first, second = (rig.engine.submit(rig.request()) for _ in range(2))
            with pytest.raises(Unavailable) as caught:
                rig.engine.submit(rig.request())
            assert caught.value.code == "server_overloaded"
            assert caught.value.retry_after_s is not None
            assert 1.0 <= caught.value.retry_after_s <= 60.0
            await spin(200)
            # Both answers are formed, but nobody has let go.
            assert rig.engine.status().running == 0
            with pytest.raises(Unavailable):
                rig.engine.submit(rig.request())
            await read(first)
            third = rig.engine.submit(rig.request())
            await read(second)
            await read(third)
            assert rig.is_clean()

    async def test_consumer_that_leaves_first_frees_the_place_with_the_response(self) -> None:
        async with running_engine(capacity(lanes=1), max_pending=0) as rig:
            rig.close_gate()
            async with rig.engine.submit(rig.request()):
                await spin()
            assert rig.engine.status().outstanding == 1
            with pytest.raises(Unavailable, match="most this server takes"):
                rig.engine.submit(rig.request())

    async def test_dropped_handle_cancels_and_frees_its_place(self) -> None:
        async with running_engine() as rig:
            gate = rig.close_gate()
            handle = rig.engine.submit(rig.request(max_tokens=200))
            await spin()
            del handle
            gc.collect()
            gate.open()
            await spin(200)
            assert rig.engine.metrics.requests_total[Outcome.CANCELLED] == 1
            assert rig.is_clean()

    async def test_not_started_engine_is_loading(self) -> None:
        rig = EngineRig(capacity())
        assert rig.engine.status().health is EngineHealth.LOADING
        with pytest.raises(Unavailable) as caught:
            rig.engine.submit(rig.request())
        assert caught.value.code == "model_loading"
        await rig.engine.aclose()
        assert rig.executor.is_closed

    async def test_engine_starts_once(self) -> None:
        async with running_engine() as rig:
            with pytest.raises(InvariantError):
                await rig.engine.start()


class TestQueueTimeout:
    async def test_request_that_was_admitted_in_time_is_safe_from_its_timeout(self) -> None:
        async with running_engine(capacity(lanes=1), queue_timeout_s=10.0) as rig:
            gate = rig.close_gate()
            first = rig.engine.submit(rig.request(max_tokens=1))
            second = rig.engine.submit(rig.request())
            await spin()
            gate.step()
            await spin()
            assert rig.engine.status().waiting == 0
            rig.clock.advance(11.0)
            gate.open()
            assert (await read(second)).finished
            assert (await read(first)).finished

    async def test_waiting_request_times_out_at_the_next_boundary(self) -> None:
        async with running_engine(capacity(lanes=1), queue_timeout_s=10.0) as rig:
            gate = rig.close_gate()
            running = rig.engine.submit(rig.request(max_tokens=9))
            short = rig.engine.submit(rig.request(queue_timeout_s=1.0))
            default = rig.engine.submit(rig.request())
            await spin()
            rig.clock.advance(1.5)
            gate.step()
            transcript = await read(short)
            assert transcript.error_code == "request_queue_timeout"
            assert not transcript.was_admitted
            assert rig.engine.status().waiting == 1
            rig.clock.advance(9.0)
            gate.open()
            assert (await read(default)).error_code == "request_queue_timeout"
            assert (await read(running)).finished
            assert rig.is_clean()

    async def test_free_lane_wins_over_a_timeout_of_zero(self) -> None:
        async with running_engine(capacity(lanes=1), queue_timeout_s=0.0) as rig:
            first, second = (rig.engine.submit(rig.request()) for _ in range(2))
            assert (await read(first)).finished
            assert (await read(second)).error_code == "request_queue_timeout"

    async def test_admitted_request_has_no_queue_timeout(self) -> None:
        async with running_engine(queue_timeout_s=1.0) as rig:
            gate = rig.close_gate()
            handle = rig.engine.submit(rig.request())
            await spin()
            rig.clock.advance(50.0)
            gate.open()
            assert (await read(handle)).finished


def _steps_to(phase: str) -> int:
    """Executor calls after which a request of 40 prompt tokens is in `phase`, a unit in flight."""
    return {"inner chunk": 0, "last chunk": 2, "decode": 4}[phase]


class TestCutOff:
    @pytest.mark.parametrize("phase", ["inner chunk", "last chunk", "decode"])
    async def test_cancel_of_a_resident(self, phase: str) -> None:
        async with running_engine() as rig:
            gate = rig.close_gate()
            request = rig.request(40, max_tokens=9, session=ScriptedSession(hold_back=1))
            handle = rig.engine.submit(request)
            await spin()
            gate.step(_steps_to(phase))
            await spin(100)
            handle.cancel()
            handle.cancel()
            gate.open()
            transcript = await read(handle)
            assert transcript.finished.finish.reason is FinishReason.CANCELLED
            # The token of the unit in flight is not taken, the held one is shown.
            num_tokens = transcript.finished.usage.completion_tokens
            assert transcript.token_ids == solo_tokens(request, num_tokens)
            assert num_tokens == (2 if phase == "decode" else 0)
            assert rig.is_clean()

    async def test_cancel_while_waiting_ends_without_admission(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            gate = rig.close_gate()
            running = rig.engine.submit(rig.request())
            waiting = rig.engine.submit(rig.request())
            await spin()
            waiting.cancel()
            gate.step()
            transcript = await read(waiting)
            assert transcript.finished.finish.reason is FinishReason.CANCELLED
            assert len(transcript.events) == 1
            gate.open()
            assert (await read(running)).finished
            assert rig.is_clean()

    async def test_cancel_before_the_worker_has_seen_the_request(self) -> None:
        async with running_engine() as rig:
            handle = rig.engine.submit(rig.request())
            handle.cancel()
            transcript = await read(handle)
            assert transcript.finished.finish.reason is FinishReason.CANCELLED
            assert rig.executor.calls == []

    async def test_cancel_after_the_end_changes_nothing(self) -> None:
        async with running_engine() as rig:
            async with rig.engine.submit(rig.request(max_tokens=1)) as handle:
                events = [event async for event in handle]
                handle.cancel()
                await spin()
                assert [event async for event in handle] == []
            assert len(events) == 2
            assert rig.is_clean()

    async def test_leaving_the_context_cancels(self) -> None:
        async with running_engine() as rig:
            async with rig.engine.submit(rig.request(max_tokens=200)) as handle:
                async for event in handle:
                    if isinstance(event, Progress):
                        break
            await spin()
            assert rig.engine.metrics.requests_total[Outcome.CANCELLED] == 1
            assert rig.is_clean()

    @pytest.mark.parametrize("phase", ["inner chunk", "last chunk", "decode"])
    async def test_deadline_of_a_resident(self, phase: str) -> None:
        async with running_engine() as rig:
            gate = rig.close_gate()
            request = rig.request(
                40,
                max_tokens=9,
                session=ScriptedSession(hold_back=1),
                deadline_s=rig.engine.now() + 5.0,
            )
            handle = rig.engine.submit(request)
            await spin()
            gate.step(_steps_to(phase))
            await spin(100)
            rig.clock.advance(6.0)
            gate.open()
            transcript = await read(handle)
            assert transcript.error_code == "deadline_exceeded"
            # All that was committed is shown, also what was held back.
            num_tokens = transcript.terminal.usage.completion_tokens
            assert transcript.token_ids == solo_tokens(request, num_tokens)
            assert num_tokens == {"inner chunk": 0, "last chunk": 1, "decode": 3}[phase]
            assert rig.is_clean()

    async def test_deadline_while_waiting(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            gate = rig.close_gate()
            running = rig.engine.submit(rig.request())
            waiting = rig.engine.submit(rig.request(deadline_s=rig.engine.now() + 1.0))
            await spin()
            rig.clock.advance(2.0)
            gate.step()
            assert (await read(waiting)).error_code == "deadline_exceeded"
            gate.open()
            assert (await read(running)).finished

    async def test_deadline_that_has_passed_before_submit(self) -> None:
        async with running_engine() as rig:
            handle = rig.engine.submit(rig.request(deadline_s=rig.engine.now() - 1.0))
            assert (await read(handle)).error_code == "deadline_exceeded"
            assert rig.executor.calls == []


class TestSlowConsumer:
    async def test_unread_output_is_merged_into_one_event(self) -> None:
        async with running_engine() as rig:
            request = rig.request(max_tokens=30)
            handle = rig.engine.submit(request)
            await spin(300)
            assert rig.engine.status().running == 0
            transcript = await read(handle)
            assert [type(event).__name__ for event in transcript.events] == [
                "Admitted",
                "Progress",
                "Finished",
            ]
            assert transcript.token_ids == solo_tokens(request, 30)

    async def test_consumer_that_never_reads_stops_nobody(self) -> None:
        async with running_engine() as rig:
            idle = rig.engine.submit(rig.request(max_tokens=50))
            assert (await read(rig.engine.submit(rig.request(max_tokens=50)))).finished
            await read(idle)


class TestLocalFailures:
    @pytest.mark.parametrize("method", ["preview", "commit", "reasoning_tokens"])
    async def test_session_failure_ends_only_its_request(self, method: str) -> None:
        calls: list[str] = []

        def fail(name: str) -> None:
            calls.append(name)
            if name == method and calls.count(name) == 3:
                raise ZeroDivisionError("scripted")

        async with running_engine() as rig:
            bad = rig.request(max_tokens=9, session=ScriptedSession(on_call=fail))
            good = rig.request(max_tokens=9)
            transcripts = await asyncio.gather(
                *(read(rig.engine.submit(request)) for request in (bad, good))
            )
            assert transcripts[0].error_code == "internal_error"
            assert transcripts[0].token_ids == solo_tokens(bad, 2)
            assert transcripts[1].token_ids == solo_tokens(good, 9)
            assert rig.engine.status().health is EngineHealth.READY
            assert rig.is_clean()

    async def test_flush_failure_still_ends_the_request_once(self) -> None:
        def fail(name: str) -> None:
            if name == "flush":
                raise ZeroDivisionError("scripted")

        async with running_engine() as rig:
            session = ScriptedSession(on_call=fail)
            handle = rig.engine.submit(rig.request(max_tokens=100, session=session))
            await spin()
            handle.cancel()
            assert (await read(handle)).error_code == "internal_error"
            assert rig.is_clean()

    async def test_session_that_overlooks_the_limit_ends_with_an_error(self) -> None:
        class Endless(ScriptedSession):
            def _finish_of(self, *_: object) -> None:
                return None

        async with running_engine() as rig:
            transcript = await read(rig.engine.submit(rig.request(session=Endless())))
            assert transcript.error_code == "internal_error"
            assert rig.is_clean()

    async def test_typed_session_error_reaches_the_client_as_it_is(self) -> None:
        error = RequestError("invalid_value", "scripted", "stop")

        def fail(name: str) -> None:
            raise error

        async with running_engine() as rig:
            session = ScriptedSession(on_call=fail)
            transcript = await read(rig.engine.submit(rig.request(session=session)))
            assert transcript.error_code == "invalid_value"

    @pytest.mark.parametrize("call", [0, 2, 4])
    async def test_non_finite_row_ends_alone(self, call: int) -> None:
        async with running_engine() as rig:
            rig.executor.faults[call] = Fault("non_finite")
            requests = [rig.request(5, max_tokens=6), rig.request(20, max_tokens=6)]
            transcripts = await asyncio.gather(
                *(read(rig.engine.submit(request)) for request in requests)
            )
            terminals = [transcript.terminal for transcript in transcripts]
            codes = [event.error.code for event in terminals if isinstance(event, Failed)]
            assert codes == ["non_finite_logits"]
            for request, transcript in zip(requests, transcripts, strict=True):
                num_tokens = transcript.terminal.usage.completion_tokens
                assert transcript.token_ids == solo_tokens(request, num_tokens)
            assert rig.engine.metrics.non_finite_rows_total == 1
            assert rig.is_clean()


class TestEngineFailure:
    async def test_device_error_answers_everyone_and_says_why(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            rig.executor.faults[3] = Fault("device_error")
            handles = [rig.engine.submit(rig.request(max_tokens=9)) for _ in range(3)]
            transcripts = await asyncio.gather(*map(read, handles))
            assert [t.error_code for t in transcripts] == ["engine_unavailable"] * 3
            status = rig.engine.status()
            assert status.health is EngineHealth.UNAVAILABLE
            assert status.error == "DeviceError: injected device error"
            assert status.outstanding == 0
            with pytest.raises(Unavailable) as caught:
                rig.engine.submit(rig.request())
            assert caught.value.code == "engine_unavailable"
            assert await rig.engine.drain(5.0) is False

    async def test_request_the_worker_has_not_seen_is_answered_too(self) -> None:
        async with running_engine() as rig:
            rig.executor.faults[0] = Fault("device_error")
            gate = rig.close_gate()
            running = rig.engine.submit(rig.request())
            await spin()
            unseen = rig.engine.submit(rig.request())
            gate.open()
            assert (await read(unseen)).error_code == "engine_unavailable"
            assert (await read(running)).error_code == "engine_unavailable"

    async def test_output_before_the_failure_stays_visible(self) -> None:
        async with running_engine() as rig:
            rig.executor.faults[3] = Fault("device_error")
            request = rig.request(max_tokens=9)
            transcript = await read(rig.engine.submit(request))
            assert transcript.token_ids == solo_tokens(request, 3)
            assert transcript.error_code == "engine_unavailable"

    async def test_cancelled_worker_leaves_no_client_hanging(self) -> None:
        async with running_engine() as rig:
            handle = rig.engine.submit(rig.request(max_tokens=100))
            await spin()
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "engine-worker"]
            task.cancel()
            assert (await read(handle)).error_code == "engine_unavailable"
            assert rig.engine.status().health is EngineHealth.UNAVAILABLE

    async def test_no_finished_unit_for_a_minute_is_unavailable(self) -> None:
        async with running_engine() as rig:
            rig.clock.advance(1000.0)
            assert rig.engine.status().health is EngineHealth.READY
            gate = rig.close_gate()
            handle = rig.engine.submit(rig.request())
            await spin()
            rig.clock.advance(59.0)
            assert rig.engine.status().health is EngineHealth.READY
            rig.clock.advance(2.0)
            status = rig.engine.status()
            assert status.health is EngineHealth.UNAVAILABLE
            assert status.error is not None
            assert "61 s" in status.error
            gate.step()
            await spin()
            assert rig.engine.status().health is EngineHealth.READY
            gate.open()
            assert (await read(handle)).finished


class TestShutdown:
    async def test_drain_lets_running_and_waiting_requests_finish(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            tasks = [asyncio.create_task(read(rig.engine.submit(rig.request()))) for _ in range(3)]
            await spin(2)
            assert await rig.engine.drain(5.0) is True
            assert all([(await task).finished for task in tasks])
            assert rig.engine.status().health is EngineHealth.DRAINING
            with pytest.raises(Unavailable) as caught:
                rig.engine.submit(rig.request())
            assert caught.value.code == "server_draining"

    async def test_drain_ends_what_is_left_after_its_time(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            gate = rig.close_gate()
            handles = [rig.engine.submit(rig.request(max_tokens=100)) for _ in range(2)]
            await spin()
            drain = asyncio.create_task(rig.engine.drain(0.01))
            await asyncio.sleep(0.02)
            # What runs is ended at the next boundary, and drain waits for that.
            assert not drain.done()
            gate.step()
            assert await drain is False
            transcripts = await asyncio.gather(*map(read, handles))
            assert [t.error_code for t in transcripts] == ["server_draining"] * 2
            assert rig.is_clean()

    async def test_drain_does_not_wait_for_ever_for_a_consumer_that_stays(self) -> None:
        async with running_engine() as rig:
            handle = rig.engine.submit(rig.request())
            assert await rig.engine.drain(0.05) is True
            assert (await read(handle)).finished

    async def test_closing_answers_everyone_and_closes_the_program(self) -> None:
        async with running_engine(capacity(lanes=1)) as rig:
            gate = rig.close_gate()
            handles = [rig.engine.submit(rig.request(max_tokens=100)) for _ in range(3)]
            await spin()
            closing = [asyncio.create_task(rig.engine.aclose()) for _ in range(2)]
            await spin()
            with pytest.raises(Unavailable):
                rig.engine.submit(rig.request())
            assert not rig.executor.is_closed
            gate.open()
            await asyncio.gather(*closing)
            transcripts = await asyncio.gather(*map(read, handles))
            assert [t.error_code for t in transcripts] == ["engine_unavailable"] * 3
            assert rig.executor.is_closed
            assert rig.is_clean()
            await rig.engine.aclose()

    async def test_idle_engine_closes(self) -> None:
        async with running_engine() as rig:
            await spin()
            await rig.engine.aclose()
            assert rig.engine.status().health is EngineHealth.UNAVAILABLE


class TestStatus:
    async def test_counts_follow_the_requests(self) -> None:
        async with running_engine(capacity(lanes=2), max_pending=3) as rig:
            gate = rig.close_gate()
            handles = [rig.engine.submit(rig.request(20, max_tokens=2)) for _ in range(4)]
            assert rig.engine.status().waiting == 4
            await spin()
            status = rig.engine.status()
            assert (status.waiting, status.running, status.outstanding) == (2, 2, 4)
            assert (status.max_concurrency, status.max_pending) == (2, 3)
            assert status.pages_used > 0
            assert status.pages_total == 8
            gate.open()
            await asyncio.gather(*map(read, handles))
            status = rig.engine.status()
            assert status.prompt_tokens_total == 80
            assert status.completion_tokens_total == 8
            metrics = rig.engine.metrics
            assert metrics.requests_total[Outcome.LENGTH] == 4
            assert metrics.num_admitted == metrics.num_first_tokens == 4
            assert metrics.num_prefill_units == 8
            assert metrics.decode_rows_total == 4


class TestCheckedPrompts:
    @pytest.mark.parametrize("bad_id", [-1, VOCAB_SIZE, 2**31 - 1])
    async def test_ids_outside_the_vocabulary_are_named(self, bad_id: int) -> None:
        async with running_engine() as rig:
            ids = np.array([1, bad_id, 2], dtype=np.int32)
            request = GenerationRequest(
                "r", PreparedPrompt(ids), SamplingParams(), ScriptedSession(), max_tokens=1
            )
            with pytest.raises(RequestError, match=str(bad_id)) as caught:
                rig.engine.submit(request)
            assert caught.value.code == "invalid_prompt"

    async def test_engine_reports_its_limits(self) -> None:
        rig = EngineRig(capacity(max_context=192))
        engine: Engine = rig.engine
        assert engine.max_context == 192
        assert engine.now() == rig.clock.now_s
        await engine.aclose()
        assert prompt_of(3).num_tokens == 3
