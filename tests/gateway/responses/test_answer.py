"""Answers whole and in pieces: one set of items, told in the order that clients rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ninfer.contract.errors import (
    DeviceError,
    InvariantError,
    NInferError,
    NonFiniteLogits,
    RequestError,
    Unavailable,
)
from ninfer.contract.generation import (
    CallMark,
    FinishReason,
    OutputDelta,
)
from ninfer.contract.sampling import GeneratedToken, TokenLogprobs
from ninfer.gateway.responses.answer import (
    ResponseWriter,
    failure_object,
)
from ninfer.gateway.responses.output_recorder import OutputRecorder, OutputView
from ninfer.gateway.responses.sealed_text import unseal
from tests.helpers.answer_scripts import call, events_of, text, think
from tests.helpers.response_answers import (
    LIMIT,
    STOP,
    TOOLS,
    events_for,
    make_answer,
    streamed,
    token_bytes,
    whole,
)
from tests.helpers.responses_rig import accumulate, without_ids


def output_of(deltas: Sequence[OutputDelta], reason: FinishReason = STOP, **view: bool) -> Any:
    response = accumulate(streamed(events_for(deltas, reason), **view))
    assert without_ids(response) == without_ids(whole(events_for(deltas, reason), **view))
    return without_ids(response["output"])


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def message(said: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": said, "annotations": []}
    return {
        "id": "msg",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def thought(said: str, status: str = "completed", **more: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": said}]
    item = {"id": "rs", "type": "reasoning", "summary": [], "content": content, "status": status}
    return {**item, **more}


def function(arguments: str, status: str = "completed", name: str = "f") -> dict[str, Any]:
    return {
        "id": "fc",
        "type": "function_call",
        "call_id": "call",
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def test_order_of_a_whole_turn() -> None:
    deltas = [*think("hm"), *text("Hel", "lo"), *call(0, "f", '{"a"', ":1}")]
    assert names(streamed(events_for(deltas))) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert output_of(deltas) == [thought("hm"), message("Hello"), function('{"a":1}')]


def test_summary_is_told_beside_the_thought_when_asked_for() -> None:
    deltas = [*think("let "), *think("me")]
    events = streamed(events_for(deltas), has_summary=True)
    assert names(events)[2:] == [
        "output_item.added",
        "content_part.added",
        "reasoning_summary_part.added",
        "reasoning_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "completed",
    ]
    summary = [{"type": "summary_text", "text": "let me"}]
    assert output_of(deltas, has_summary=True) == [thought("let me", summary=summary)]


def test_custom_call_is_its_input() -> None:
    deltas = call(0, "patch", '{"inp', 'ut": "a\\n', 'b"}')
    events = streamed(events_for(deltas))
    assert names(events)[2:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    expected = {
        "id": "ctc",
        "type": "custom_tool_call",
        "call_id": "call",
        "name": "patch",
        "input": "a\nb",
        "status": "completed",
    }
    assert output_of(deltas) == [expected]


def test_custom_call_in_another_layout_has_its_input_at_the_end() -> None:
    (item,) = output_of(call(0, "patch", '{"x":1,', '"input":"a"}'))
    assert item["input"] == "a"


def test_call_of_a_namespace_carries_both_names() -> None:
    (item,) = output_of(call(0, "box.g", "{}"))
    assert (item["namespace"], item["name"]) == ("box", "g")


def test_ids_differ_between_items_and_calls() -> None:
    deltas = [*call(0, "f", "{}"), *call(1, "f", "{}"), *text("x")]
    first, second, third = whole(events_for(deltas))["output"]
    ids = [first["id"], first["call_id"], second["id"], second["call_id"], third["id"]]
    assert len(set(ids)) == 5


def test_call_in_one_delta() -> None:
    delta = OutputDelta("call", "{}", call=CallMark(0, "f", begins=True, ends=True))
    assert output_of([delta]) == [function("{}")]


@pytest.mark.parametrize(
    ("deltas", "output"),
    [
        ([], []),
        (text("\n", "\n"), []),
        ([*think("a"), *text("\n\n"), *call(0, "f", "{}")], [thought("a"), function("{}")]),
        (
            [*call(0, "f", "{}"), *text("\n"), *call(1, "f", "{}")],
            [function("{}"), function("{}")],
        ),
        (text("\n", " a", "\n"), [message("\n a\n")]),
        ([*think("\n"), *text("b")], [message("b")]),
        ([*think("\n"), *text("\n"), *think("c")], [thought("c")]),
    ],
)
def test_blanks_between_items_are_no_items(
    deltas: list[OutputDelta], output: list[dict[str, Any]]
) -> None:
    assert output_of(deltas) == output


def test_hidden_reasoning_is_no_item() -> None:
    assert output_of([*think("a"), *text("b")], hides_reasoning=True) == [message("b")]


def test_sealed_reasoning_comes_with_the_end_of_the_item() -> None:
    events = streamed(events_for([*think("a "), *think("b")]), seals_reasoning=True)
    added, done = (event["item"] for event in events if "output_item" in event["type"])
    assert "encrypted_content" not in added
    assert unseal(done["encrypted_content"]) == "a b"
    assert accumulate(events)["output"] == [done]


@pytest.mark.parametrize("reason", [LIMIT, FinishReason.CONTEXT_CAPACITY])
def test_a_cut_answer_is_incomplete(reason: FinishReason) -> None:
    response = accumulate(streamed(events_for([*think("a"), *text("b")], reason)))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert without_ids(response["output"]) == [thought("a"), message("b", "incomplete")]
    assert output_of(think("a"), reason) == [thought("a", "incomplete")]
    assert output_of([], reason) == []


@pytest.mark.parametrize("name", ["f", "patch"])
@pytest.mark.parametrize("reason", [LIMIT, STOP])
def test_a_cut_call_is_never_done(name: str, reason: FinishReason) -> None:
    deltas = [*call(0, "f", "{}"), *call(1, name, '{"input": "a', is_whole=False)]
    events = streamed(events_for(deltas, reason))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert without_ids(done) == [function("{}")]
    cut = accumulate(events)["output"][1]
    assert cut["status"] == "incomplete"


@pytest.mark.parametrize("reason", [STOP, FinishReason.STOP_STRING, FinishReason.TOOL_CALL, LIMIT])
def test_every_end_has_usage_with_all_details(reason: FinishReason) -> None:
    response = accumulate(streamed(events_for(text("a", "b"), reason)))
    assert response["status"] == ("incomplete" if reason is LIMIT else "completed")
    assert isinstance(response["completed_at"], int) is (reason is not LIMIT)
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_logprobs_travel_with_their_text() -> None:
    def token(byte: int) -> tuple[GeneratedToken, ...]:
        return (GeneratedToken(byte, TokenLogprobs(-0.5, ((65, -0.1),))),)

    deltas = [
        OutputDelta("content", "", token(10)),
        OutputDelta("content", "a", token(97)),
        OutputDelta("content", "", token(98)),
        OutputDelta("content", "bc", token(99)),
        OutputDelta("content", "", token(100)),
    ]
    events = streamed(events_for(deltas), has_logprobs=True)
    told = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert [[entry["token"] for entry in entries] for entries in told] == [["\n", "a"], ["b", "c"]]
    done = next(event for event in events if event["type"].endswith("text.done"))
    assert [entry["token"] for entry in done["logprobs"]] == ["\n", "a", "b", "c", "d"]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == done["logprobs"]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "A", "logprob": -0.1, "bytes": [65]}]


def test_silence_is_broken_by_a_numbered_event() -> None:
    writer = ResponseWriter(make_answer())
    frames = [*writer.opening(), writer.keep_alive(), writer.keep_alive()]
    for event in events_for(text("a")):
        frames += writer.frames(0, event)
        frames.append(writer.keep_alive())
    events = events_of(b"".join([*frames, *writer.closing()]))
    assert names(events)[:4] == ["created", "in_progress", "in_progress", "in_progress"]
    assert without_ids(accumulate(events)["output"]) == [message("a")]


def test_failure_is_the_last_event_and_shows_what_there_is() -> None:
    kept: list[dict[str, Any]] = []
    writer = ResponseWriter(make_answer(kept))
    frames = [*writer.opening()]
    for event in events_for([*text("a"), *call(0, "f", "{", is_whole=False)])[:-1]:
        frames += writer.frames(0, event)
    frames.append(writer.failure(NonFiniteLogits("x")))
    response = accumulate(events_of(b"".join(frames)))
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert response["usage"]["output_tokens"] == 3
    assert without_ids(response["output"]) == [message("a"), function("{", "incomplete")]
    assert kept == [response]


@pytest.mark.parametrize(
    ("deltas", "closing"),
    [
        (text("a"), ["output_text.done", "content_part.done", "output_item.done", "failed"]),
        (think("a"), ["reasoning_text.done", "content_part.done", "output_item.done", "failed"]),
        (call(0, "f", "{", is_whole=False), ["failed"]),
    ],
)
def test_failure_closes_what_is_open_but_no_call(
    deltas: list[OutputDelta], closing: list[str]
) -> None:
    writer = ResponseWriter(make_answer([]))
    frames = [*writer.opening()]
    for event in events_for(deltas)[:-1]:
        frames += writer.frames(0, event)
    last = events_of(b"".join([writer.failure(RequestError("request_aborted", "ended"))]))
    assert names(last) == closing
    assert [item["status"] for item in last[-1]["response"]["output"]] == ["incomplete"]
    events = events_of(b"".join(frames)) + last
    assert [event["sequence_number"] for event in events] == [*range(len(events))]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("context_length_exceeded", "long"), "context_length_exceeded"),
        (RequestError("invalid_value", "bad"), "invalid_prompt"),
        (RequestError("request_aborted", "ended"), "server_error"),
        (Unavailable("server_overloaded", "full", 7.2), "rate_limit_exceeded"),
        (Unavailable("server_draining", "bye"), "server_error"),
        (Unavailable("deadline_exceeded", "late"), "server_error"),
        (DeviceError("/data/x"), "server_error"),
        (ValueError("/data/x"), "server_error"),
        (NInferError("/data/x"), "server_error"),
    ],
)
def test_failures_have_codes_of_the_api(error: Exception, code: str) -> None:
    failure = failure_object(error)
    assert failure["code"] == code
    assert failure["message"]
    assert "/data" not in failure["message"]
    assert ("try again in 7s" in failure["message"]) is (code == "rate_limit_exceeded")


def test_calls_that_make_no_sense_are_our_fault() -> None:
    recorder = OutputRecorder(OutputView(), TOOLS, token_bytes)
    with pytest.raises(InvariantError):
        recorder.add([OutputDelta("call", "x")])
    with pytest.raises(InvariantError):
        recorder.add([OutputDelta("call", "x", call=CallMark(0, "f"))])


def test_a_whole_response_is_kept_once_as_it_was_sent() -> None:
    kept: list[dict[str, Any]] = []
    writer = ResponseWriter(make_answer(kept))
    frames = [*writer.opening()]
    for event in events_for(text("a")):
        frames += writer.frames(0, event)
    assert kept == []
    frames += writer.closing()
    assert kept == [accumulate(events_of(b"".join(frames)))]
