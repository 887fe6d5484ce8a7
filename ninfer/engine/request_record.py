"""RequestRecord: everything the worker knows of one request, and the phases of its life.

    WAITING --admitted--> PREFILL --first token--> DECODE_READY
       |                     |                          |
       |                     +-----> MODEL_FINISHED <---+
       +------------------------------> DONE <--- lane returned

`move` is the only writer of the phase. A record belongs to the worker from submit on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from ninfer.contract.errors import InvariantError, NInferError
from ninfer.contract.generation import GenerationRequest, Timings, Usage
from ninfer.contract.program import SequenceHandle
from ninfer.engine.event_stream import EventStream
from ninfer.engine.outstanding import Place
from ninfer.engine.request_checks import OutputBudget


class Phase(Enum):
    WAITING = auto()
    """Ticketed; owns no lane, page or slot."""
    PREFILL = auto()
    """Owns a lane; some prompt inputs are not committed yet."""
    DECODE_READY = auto()
    """Owns a lane; the newest accepted token is the next input."""
    MODEL_FINISHED = auto()
    """Needs no further unit; still owns its lane."""
    DONE = auto()
    """Owns nothing; its terminal event is formed."""


NEXT: Final[Mapping[Phase, frozenset[Phase]]] = MappingProxyType(
    {
        Phase.WAITING: frozenset({Phase.PREFILL, Phase.DONE}),
        Phase.PREFILL: frozenset({Phase.DECODE_READY, Phase.MODEL_FINISHED}),
        Phase.DECODE_READY: frozenset({Phase.MODEL_FINISHED}),
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
    is_cancelled       the consumer asked for the end
    failure            of its session, seen while a unit of it runs: it ends when that has run
    completion_tokens  committed output tokens
    reasoning_tokens   of these, as the session counts them
    """

    ticket: int
    request: GenerationRequest
    budget: OutputBudget
    stream: EventStream
    place: Place
    submitted_s: float
    phase: Phase = field(default=Phase.WAITING, init=False)
    sequence: SequenceHandle | None = field(default=None, init=False)
    is_cancelled: bool = field(default=False, init=False)
    failure: NInferError | None = field(default=None, init=False)
    admitted_s: float | None = field(default=None, init=False)
    first_token_s: float | None = field(default=None, init=False)
    last_token_s: float | None = field(default=None, init=False)
    completion_tokens: int = field(default=0, init=False)
    reasoning_tokens: int = field(default=0, init=False)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def resident(self) -> SequenceHandle:
        """The open sequence. InvariantError for a request that has none."""
        if self.sequence is None:
            raise InvariantError(f"request {self.request_id} has no open sequence")
        return self.sequence

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
        )
