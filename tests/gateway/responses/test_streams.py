"""Streams of any answer add up to the whole one."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.generation import (
    FinishReason,
    OutputDelta,
)
from tests.helpers.answer_scripts import call, text, think
from tests.helpers.response_answers import (
    LIMIT,
    STOP,
    events_for,
    streamed,
    whole,
)
from tests.helpers.responses_rig import StreamReader, accumulate, without_ids

PIECES = st.text(st.sampled_from('ab \n"\\{}é😀'), max_size=4)


@st.composite
def turns(draw: st.DrawFn) -> list[OutputDelta]:
    """Thoughts, texts and calls in any order, in any pieces; the last call may be cut off."""
    deltas: list[OutputDelta] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["think", "text", "f", "patch", "box.g"]))):
        if kind == "think":
            deltas += [delta for piece in draw(st.lists(PIECES)) for delta in think(piece)]
        elif kind == "text":
            deltas += text(*draw(st.lists(PIECES)))
        else:
            arguments = json.dumps({draw(st.sampled_from(["input", "x"])): draw(PIECES)})
            cuts = draw(st.lists(st.integers(0, len(arguments)), max_size=3))
            borders = [0, *sorted(cuts), len(arguments)]
            pieces = [arguments[start:stop] for start, stop in pairwise(borders)]
            deltas += call(num_calls, kind, *pieces)
            num_calls += 1
    if draw(st.booleans()):
        deltas += call(num_calls, "f", '{"a"', is_whole=False)
    return deltas


@given(turns(), st.sampled_from([STOP, LIMIT]), st.booleans(), st.booleans(), st.booleans())
def test_streams_add_up_to_the_whole_response(
    deltas: list[OutputDelta], reason: FinishReason, summary: bool, sealed: bool, hidden: bool
) -> None:
    view = {"has_summary": summary, "seals_reasoning": sealed, "hides_reasoning": hidden}
    events = streamed(events_for(deltas, reason), **view)
    response = accumulate(events)
    assert without_ids(response) == without_ids(whole(events_for(deltas, reason), **view))
    said = "".join(delta.text for delta in deltas if delta.channel == "content")
    parts = [part for item in response["output"] for part in item.get("content", ())]
    texts = "".join(part["text"] for part in parts if part["type"] == "output_text")
    assert texts.split() == said.split()
    calls = [item for item in response["output"] if "call_id" in item]
    assert len(calls) == sum(delta.call.begins for delta in deltas if delta.call is not None)


def test_the_reader_of_these_tests_notices_what_is_wrong() -> None:
    events = streamed(events_for([*text("a", "b"), *call(0, "f", "{}")]))
    for index in range(len(events) - 1):
        with pytest.raises((AssertionError, KeyError)):
            accumulate([*events[:index], *events[index + 1 :]])
    reader = StreamReader()
    with pytest.raises(AssertionError):
        reader.read({**events[0], "sequence_number": 1})
