"""Drives output sessions with scripted pieces and says what a whole text should come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer.contract.generation import Channel, Finish, FinishReason, OutputDelta
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_session import TextOutputSession
from ninfer.frontend.output_state import SessionRules
from ninfer.frontend.stops import StopMatcher


def session_rules(
    pieces: Sequence[bytes | str], *, stops: Sequence[str] = (), **fields: Any
) -> SessionRules:
    """Rules in which token i spells piece i."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return SessionRules(
        token_bytes=lambda token_id: data[token_id] if token_id < len(data) else b"",
        stops=StopMatcher(stops) if stops else None,
        **fields,
    )


@dataclass
class Transcript:
    """All that a session gave out."""

    deltas: list[OutputDelta] = field(default_factory=list)
    finish: Finish | None = None
    accepted: int = 0
    reasoning_tokens: int = 0

    def add(self, deltas: Iterable[OutputDelta]) -> None:
        self.deltas.extend(deltas)

    def texts(self, channel: Channel = "content") -> list[str]:
        return [delta.text for delta in self.deltas if delta.channel == channel and delta.text]

    def text(self, channel: Channel = "content") -> str:
        return "".join(self.texts(channel))

    def token_ids(self, channel: Channel = "content") -> list[int]:
        return [
            token.token_id
            for delta in self.deltas
            if delta.channel == channel
            for token in delta.tokens
        ]

    @property
    def matched(self) -> str | int | None:
        return self.finish.matched if self.finish else None


def run_session(
    rules: SessionRules,
    token_ids: Sequence[int],
    *,
    batch_sizes: Sequence[int] = (),
    limit: FinishReason | None = FinishReason.OUTPUT_LIMIT,
) -> Transcript:
    """Preview and commit `token_ids` in batches (of one by default) until the session finishes.

    `limit` applies to the last batch; None flushes at the end instead.
    """
    session, transcript = TextOutputSession(rules), Transcript()
    sizes, first = list(batch_sizes), 0
    while first < len(token_ids) and transcript.finish is None:
        size = sizes.pop(0) if sizes else 1
        batch = [GeneratedToken(token_id) for token_id in token_ids[first : first + size]]
        first += len(batch)
        preview = session.preview(batch, limit if first == len(token_ids) else None)
        session.commit(preview)
        transcript.add(preview.deltas)
        transcript.finish = preview.finish
        transcript.accepted += preview.accepted
    transcript.add(session.flush())
    transcript.reasoning_tokens = session.reasoning_tokens
    return transcript


def run_pieces(
    *pieces: bytes | str, limit: FinishReason | None = FinishReason.OUTPUT_LIMIT, **fields: Any
) -> Transcript:
    """One token a piece; `fields` as in session_rules."""
    return run_session(session_rules(pieces, **fields), range(len(pieces)), limit=limit)


@dataclass(frozen=True)
class Expected:
    reasoning: str
    content: str
    matched: str | int | None


def whole_text_oracle(
    data: bytes,
    *,
    stops: Sequence[str] = (),
    includes_stop_string: bool = False,
    stops_in_reasoning: bool = False,
    splits_reasoning: bool = True,
    opens_in_reasoning: bool = False,
) -> Expected:
    """What the complete output bytes mean, found with plain searches over the whole text."""
    text = data.decode("utf-8", "replace")
    thought, answer = "", text
    is_thinking = splits_reasoning and (opens_in_reasoning or text.startswith("<think>"))
    if is_thinking:
        thought, _, answer = text.removeprefix("<think>").partition("</think>")
        thought, answer = thought.lstrip("\n"), answer.lstrip()
    if is_thinking and stops_in_reasoning:
        shown, matched = _until_stop(thought, stops, includes_stop_string)
        if matched is not None:
            return Expected(shown if includes_stop_string else shown.rstrip(), "", matched)
    shown, matched = _until_stop(answer, stops, includes_stop_string)
    return Expected(thought.rstrip(), shown, matched)


def _until_stop(text: str, stops: Sequence[str], is_included: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, 0, end)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if is_included else end - len(stop)], stop
    return text, None
