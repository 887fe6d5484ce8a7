"""What answers of all protocols have in common: how one is collected or streamed, and its endings.

    Choices -> AnswerBuilder.add* -> answer      one JSON object
    Choices -> FrameWriter.opening, frames*, closing   an event stream, begun at admission

A protocol brings a builder and a writer; nothing else of it is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from aiohttp import web

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import Finish, Finished, Progress, Timings, Usage
from ninfer.gateway.choices import Choices, LiveEvent
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.off_loop import off_the_loop
from ninfer.gateway.sse import StreamStyle

T = TypeVar("T")
_MANY_SCORES: Final = 1024
"""Writing so many down takes some 10 ms."""


class AnswerBuilder(Protocol):
    """Collects all events of a request into one object."""

    def add(self, index: int, event: LiveEvent) -> None: ...

    def answer(self) -> object:
        """The JSON answer, once every choice has finished."""


class FrameWriter(StreamStyle, Protocol):
    """Turns events into frames of an event stream."""

    def opening(self) -> Iterable[bytes]:
        """Frames at admission, before those of the first event."""

    def frames(self, index: int, event: LiveEvent) -> Iterable[bytes]:
        """What one event makes visible, maybe nothing."""

    def closing(self) -> Iterable[bytes]:
        """Frames once every choice has finished."""


async def collect_answer(
    exchange: Exchange, builder: AnswerBuilder, choices: Choices
) -> web.StreamResponse:
    async for index, event in choices:
        await pass_event(partial(builder.add, index), event)
    return exchange.json(builder.answer())


async def stream_answer(
    exchange: Exchange, writer: FrameWriter, choices: Choices
) -> web.StreamResponse:
    """Everything that a client can get wrong has failed before the first event arrives, so the
    status line is written at admission. A later error is the stream's last event."""
    index, event = await anext(choices)
    async with exchange.stream(writer) as stream:
        await stream.send([*writer.opening(), *writer.frames(index, event)])
        async for index, event in choices:
            await stream.send(await pass_event(partial(writer.frames, index), event))
        await stream.send(writer.closing())
    return stream.response


async def pass_event(use: Callable[[LiveEvent], T], event: LiveEvent) -> T:
    """`use(event)`; scores of a long prompt take a while to write down."""
    if isinstance(event, Progress) and event.prompt_scores:
        count = sum(part.logprobs.size + part.top_ids.size for part in event.prompt_scores)
        return await off_the_loop(partial(use, event), is_long=count > _MANY_SCORES)
    return use(event)


def is_silent(event: LiveEvent) -> bool:
    """Nothing of the output is in it: it came for the prompt's log probabilities."""
    return isinstance(event, Progress) and not event.deltas


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an OpenAI answer have in common. `created_s`: seconds since the epoch."""

    answer_id: str
    model: str
    fingerprint: str
    created_s: int

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class Ending:
    """How one choice stands: its usage so far and, once it has ended, why and how long it took."""

    usage: Usage = field(default_factory=lambda: Usage(0))
    finish: Finish | None = None
    timings: Timings | None = None

    def update(self, event: LiveEvent) -> None:
        self.usage = event.usage
        if isinstance(event, Finished):
            self.finish, self.timings = event.finish, event.timings

    def require_finish(self) -> Finish:
        if self.finish is None:
            raise InvariantError("a choice has no finish")
        return self.finish


def timings_of(endings: Sequence[Ending]) -> list[Timings]:
    return [ending.timings for ending in endings if ending.timings is not None]
