"""Answers in deltas of any channel for a FakeEngine, and a reader of streams of named events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
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
