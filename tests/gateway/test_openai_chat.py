"""Chat completions end to end over a real socket, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ninfer.contract.drafting import DraftCounts, DraftSource
from ninfer.contract.errors import NonFiniteLogits, Unavailable
from ninfer.contract.generation import (
    Admitted,
    Event,
    Finish,
    Finished,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    Progress,
)
from ninfer.gateway.answer_parts import timings_object
from tests.helpers.fake_engine import (
    CARD,
    TIMINGS,
    bad_prompt,
    delta_of,
    fail,
    say,
    tokens_of,
    usage_of,
)
from tests.helpers.gateway_rig import Rig


def deltas_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice["delta"] for event in events[:-1] for choice in event["choices"]]


async def test_whole_answer_has_every_field(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo", reasoning=("think",))
    answer = await rig.chat(model="gpt-5")
    assert answer.status == 200
    assert "content-length" in answer.headers
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "gpt-5"
    assert body["system_fingerprint"] == CARD.fingerprint
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello",
                "refusal": None,
                "reasoning_content": "think",
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 2,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 11,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }
    assert body["timings"]["queue_s"] == TIMINGS.queue_s
    assert body["timings"]["tokens_per_second"] == pytest.approx(10 / TIMINGS.decode_s)


async def test_timings_tell_of_drafts(rig: Rig) -> None:
    assert "drafts" not in (await rig.chat()).json()["timings"]
    drafted = replace(TIMINGS, drafts=DraftCounts.of_round(DraftSource.NGRAM, 4, 2))
    more = replace(TIMINGS, drafts=DraftCounts.of_round(DraftSource.MODEL, 3, 3))
    timings = timings_object([TIMINGS, drafted, more, drafted], 30)
    assert json.loads(json.dumps(timings["drafts"])) == {
        "rounds": 3,
        "drafted": 11,
        "accepted": 7,
        "accepted_at": [3, 3, 1],
        "ngram": {"drafted": 8, "accepted": 4},
        "model": {"drafted": 3, "accepted": 3},
    }


async def test_missing_model_is_answered_with_the_served_name(rig: Rig) -> None:
    assert (await rig.chat()).json()["model"] == CARD.name


async def test_empty_answer_is_empty_text_and_no_reasoning(rig: Rig) -> None:
    rig.engine.script = say(finish=Finish(FinishReason.OUTPUT_LIMIT))
    message = (await rig.chat(max_tokens=0)).json()["choices"][0]
    assert message["finish_reason"] == "length"
    assert message["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert message["stop_reason"] is None
    assert rig.frontend.params[0].max_tokens == 0


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (FinishReason.STOP_TOKEN, "stop"),
        (FinishReason.STOP_STRING, "stop"),
        (FinishReason.OUTPUT_LIMIT, "length"),
        (FinishReason.CONTEXT_CAPACITY, "length"),
    ],
)
async def test_finish_reasons(rig: Rig, reason: FinishReason, expected: str) -> None:
    matched = "END" if reason is FinishReason.STOP_STRING else None
    rig.engine.script = say("x", finish=Finish(reason, matched))
    whole = (await rig.chat()).json()["choices"][0]
    streamed = (await rig.chat(stream=True)).events[-2]["choices"][0]
    for choice in (whole, streamed):
        assert choice["finish_reason"] == expected
        assert choice["stop_reason"] == matched


async def test_stream_order_and_shape(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo", reasoning=("let ", "me"))
    answer = await rig.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers
    events = answer.events
    assert events[-1] == "[DONE]"
    assert deltas_of(events) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "let "},
        {"reasoning_content": "me"},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    heads = {(e["id"], e["created"], e["model"], e["object"]) for e in events[:-1]}
    assert len(heads) == 1
    assert heads.pop()[3] == "chat.completion.chunk"
    assert [event["usage"] for event in events[:-2]] == [None] * 6
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 12
    assert "timings" in events[-2]
    finish_reasons = [e["choices"][0]["finish_reason"] for e in events[:-2]]
    assert finish_reasons == [None] * 5 + ["stop"]


async def test_stream_without_usage_has_none_and_timings_come_with_the_finish(rig: Rig) -> None:
    events = (await rig.chat(stream=True)).events
    assert all("usage" not in event for event in events[:-1])
    assert events[-2]["timings"]["total_s"] == TIMINGS.total_s


async def test_continuous_usage_counts_up(rig: Rig) -> None:
    rig.engine.script = say("a", "b", "c")
    events = (await rig.chat(stream=True, stream_options={"continuous_usage_stats": True})).events
    assert [e["usage"]["completion_tokens"] for e in events[:-1]] == [0, 1, 2, 4, 4]


async def test_stream_options_without_stream_are_ignored(rig: Rig) -> None:
    answer = await rig.chat(stream=None, stream_options={"include_usage": True})
    assert answer.json()["object"] == "chat.completion"


async def test_every_choice_opens_in_order_and_gets_its_own_seed(rig: Rig) -> None:
    rig.engine.script = say("Hel", "lo")
    answer = await rig.chat(stream=True, n=4, seed=7, stream_options={"include_usage": True})
    events = answer.events
    assert [e["choices"][0]["index"] for e in events[:4]] == [0, 1, 2, 3]
    assert all(e["choices"][0]["delta"]["role"] == "assistant" for e in events[:4])
    texts = [""] * 4
    for event in events[4:-2]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["Hello"] * 4
    assert events[-2]["usage"]["prompt_tokens"] == 3
    assert events[-2]["usage"]["completion_tokens"] == 4 * 6
    seeds = [handle.request.sampling.seed for handle in rig.engine.handles]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert len({handle.request_id for handle in rig.engine.handles}) == 4


async def test_choices_without_a_seed_differ_and_repeat_with_the_drawn_one(rig: Rig) -> None:
    assert len((await rig.chat(n=3)).json()["choices"]) == 3
    drawn = [handle.request.sampling.seed for handle in rig.engine.handles]
    assert len(set(drawn)) == 3
    rig.engine.handles.clear()
    await rig.chat(n=3, seed=drawn[0])
    assert [handle.request.sampling.seed for handle in rig.engine.handles] == drawn


async def test_one_failed_choice_fails_the_request_and_releases_the_others(rig: Rig) -> None:
    def script(request: GenerationRequest) -> AsyncIterator[Event]:
        if request.request_id.endswith("-2"):
            return fail(NonFiniteLogits("NaN"))(request)
        return say("a", "b")(request)

    rig.engine.script = script
    answer = await rig.chat(n=3)
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert answer.headers["x-should-retry"] == "false"
    assert rig.engine.num_open == 0


async def test_a_refused_choice_leaves_none_of_its_siblings_behind(rig: Rig) -> None:
    def script(request: GenerationRequest) -> AsyncIterator[Event]:
        if request.request_id.endswith("-2"):
            raise Unavailable("server_overloaded", "full", 2.5)
        return say("x")(request)

    rig.engine.script = script
    answer = await rig.chat(n=3)
    assert answer.status == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-should-retry"] == "true"
    assert len(rig.engine.handles) == 2
    assert rig.engine.num_open == 0


async def test_hidden_reasoning_is_counted_and_not_sent(rig: Rig) -> None:
    rig.engine.script = say("yes", reasoning=("secret",))
    whole = await rig.chat(include_reasoning=False)
    streamed = await rig.chat(stream=True, reasoning={"exclude": True})
    assert b"secret" not in whole.body + streamed.body
    usage = whole.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}


async def test_logprobs_of_content_rebuild_the_text(rig: Rig) -> None:
    rig.engine.script = say("né", "e", reasoning=("hm",))
    logprobs = (await rig.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    entries = logprobs["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "née"
    assert entries[0] == {
        "token": "n",
        "logprob": -0.5,
        "bytes": [110],
        "top_logprobs": [
            {"token": "A", "logprob": -0.1, "bytes": [65]},
            {"token": "B", "logprob": -9999.0, "bytes": [66]},
        ],
    }
    assert entries[1]["token"] == "\ufffd"


async def test_logprobs_without_alternatives_have_empty_lists(rig: Rig) -> None:
    entries = (await rig.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[]] * 5


async def test_streamed_logprobs_travel_with_their_text(rig: Rig) -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        yield Admitted(usage_of(request))
        yield Progress((OutputDelta("content", "", tokens_of("a", request)),), usage_of(request))
        yield Progress((delta_of("b", request),), usage_of(request))
        last = OutputDelta("content", "", tokens_of("c", request))
        yield Finished(Finish(FinishReason.STOP_TOKEN), (last,), usage_of(request), TIMINGS)

    rig.engine.script = script
    events = (await rig.chat(stream=True, logprobs=True)).events
    carried = [
        [entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]]
        for event in events[:-1]
        for choice in event["choices"]
    ]
    assert carried == [[], ["a", "b"], ["c"]]
    assert deltas_of(events) == [{"role": "assistant", "content": ""}, {"content": "b"}, {}]


@pytest.mark.parametrize("stream", [False, True])
async def test_template_refusal_is_a_400_before_any_event(rig: Rig, stream: bool) -> None:
    rig.frontend.error = bad_prompt()
    answer = await rig.chat(stream=stream)
    assert answer.status == 400
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.error["code"] == "invalid_template"
    assert answer.error["param"] == "messages"
    assert rig.engine.handles == []


async def test_more_messages_than_tokens_fit_are_refused_before_they_are_read(rig: Rig) -> None:
    answer = await rig.chat(messages=[{"role": "nobody"}] * 65)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert answer.error["code"] == "context_length_exceeded"
    assert "at least 65 prompt tokens" in answer.error["message"]
    assert (await rig.chat(messages=[{"role": "nobody"}] * 64)).error["code"] == "invalid_value"


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_is_recognised_by_every_client(rig: Rig, stream: bool) -> None:
    messages = [{"role": "user", "content": "x" * 100}]
    answer = await rig.chat(stream=stream, messages=messages)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == "messages"
    message = answer.error["message"]
    assert "This model's maximum context length is 64 tokens" in message
    assert "prompt is too long: 101 tokens > 64 maximum" in message
    assert "[context_length_exceeded]" in message
    assert "xx" not in message


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_in_the_queue_is_a_status(rig: Rig, stream: bool) -> None:
    error = Unavailable("request_queue_timeout", "Waited too long.", 400.0)
    rig.engine.script = fail(error, is_admitted=False)
    answer = await rig.chat(stream=stream)
    assert answer.status == 503
    assert answer.error["type"] == "server_error"
    assert answer.headers["retry-after"] == "60"


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_is_a_408_that_is_not_retried(rig: Rig, stream: bool) -> None:
    error = Unavailable("deadline_exceeded", "The deadline has passed.")
    rig.engine.script = fail(error, is_admitted=False)
    answer = await rig.chat(stream=stream, timeout_s=0.5)
    assert answer.status == 408
    assert answer.error["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    assert rig.engine.handles[0].request.deadline_s is not None


async def test_failure_in_a_stream_is_its_last_event_without_done(rig: Rig) -> None:
    rig.engine.script = fail(NonFiniteLogits("row 3 of /models/x was NaN"), "Hel", "lo")
    answer = await rig.chat(stream=True)
    assert answer.status == 200
    assert "[DONE]" not in answer.events
    assert [e["choices"][0]["delta"].get("content") for e in answer.events[:-1]] == [
        "",
        "Hel",
        "lo",
    ]
    error = answer.events[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "internal_error"
    assert b"/models/x" not in answer.body
    assert (await rig.chat()).status == 500


async def test_a_bug_in_a_stream_is_an_error_event(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the prompt text"

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        yield Admitted(usage_of(request))
        raise KeyError(secret)

    rig.engine.script = script
    answer = await rig.chat(stream=True, messages=[{"role": "user", "content": secret}])
    assert answer.events[-1]["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] in caplog.text
    assert secret not in caplog.text
    assert secret.encode() not in answer.body


async def test_a_request_cancelled_by_nobody_is_an_error_and_never_an_abort(rig: Rig) -> None:
    rig.engine.script = say("x", finish=Finish(FinishReason.CANCELLED))
    assert (await rig.chat()).status == 500
    assert (await rig.chat(stream=True)).events[-1]["error"]["code"] == "internal_error"


async def test_prompt_is_what_the_frontend_is_given(rig: Rig) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "prefix": True},
    ]
    kwargs = {"preserve_thinking": True}
    await rig.chat(messages=messages, chat_template_kwargs=kwargs, reasoning_effort="none")
    chat = rig.frontend.chats[0]
    assert [message.role for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.continue_final_message
    assert not chat.add_generation_prompt
    assert chat.template_kwargs == {"preserve_thinking": True, "enable_thinking": False}
