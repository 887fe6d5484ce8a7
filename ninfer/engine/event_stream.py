"""EventStream: the buffer between the worker and one consumer.

The worker never waits for a consumer. Output that was not fetched yet is handed over as one
Progress: a slow consumer reads at most Admitted, one Progress and the terminal event, and what is
kept for it grows with the answer alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import (
    Admitted,
    CallMark,
    Channel,
    Event,
    Failed,
    Finished,
    OutputDelta,
    Progress,
)


class EventStream:
    """One writer (`push`), one reader (`next`), both on the same loop."""

    def __init__(self) -> None:
        self._admitted: Admitted | None = None
        self._progress: list[Progress] = []
        self._terminal: Finished | Failed | None = None
        self._has_ended = False
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: Event) -> None:
        """Add an event; a second terminal event, or any after it, is an InvariantError."""
        if self._has_ended:
            raise InvariantError(f"{type(event).__name__} after the terminal event")
        self._has_ended = isinstance(event, Finished | Failed)
        if self._is_closed:
            return
        match event:
            case Progress():
                self._progress.append(event)
            case Admitted():
                self._admitted = event
            case Finished() | Failed():
                self._terminal = event
        self._wake()

    async def next(self) -> Event | None:
        """The next event; None when there will be no more."""
        while (event := self._take()) is None:
            if self._has_ended or self._is_closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return event

    def close(self) -> None:
        """The reader has gone: forget what is buffered and drop what follows. Idempotent."""
        self._is_closed = True
        self._admitted = None
        self._terminal = None
        self._progress.clear()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> Event | None:
        if self._admitted is not None:
            admitted, self._admitted = self._admitted, None
            return admitted
        if self._progress:
            progress, self._progress = self._progress, []
            return progress[0] if len(progress) == 1 else _merged(progress)
        terminal, self._terminal = self._terminal, None
        return terminal


def _merged(progress: Sequence[Progress]) -> Progress:
    deltas = [delta for event in progress for delta in event.deltas]
    scores = tuple(part for event in progress for part in event.prompt_scores)
    return Progress(merge_deltas(deltas), progress[-1].usage, scores)


def merge_deltas(deltas: Iterable[OutputDelta]) -> tuple[OutputDelta, ...]:
    """Join neighbours of one channel and call; text and tokens keep their order."""
    merged: list[OutputDelta] = []
    for (channel, _), group in groupby(deltas, key=_place_of):
        parts = list(group)
        if len(parts) == 1:
            merged.append(parts[0])
            continue
        text = "".join(part.text for part in parts)
        tokens = tuple(token for part in parts for token in part.tokens)
        merged.append(OutputDelta(channel, text, tokens, _merged_call(parts)))
    return tuple(merged)


def _place_of(delta: OutputDelta) -> tuple[Channel, int | None]:
    return delta.channel, None if delta.call is None else delta.call.index


def _merged_call(parts: Sequence[OutputDelta]) -> CallMark | None:
    first, last = parts[0].call, parts[-1].call
    if first is None or last is None:
        return None
    return replace(first, ends=last.ends)
