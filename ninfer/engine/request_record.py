"""RequestRecord: everything the worker knows of one request, and the phases of its life.

    WAITING -> MATERIALIZING -> PREFILL -> DECODE_READY -> MODEL_FINISHED -> DONE
       |        |    ^    |       |  ^       |    ^   |        ^
       |        |    |    +-------+--|-------+----|---+--------+
       |        |    |               |       |  REPLAY
       |        v    +--------- PAUSED <-----+    ^
       +----> DONE <-------------- | -------------+

`move` is the only writer of the phase; `NEXT` has every legal move. A record belongs to the worker
from submit on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from ninfer.contract.cache import CacheUse
from ninfer.contract.drafting import DraftCounts
from ninfer.contract.errors import InvariantError, NInferError
from ninfer.contract.generation import GenerationRequest, Timings, Usage
from ninfer.contract.program import PausedSequence, SequenceHandle
from ninfer.engine.event_stream import EventStream
from ninfer.engine.outstanding import Place
from ninfer.engine.request_checks import OutputBudget
from ninfer.engine.speculation.drafter import Drafter, Proposal


class Phase(Enum):
    WAITING = auto()
    """Ticketed; owns no lane, page or slot."""
    MATERIALIZING = auto()
    """Owns a lane in the Scheduler, none in the Program: its source comes up a tier first."""
    PREFILL = auto()
    """Owns a lane; some prompt inputs are not committed yet and nothing was accepted."""
    REPLAY = auto()
    """Owns a lane; inputs that were fed before a pause are fed again."""
    DECODE_READY = auto()
    """Owns a lane; the newest accepted token is the next input."""
    PAUSED = auto()
    """Owns no lane; `paused` holds its ledger and perhaps its Snapshot."""
    MODEL_FINISHED = auto()
    """Needs no further unit; still owns its lane."""
    DONE = auto()
    """Owns nothing; its terminal event is formed."""


_RESIDENT: Final = frozenset({Phase.PREFILL, Phase.REPLAY, Phase.DECODE_READY})
_ENDS: Final = frozenset({Phase.PAUSED, Phase.MODEL_FINISHED})

NEXT: Final[Mapping[Phase, frozenset[Phase]]] = MappingProxyType(
    {
        Phase.WAITING: frozenset({Phase.MATERIALIZING, Phase.PREFILL, Phase.DONE}),
        Phase.MATERIALIZING: _RESIDENT | {Phase.PAUSED, Phase.DONE},
        Phase.PREFILL: _ENDS | {Phase.DECODE_READY},
        Phase.REPLAY: _ENDS | {Phase.DECODE_READY},
        Phase.DECODE_READY: _ENDS,
        Phase.PAUSED: _RESIDENT | {Phase.MATERIALIZING, Phase.DONE},
        Phase.MODEL_FINISHED: frozenset({Phase.DONE}),
        Phase.DONE: frozenset(),
    }
)
"""The legal moves."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are seconds of the Engine's clock, None while not reached.

    ticket             order of arrival; names the request in the Scheduler
    budget             most output tokens and why the last of them ends the request
    sequence           while resident
    paused             from the pause until the sequence is open again
    is_cancelled       the consumer asked for the end
    failure            of its session, seen while a unit of it runs: it ends when that has run
    accepted           committed output tokens, in order
    reasoning_tokens   how many of these are reasoning, as the session counts
    broken_calls       of these, what looked like a tool call and was none
    num_prefilled      prompt tokens that were ever committed or taken from the cache
    num_scored         prompt tokens whose scores need not be told any more
    old_frontier       where the last pause was; what lies before it is no news
    captures           frontiers at which the context cache wants to be told
    cache_use          what the first start got from the context cache
    drafter            drafts what it may say next; None without speculative decoding
    proposal           the draft model's newest, of use until more tokens are accepted
    draft_counts       what became of its drafts
    """

    ticket: int
    request: GenerationRequest
    budget: OutputBudget
    stream: EventStream
    place: Place
    submitted_s: float
    phase: Phase = field(default=Phase.WAITING, init=False)
    sequence: SequenceHandle | None = field(default=None, init=False)
    paused: PausedSequence | None = field(default=None, init=False)
    is_cancelled: bool = field(default=False, init=False)
    failure: NInferError | None = field(default=None, init=False)
    admitted_s: float | None = field(default=None, init=False)
    first_token_s: float | None = field(default=None, init=False)
    last_token_s: float | None = field(default=None, init=False)
    accepted: list[int] = field(default_factory=list, init=False)
    reasoning_tokens: int = field(default=0, init=False)
    broken_calls: int = field(default=0, init=False)
    num_prefilled: int = field(default=0, init=False)
    num_scored: int = field(default=0, init=False)
    old_frontier: int = field(default=0, init=False)
    captures: frozenset[int] = field(default=frozenset(), init=False)
    cache_use: CacheUse | None = field(default=None, init=False)
    drafter: Drafter | None = field(default=None, init=False)
    proposal: Proposal | None = field(default=None, init=False)
    draft_counts: DraftCounts = field(default_factory=DraftCounts, init=False)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def completion_tokens(self) -> int:
        return len(self.accepted)

    @property
    def is_resident(self) -> bool:
        """Units can run for it."""
        return self.phase in _RESIDENT

    @property
    def resident(self) -> SequenceHandle:
        """The open sequence. InvariantError for a request that has none."""
        if self.sequence is None:
            raise InvariantError(f"request {self.request_id} has no open sequence")
        return self.sequence

    @property
    def ledger(self) -> PausedSequence:
        """What a resume needs. InvariantError for a request that was not paused."""
        if self.paused is None:
            raise InvariantError(f"request {self.request_id} is not paused")
        return self.paused

    def move(self, to: Phase) -> None:
        if to not in NEXT[self.phase]:
            raise InvariantError(
                f"request {self.request_id} cannot go from {self.phase.name} to {to.name}"
            )
        self.phase = to

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.request.prompt.num_tokens,
            completion_tokens=self.completion_tokens,
            reasoning_tokens=self.reasoning_tokens,
            cache=self.cache_use,
        )

    def timings(self, now: float) -> Timings:
        """Durations of a request that ends now; phases it never reached last 0 s."""
        admitted = now if self.admitted_s is None else self.admitted_s
        first = now if self.first_token_s is None else self.first_token_s
        last = first if self.last_token_s is None else self.last_token_s
        return Timings(
            queue_s=admitted - self.submitted_s,
            prefill_s=first - admitted,
            decode_s=last - first,
            total_s=now - self.submitted_s,
            drafts=self.draft_counts if self.draft_counts.rounds else None,
        )
