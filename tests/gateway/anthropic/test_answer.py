"""Streams and whole messages are made of the same blocks, whatever the session sends."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import orjson
import pytest
from anthropic.types import StopReason
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.cache import CacheUse
from ninfer.contract.errors import InvariantError, Unavailable
from ninfer.contract.generation import (
    Admitted,
    CallMark,
    Finish,
    Finished,
    FinishReason,
    OutputDelta,
    Progress,
    Usage,
)
from ninfer.gateway.anthropic.answer import (
    MessageBuilder,
    MessageHead,
    MessageWriter,
    full_usage,
    stop_of,
)
from ninfer.gateway.anthropic.signature import signature_of, thought_in
from ninfer.gateway.choices import LiveEvent
from tests.helpers.answer_scripts import call, events_of, text, think
from tests.helpers.anthropic_rig import accumulate
from tests.helpers.fake_engine import AT_STOP_TOKEN, TIMINGS

USAGE = Usage(20, 9, 4, CacheUse(16))
HIDDEN = MessageHead("msg_1", "m", "req_1", hides_thinking=True)
SHOWN = MessageHead("msg_1", "m", "req_1")


def events_from(
    deltas: list[OutputDelta], finish: Finish = AT_STOP_TOKEN, *, num_last: int = 0
) -> list[LiveEvent]:
    """One delta an event; the last `num_last` come with the end."""
    cut = len(deltas) - num_last
    progress = [Progress((delta,), USAGE) for delta in deltas[:cut]]
    return [
        Admitted(Usage(20, cache=CacheUse(16))),
        *progress,
        Finished(finish, tuple(deltas[cut:]), USAGE, TIMINGS),
    ]


def streamed(events: list[LiveEvent], head: MessageHead = SHOWN) -> list[dict[str, Any]]:
    writer = MessageWriter(head)
    frames = [*writer.opening()]
    for event in events:
        frames += writer.frames(0, event)
    return events_of(b"".join([*frames, *writer.closing()]))


def whole(events: list[LiveEvent], head: MessageHead = SHOWN) -> dict[str, Any]:
    builder = MessageBuilder(head)
    for event in events:
        builder.add(0, event)
    message: dict[str, Any] = orjson.loads(orjson.dumps(builder.answer()))
    return message


def test_order_of_events() -> None:
    deltas = [*think("hm"), *text("a", "b"), *call(0, "f", '{"k":', "1}"), *call(1, "g")]
    events = streamed(events_from(deltas))
    names = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    two_deltas = [block[0], block[1], block[1], block[2]]
    assert names == [
        "message_start",
        "ping",
        *two_deltas,  # a thought and its signature
        *two_deltas,
        *two_deltas,
        *block,
        "message_delta",
        "message_stop",
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert [event["content_block"]["type"] for event in starts] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert events[0]["message"]["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 0,
    }
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 9
    message = accumulate(events)
    ids = {block["id"] for block in message["content"] if block["type"] == "tool_use"}
    assert len(ids) == 2
    assert all(name.startswith("toolu_") and len(name) == 30 for name in ids)
    assert message["content"][3]["input"] == "{}", "a call without arguments has an empty object"


def test_whole_message() -> None:
    deltas = [*think("h"), *think("m"), *text("a", "", "b"), *call(0, "f", '{"n":1e40}')]
    message = whole(events_from(deltas, num_last=2))
    thought, said, used = message.pop("content")
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert thought["signature"]
    assert said == {"type": "text", "text": "ab"}
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "f", {"n": 1e40})
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": full_usage(USAGE),
    }
    assert full_usage(USAGE)["output_tokens_details"] == {"thinking_tokens": 4}


def test_arguments_are_sent_as_the_model_wrote_them() -> None:
    builder = MessageBuilder(SHOWN)
    arguments = '{"big": 123456789012345678901234567890, "a": "\\u00e9"}'
    for event in events_from(call(0, "f", *arguments)):
        builder.add(0, event)
    assert arguments.encode() in orjson.dumps(builder.answer())


@pytest.mark.parametrize("hides", [False, True])
def test_an_empty_answer_has_no_blocks(hides: bool) -> None:
    head = HIDDEN if hides else SHOWN
    events = events_from([*think(""), *text("", "")], Finish(FinishReason.OUTPUT_LIMIT))
    assert whole(events, head)["content"] == []
    assert whole(events, head)["stop_reason"] == "max_tokens"
    assert accumulate(streamed(events, head))["content"] == []


def test_hidden_thoughts_travel_in_their_signature() -> None:
    events = events_from([*think("sec"), *think("ret"), *text("a"), *think("more")])
    message = whole(events, HIDDEN)
    first, _, second = message["content"]
    assert first["thinking"] == second["thinking"] == ""
    assert thought_in(first["signature"]) == "secret"
    assert thought_in(second["signature"]) == "more"
    stream = streamed(events, HIDDEN)
    assert not [item for item in stream if item.get("delta", {}).get("type") == "thinking_delta"]
    assert accumulate(stream)["content"] == message["content"]


def test_signatures_of_shown_thoughts_are_short_and_carry_nothing() -> None:
    signature = signature_of("x" * 1000, is_shown=True)
    assert 0 < len(signature) < 64
    assert thought_in(signature) == ""
    assert signature != signature_of("y" * 1000, is_shown=True)


@given(st.text())
def test_any_text_may_be_a_signature(foreign: str) -> None:
    assert thought_in(foreign) == ""
    assert thought_in(signature_of(foreign, is_shown=False)) == foreign
    thought_in("nr1." + foreign)


def test_a_call_that_is_cut_off_is_not_in_a_whole_answer() -> None:
    deltas = [*call(0, "f", "{}"), *call(1, "g", '{"a":', is_whole=False)]
    limit = Finish(FinishReason.OUTPUT_LIMIT)
    message = whole(events_from(deltas, limit))
    assert [block["name"] for block in message["content"]] == ["f"]
    assert message["stop_reason"] == "max_tokens"
    cut = accumulate(streamed(events_from(deltas, limit)))
    assert cut["stop_reason"] == "max_tokens"
    assert [block["input"] for block in cut["content"]] == ["{}", '{"a":']


@pytest.mark.parametrize(
    ("finish", "num_calls", "stop"),
    [
        (Finish(FinishReason.STOP_TOKEN, 2), 0, ("end_turn", None)),
        (Finish(FinishReason.STOP_TOKEN, 2), 1, ("tool_use", None)),
        (Finish(FinishReason.TOOL_CALL), 1, ("tool_use", None)),
        (Finish(FinishReason.STOP_STRING, "END"), 0, ("stop_sequence", "END")),
        (Finish(FinishReason.STOP_STRING, "END"), 2, ("tool_use", None)),
        (Finish(FinishReason.OUTPUT_LIMIT), 0, ("max_tokens", None)),
        (Finish(FinishReason.OUTPUT_LIMIT), 1, ("max_tokens", None)),
        (Finish(FinishReason.CONTEXT_CAPACITY), 0, ("model_context_window_exceeded", None)),
    ],
)
def test_stop_reasons(finish: Finish, num_calls: int, stop: tuple[str, str | None]) -> None:
    assert stop_of(finish, num_calls) == stop
    assert stop[0] in get_args(StopReason)


def test_a_cancelled_request_has_no_answer() -> None:
    with pytest.raises(InvariantError):
        stop_of(Finish(FinishReason.CANCELLED), 0)
    with pytest.raises(InvariantError):
        MessageBuilder(SHOWN).answer()


def test_a_call_delta_must_name_its_call() -> None:
    with pytest.raises(InvariantError):
        whole(events_from([OutputDelta("call", "{}")]))


def test_failure_is_an_event_of_its_family() -> None:
    [event] = events_of(MessageWriter(SHOWN).failure(Unavailable("server_draining", "bye")))
    assert event == {
        "type": "error",
        "error": {"type": "api_error", "message": "bye"},
        "request_id": "req_1",
    }
    assert events_of(MessageWriter(SHOWN).keep_alive()) == [{"type": "ping"}]


ARGUMENTS = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=8) | st.none(), max_size=3
)


@st.composite
def answers(draw: st.DrawFn) -> list[OutputDelta]:
    """Channels in any order and texts in any pieces; calls are complete."""
    deltas: list[OutputDelta] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=8)):
        if kind != "call":
            pieces = draw(st.lists(st.text(max_size=6), max_size=4))
            deltas += think(pieces[0]) if kind == "reasoning" and pieces else text(*pieces)
            continue
        arguments = draw(ARGUMENTS)
        body = json.dumps(arguments, ensure_ascii=False) if arguments else ""
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=4)))
        borders = [0, *cuts, len(body)]
        pieces = [body[a:b] for a, b in itertools.pairwise(borders)]
        deltas += call(num_calls, draw(st.sampled_from(["f", "g"])), *pieces)
        num_calls += 1
    return deltas


@given(answers(), st.integers(0, 5), st.booleans())
def test_streams_add_up_to_the_whole_message(
    deltas: list[OutputDelta], num_last: int, hides: bool
) -> None:
    head = HIDDEN if hides else SHOWN
    events = events_from(deltas, num_last=min(num_last, len(deltas)))
    message, added = whole(events, head), accumulate(streamed(events, head))
    for one, other in zip(message["content"], added["content"], strict=True):
        if one["type"] == "tool_use":
            other["input"] = json.loads(other["input"])
            one["id"] = other["id"] = "toolu_"
        assert one == other
    assert message == added
    said = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    assert said == "".join(delta.text for delta in deltas if delta.channel == "content")


@given(answers(), st.data())
def test_wherever_a_stream_is_cut_its_blocks_are_in_order(
    deltas: list[OutputDelta], data: st.DataObject
) -> None:
    kept = deltas[: data.draw(st.integers(0, len(deltas)))]
    events = events_from(kept, Finish(FinishReason.OUTPUT_LIMIT))
    message, added = whole(events), accumulate(streamed(events))
    num_whole = len(message["content"])
    kinds = [block["type"] for block in added["content"]]
    assert [block["type"] for block in message["content"]] == kinds[:num_whole]
    assert len(kinds) - num_whole in (0, 1)


def test_calls_whose_first_delta_also_ends_them() -> None:
    deltas = [
        OutputDelta("call", '{"a":1}', call=CallMark(0, "f", begins=True, ends=True)),
        OutputDelta("call", "{}", call=CallMark(1, "f", begins=True, ends=True)),
    ]
    added = accumulate(streamed(events_from(deltas)))
    assert [block["input"] for block in added["content"]] == ['{"a":1}', "{}"]
