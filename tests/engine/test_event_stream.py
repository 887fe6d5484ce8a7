from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.arrays import Float64Array, IntArray
from ninfer.contract.errors import InvariantError, Unavailable
from ninfer.contract.generation import (
    Admitted,
    Channel,
    Event,
    Failed,
    Finish,
    Finished,
    FinishReason,
    OutputDelta,
    Progress,
    Timings,
    Usage,
)
from ninfer.contract.sampling import GeneratedToken, PromptScores
from ninfer.engine.event_stream import EventStream, merge_deltas


def progress(num_tokens: int, *deltas: tuple[Channel, str]) -> Progress:
    return Progress(
        tuple(OutputDelta(channel, text, (GeneratedToken(len(text)),)) for channel, text in deltas),
        Usage(3, num_tokens),
    )


FINISHED = Finished(Finish(FinishReason.OUTPUT_LIMIT), (), Usage(3, 9), Timings(0, 0, 0, 0))
FAILED = Failed(Unavailable("deadline_exceeded", "late"), Usage(3))


async def drain(stream: EventStream) -> list[Event]:
    events = []
    while (event := await stream.next()) is not None:
        events.append(event)
    return events


async def test_unread_output_is_merged_in_order() -> None:
    stream = EventStream()
    pushed: list[Event] = [
        Admitted(Usage(3)),
        progress(1, ("reasoning", "a")),
        progress(2, ("reasoning", "bc"), ("content", "d")),
        progress(3, ("content", "efg")),
        FINISHED,
    ]
    for event in pushed:
        stream.push(event)
    admitted, merged, terminal = await drain(stream)
    assert admitted is pushed[0]
    assert merged == Progress(
        (
            OutputDelta("reasoning", "abc", (GeneratedToken(1), GeneratedToken(2))),
            OutputDelta("content", "defg", (GeneratedToken(1), GeneratedToken(3))),
        ),
        Usage(3, 3),
    )
    assert terminal is FINISHED


async def test_unread_scores_of_the_prompt_keep_their_order() -> None:
    stream = EventStream()
    parts = [PromptScores(1 + i, *prompt_scores(1)) for i in range(3)]
    for part in parts[:2]:
        stream.push(Progress((), Usage(3), (part,)))
    stream.push(Progress((OutputDelta("content", "x"),), Usage(3, 1), (parts[2],)))
    stream.push(FINISHED)
    merged, _ = await drain(stream)
    assert isinstance(merged, Progress)
    assert [part.first for part in merged.prompt_scores] == [1, 2, 3]
    assert [delta.text for delta in merged.deltas] == ["x"]


def prompt_scores(count: int) -> tuple[Float64Array, IntArray, Float64Array]:
    return np.zeros(count), np.zeros((count, 0), np.int32), np.zeros((count, 0))


async def test_waiting_reader_is_woken_by_each_event() -> None:
    stream = EventStream()
    reader = asyncio.create_task(drain(stream))
    for count in range(3):
        await asyncio.sleep(0)
        stream.push(progress(count, ("content", "x")))
        await asyncio.sleep(0)
    stream.push(FAILED)
    events = await reader
    assert [event.usage.completion_tokens for event in events[:-1]] == [0, 1, 2]
    assert events[-1] is FAILED


@pytest.mark.parametrize("after", [Admitted(Usage(3)), progress(1), FINISHED, FAILED])
def test_nothing_follows_the_terminal_event(after: Event) -> None:
    stream = EventStream()
    stream.push(FINISHED)
    with pytest.raises(InvariantError):
        stream.push(after)


async def test_closed_stream_forgets_and_drops() -> None:
    stream = EventStream()
    stream.push(progress(1, ("content", "x")))
    reader = asyncio.create_task(EventStream.next(stream))
    assert await reader is not None
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.close()
    assert await waiting is None
    stream.push(progress(2, ("content", "y")))
    stream.push(FINISHED)
    assert await stream.next() is None
    with pytest.raises(InvariantError):
        stream.push(FAILED)


_channels: st.SearchStrategy[Channel] = st.sampled_from(["reasoning", "content"])
_deltas = st.lists(
    st.builds(
        OutputDelta,
        _channels,
        st.text("ab", max_size=3),
        st.lists(st.builds(GeneratedToken, st.integers(0, 9)), max_size=2).map(tuple),
    ),
    max_size=12,
)


@given(deltas=_deltas)
def test_merging_keeps_text_and_tokens_and_leaves_no_equal_neighbours(
    deltas: list[OutputDelta],
) -> None:
    merged = merge_deltas(deltas)
    channels = [delta.channel for delta in merged]
    assert all(left != right for left, right in itertools.pairwise(channels))
    for channel in ("reasoning", "content"):
        before = [delta for delta in deltas if delta.channel == channel]
        after = [delta for delta in merged if delta.channel == channel]
        assert "".join(d.text for d in after) == "".join(d.text for d in before)
        assert [t for d in after for t in d.tokens] == [t for d in before for t in d.tokens]
