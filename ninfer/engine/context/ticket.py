"""Ticket: what the context cache knows of a request in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ninfer.contract.cache import CheckpointId, CheckpointKind, Tier
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.engine.context.identity import Identity
from ninfer.engine.context.records import Entry, PageNode, Session
from ninfer.engine.context.sources import Candidate
from ninfer.engine.context_protocol import TransferPlan

MAX_LONG_ANCHORS: Final = 4


@dataclass(slots=True, eq=False)
class Ticket:
    """Of one request, from its arrival to its end.

    number       order of arrival
    places       where a checkpoint would be of use, by frontier
    stable       tokens of the longest shared beginning
    most         most tokens it may start from; less than `limit` when the prompt is to be scored
    answer_start where the answer begins, with its opener
    session      from the first start on
    pin          the entry that was chosen and is not bound yet
    move         the transfer that has to come first
    excluded     checkpoints that could not be brought up for this request
    lost         the most tokens of one of these
    origins      tiers that checkpoints were in before they were brought up for this request
    promoted     checkpoints that were brought up ahead of time, and from where
    num_used     tokens it started from, last time
    found        its path in the tree of pages, what it could start from there, and the catalogue's
                 revision then
    """

    number: int
    identity: Identity
    key: str | None
    places: dict[int, PromptFrontier]
    stable: int
    most: int
    answer_start: int
    session: Session | None = None
    pin: Entry | None = None
    move: TransferPlan | None = None
    excluded: set[CheckpointId] = field(default_factory=set)
    lost: int = 0
    origins: dict[CheckpointId, Tier] = field(default_factory=dict)
    promoted: set[tuple[CheckpointId, Tier]] = field(default_factory=set)
    num_used: int = 0
    found: tuple[int, list[PageNode], list[Candidate]] | None = None

    @property
    def limit(self) -> int:
        """Most tokens anybody with this prompt can start from: the last is computed in any case."""
        return self.identity.num_tokens - 1

    @property
    def is_waiting(self) -> bool:
        """It was not started yet."""
        return self.session is None

    def exclude(self, entry: Entry) -> None:
        """It cannot be brought up for this request."""
        self.excluded.add(entry.checkpoint)
        self.lost = max(self.lost, min(entry.frontier, self.most))


def places_of(
    request: GenerationRequest, least: int, *, has_states: bool
) -> dict[int, PromptFrontier]:
    """The places of at least `least` tokens. Of several at one frontier the most lasting kind
    counts, and a client's mark in any case. A model of attention alone needs no anchors."""
    places: dict[int, PromptFrontier] = {}
    for place in request.prompt.frontiers:
        if place.num_tokens < least:
            continue
        known = places.get(place.num_tokens)
        kind = place.kind if known is None else min(known.kind, place.kind, key=_KINDS.index)
        is_explicit = place.is_explicit or (known is not None and known.is_explicit)
        places[place.num_tokens] = PromptFrontier(place.num_tokens, kind, is_explicit)
    anchors = [f for f, place in places.items() if _is_anchor(place)]
    for frontier in anchors[:-MAX_LONG_ANCHORS] if has_states else anchors:
        del places[frontier]
    return places


def most_reusable(request: GenerationRequest) -> int:
    """Most tokens a request can start from: all but the last one, and where scores are asked for,
    all before the token that predicts the first of them."""
    most = request.prompt.num_tokens - 1
    return most if request.scoring is None else min(most, request.scoring.first - 1)


def answer_start_of(prompt: PreparedPrompt) -> int:
    """Where the answer begins: at the opener in the prompt if that is known, else behind it."""
    starts = [p.num_tokens for p in prompt.frontiers if p.kind in _BEFORE_ANSWERS]
    last = max(starts, default=0)
    return last if prompt.num_tokens - last <= _MAX_OPENER else prompt.num_tokens


def _is_anchor(place: PromptFrontier) -> bool:
    return place.kind is CheckpointKind.LONG_ANCHOR and not place.is_explicit


_BEFORE_ANSWERS: Final = (CheckpointKind.TURN_CLOSURE, CheckpointKind.RESPONSE_REPLAY)
_MAX_OPENER: Final = 64
"""Tokens of the longest opener of an answer."""
_KINDS: Final = (
    CheckpointKind.STABLE_PREFIX,
    CheckpointKind.TURN_CLOSURE,
    CheckpointKind.RESPONSE_REPLAY,
    CheckpointKind.PROMPT_TAIL,
    CheckpointKind.LONG_ANCHOR,
    CheckpointKind.SESSION_END,
)
