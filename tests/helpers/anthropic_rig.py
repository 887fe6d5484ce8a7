"""Answers in deltas of any channel for a FakeEngine, and readers of what /v1/messages sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from ninfer.contract.cache import CacheUse
from ninfer.contract.generation import (
    Admitted,
    CallMark,
    Event,
    Finish,
    Finished,
    GenerationRequest,
    OutputDelta,
    Progress,
    Usage,
)
from tests.helpers.fake_engine import AT_STOP_TOKEN, TIMINGS, Script
from tests.helpers.gateway_rig import Answer


def think(text: str) -> list[OutputDelta]:
    return [OutputDelta("reasoning", text)]


def text(*pieces: str) -> list[OutputDelta]:
    return [OutputDelta("content", piece) for piece in pieces]


def call(index: int, name: str, *pieces: str, is_whole: bool = True) -> list[OutputDelta]:
    """The first delta names the call; the last one ends it, if `is_whole`."""
    texts = ["", *pieces]
    last = len(texts) - 1
    return [
        OutputDelta(
            "call",
            piece,
            call=CallMark(index, name, begins=place == 0, ends=is_whole and place == last),
        )
        for place, piece in enumerate(texts)
    ]


def plays(
    *groups: Sequence[OutputDelta], finish: Finish = AT_STOP_TOKEN, cached_tokens: int = 0
) -> Script:
    """One delta at a time, then an end without any; every delta is one token, thoughts included."""

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        num_prompt, cache = request.prompt.num_tokens, CacheUse(cached_tokens)
        yield Admitted(Usage(num_prompt, cache=cache))
        count = thought = 0
        for delta in (delta for group in groups for delta in group):
            count += 1
            thought += delta.channel == "reasoning"
            yield Progress((delta,), Usage(num_prompt, count, thought, cache))
        yield Finished(finish, (), Usage(num_prompt, count + 1, thought, cache), TIMINGS)

    return script


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Payloads of a stream; each frame has its type as its event's name too."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == "", "a stream ends with a blank line"
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        events.append(payload)
    return events


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object of an answer that has the family's whole shape."""
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


def accumulate(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, and every rule of its order on the way."""
    events = [event for event in events if event["type"] != "ping"]
    first, *middle, end, stop = events
    assert (first["type"], end["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    blocks: list[dict[str, Any]] = message["content"]
    is_open = False
    for event in middle:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "pieces": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_delta":
            _add_delta(blocks[-1], event["delta"])
        else:
            assert kind == "content_block_stop"
            is_open = False
    assert not is_open
    for block in blocks:
        pieces = block.pop("pieces")
        if block["type"] == "tool_use":
            block["input"] = pieces
    message |= end["delta"]
    message["usage"] |= end["usage"]
    return message


def _add_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"], block["type"]:
        case "text_delta", "text":
            assert delta["text"]
            block["text"] += delta["text"]
        case "thinking_delta", "thinking":
            assert delta["thinking"]
            assert block["signature"] == "", "the signature comes last"
            block["thinking"] += delta["thinking"]
        case "signature_delta", "thinking":
            assert block["signature"] == ""
            assert delta["signature"]
            block["signature"] = delta["signature"]
        case "input_json_delta", "tool_use":
            assert delta["partial_json"]
            block["pieces"] += delta["partial_json"]
        case other:
            raise AssertionError(f"a delta in a block of another kind: {other}")
