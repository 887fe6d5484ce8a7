"""A generation request, its output session and its events: what crosses Frontend and Engine.

Frontend builds GenerationRequest (with an OutputSession) -> Engine.submit -> RequestHandle
RequestHandle yields: Admitted, Progress*, then exactly one of Finished | Failed
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias

from ninfer.contract.cache import CacheRequest, CacheUse
from ninfer.contract.drafting import DraftCounts
from ninfer.contract.errors import NInferError
from ninfer.contract.masks import TokenMask
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import (
    GeneratedToken,
    PromptScores,
    PromptScoring,
    SamplingParams,
)

Channel: TypeAlias = Literal["reasoning", "content", "call"]


class FinishReason(Enum):
    """Why a request ended normally."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    OUTPUT_LIMIT = "output_limit"
    CONTEXT_CAPACITY = "context_capacity"
    TOOL_CALL = "tool_call"
    """The only tool call that was allowed is complete."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Finish:
    """`matched` is the stop string or the stop token id, None otherwise."""

    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class CallMark:
    """Which tool call of an answer a delta belongs to.

    index    counts the calls from 0; they come one after another
    begins   the call's first delta, the first that names it
    ends     its last: the call is complete. One that is cut off never has it.
    """

    index: int
    name: str
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Text that became final, with the tokens whose text ends in it.

    `text` never ends inside a character and may be empty when only tokens are reported (a token
    whose text was trimmed by a stop is not reported in `tokens` of content). In the channel `call`,
    and only there, `call` is set and the texts of one call join to a JSON object, its arguments.
    """

    channel: Channel
    text: str
    tokens: tuple[GeneratedToken, ...] = ()
    call: CallMark | None = None


@dataclass(frozen=True, slots=True)
class OutputPreview:
    """What committing some provisional tokens would do; nothing has changed yet.

    accepted   how many of the offered tokens are taken, 1..offered
    finish     set when the request ends with the last accepted token
    deltas     what becomes visible at commit
    state      the session's own successor state, opaque to everyone else
    """

    accepted: int
    finish: Finish | None
    deltas: tuple[OutputDelta, ...]
    state: Any = field(repr=False)


class OutputSession(Protocol):
    """Turns one request's tokens into text. Owned by the request; used by the worker only."""

    @property
    def reasoning_tokens(self) -> int:
        """Committed tokens that belong to the reasoning channel."""

    @property
    def broken_calls(self) -> int:
        """What looked like a tool call in the committed answer and turned out to be text."""

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        """What `tokens` (at least one) would mean. Pure.

        `limit` is set when the request must end with the last of them (budget or capacity); a
        natural stop found earlier or at the same token wins over it.
        """

    def goes_on_after(self, token: GeneratedToken) -> bool:
        """Whether the output surely goes on behind `token`: a preview of it from the present state,
        without limit, accepts it and has no finish. False when in doubt. Pure."""

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        """What would restrict the choice behind each of `token_ids`, were they to come next; None
        for nothing. Shorter when one of them may not come or ends the output, or when what comes
        behind it is forced. Pure. For a request with a mask only while its session has seen all
        accepted tokens; the masks are valid until the next commit."""

    def commit(self, preview: OutputPreview) -> None:
        """Adopt a preview made from the present state."""

    def flush(self) -> tuple[OutputDelta, ...]:
        """Text still held back when the request is cut off from outside (cancel, deadline)."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """Everything the Engine needs; it owns the request from submit on.

    max_tokens    output budget >= 0; the Engine also ends at the context limit
    min_tokens    `suppressed_ids` cannot be drawn before so many tokens were accepted
    suppressed_ids   the ids that would end the request (EOS and stop ids)
    deadline_s    absolute time of the Engine's clock, or None
    queue_timeout_s  longest wait for admission, or None for the Engine's default
    cache         what the request asks of the context cache
    scoring       log probabilities of the prompt's tokens are asked for
    mask          which tokens may come, None for all; kept up by the session's commits
    prepare       to be awaited once before `submit`, or None; raises RequestError
    """

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    session: OutputSession
    max_tokens: int
    min_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache: CacheRequest = field(default_factory=CacheRequest)
    scoring: PromptScoring | None = None
    mask: TokenMask | None = None
    prepare: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `completion_tokens` includes the withheld stop token.

    cache   where cached prompt tokens came from, why there are not more; None before admission
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cache: CacheUse | None = None

    @property
    def cached_tokens(self) -> int:
        return 0 if self.cache is None else self.cache.num_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `decode_s` runs from the first token to the last. `drafts` is None when nothing was
    drafted."""

    queue_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    drafts: DraftCounts | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue; sent once, before any output."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Progress:
    """Committed output of one unit. `usage` counts up to and including it.

    prompt_scores   of the prompt, in order and each token once; all come before the first output
    """

    deltas: tuple[OutputDelta, ...]
    usage: Usage
    prompt_scores: tuple[PromptScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    finish: Finish
    deltas: tuple[OutputDelta, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    error: NInferError
    usage: Usage


Event: TypeAlias = Admitted | Progress | Finished | Failed


class RequestHandle(Protocol):
    """The consumer's end of a request: an async context manager and an async iterator of events.

    Leaving the context releases the consumer's half of the outstanding place and cancels what is
    still running. After the terminal event the iteration ends.
    """

    @property
    def request_id(self) -> str: ...

    def cancel(self) -> None:
        """Ask for the end; takes effect at the next worker boundary. Idempotent, never blocks."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class EngineHealth(Enum):
    READY = "ok"
    LOADING = "loading"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for /health, /stats and tests."""

    health: EngineHealth
    waiting: int
    running: int
    outstanding: int
    max_concurrency: int
    max_pending: int
    pages_used: int
    pages_total: int
    prompt_tokens_total: int
    completion_tokens_total: int
    error: str | None = None
    slots_used: int = 0
    slots_total: int = 0
    has_ended: bool = False
    """It has stopped for good; otherwise an engine that is unavailable may only be stuck."""


class GenerationEngine(Protocol):
    """What Gateway, CLI and tests use of the Engine."""

    @property
    def max_context(self) -> int:
        """Most tokens (prompt and output together) one sequence can hold."""

    def check(self, request: GenerationRequest) -> None:
        """Raise the RequestError that `submit` would raise, without queueing anything."""

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request.

        Raises RequestError (`context_length_exceeded`, `invalid_prompt`) and Unavailable
        (`server_overloaded`, `server_draining`, `engine_unavailable`) at once.
        """

    def status(self) -> EngineStatus: ...

    def flush_cache(self) -> None:
        """Release all that the context cache holds and nobody uses, at the next boundary."""

    def now(self) -> float:
        """The clock of `deadline_s` (seconds, monotonic)."""

    def close_admission(self) -> None:
        """From now on `submit` raises Unavailable (`server_draining`). Idempotent."""

    async def drain(self, timeout_s: float) -> bool:
        """Close admission and wait until nothing is outstanding; after `timeout_s` end the rest
        with Failed(`server_draining`). True when all finished by themselves."""

    async def aclose(self) -> None:
        """End everything still running with Failed(`engine_unavailable`), stop the worker and
        close the Program. Idempotent."""
