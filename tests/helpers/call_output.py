"""Runs output sessions that read calls, and says what an answer comes to however it is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.generation import Finish, FinishReason, OutputDelta
from ninfer.frontend.tool_calls.call_state import CallRules
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools
from tests.helpers.output_text import Transcript, run_session, session_rules

STOP_ID: Final = 1_000_000
"""A stop token: the model ends its turn."""
FREE: Final[Mapping[str, Any]] = {}


def object_schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            name: {"type": kind} if isinstance(kind, str | list) else kind
            for name, kind in properties.items()
        },
    }


def call_rules(
    tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True, **fields: Any
) -> CallRules:
    """`tools`: schemas by name."""
    specs = tuple(ToolSpec(name, schema) for name, schema in tools.items())
    rules = ToolRules(tools=specs, parallel=parallel, **fields)
    return CallRules(DeclaredTools(rules), parallel)


@dataclass(frozen=True)
class Piece:
    """Neighbouring deltas of one channel or call in one."""

    channel: str
    text: str
    index: int | None = None
    name: str = ""
    is_complete: bool = False


@dataclass(frozen=True)
class Answer:
    """An answer without regard to how it came."""

    pieces: tuple[Piece, ...]
    finish: Finish | None
    reasoning_tokens: int

    def text(self, channel: str = "content") -> str:
        return "".join(piece.text for piece in self.pieces if piece.channel == channel)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names and arguments of complete calls."""
        return [(piece.name, json.loads(piece.text)) for piece in self.pieces if piece.is_complete]

    @property
    def order(self) -> list[str]:
        return [piece.channel for piece in self.pieces]


def merged(deltas: Iterable[OutputDelta]) -> tuple[Piece, ...]:
    """Checks the promises about marks on the way."""
    pieces: list[Piece] = []
    for delta in deltas:
        mark = delta.call
        assert (mark is not None) == (delta.channel == "call")
        index, name = (None, "") if mark is None else (mark.index, mark.name)
        is_complete = mark is not None and mark.ends
        last = pieces[-1] if pieces else None
        if last is not None and (last.channel, last.index) == (delta.channel, index):
            assert not last.is_complete
            assert mark is None or (not mark.begins and mark.name == last.name)
            pieces[-1] = Piece(delta.channel, last.text + delta.text, index, name, is_complete)
        else:
            assert mark is None or mark.begins
            pieces.append(Piece(delta.channel, delta.text, index, name, is_complete))
    indices = [piece.index for piece in pieces if piece.index is not None]
    assert indices == list(range(len(indices)))
    return tuple(piece for piece in pieces if piece.text or piece.channel == "call")


def run_answer(
    pieces: Sequence[bytes | str],
    calls: CallRules | None,
    *,
    ends: bool = True,
    **fields: Any,
) -> Answer:
    """One token a piece; the model ends its turn then, or is cut off with `ends` false."""
    transcript = run_transcript(pieces, calls, ends=ends, **fields)
    return Answer(merged(transcript.deltas), transcript.finish, transcript.reasoning_tokens)


def run_transcript(
    pieces: Sequence[bytes | str],
    calls: CallRules | None,
    *,
    ends: bool = True,
    batch_sizes: Sequence[int] = (),
    **fields: Any,
) -> Transcript:
    rules = session_rules(pieces, calls=calls, stop_ids=frozenset({STOP_ID}), **fields)
    ids = [*range(len(pieces)), *([STOP_ID] if ends else [])]
    return run_session(rules, ids, limit=FinishReason.OUTPUT_LIMIT, batch_sizes=batch_sizes)


def cut_at(text: str, places: Iterable[int]) -> list[bytes]:
    """The bytes of `text` in pieces; places beyond them do not count."""
    data = text.encode()
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[start:stop] for start, stop in pairwise(edges)]


def cut_every(text: str, size: int) -> list[bytes]:
    return cut_at(text, range(size, len(text.encode()), size))
