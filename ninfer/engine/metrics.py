"""EngineMetrics: counters and sums since the start. The worker writes, everyone may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ninfer.contract.drafting import MAX_DRAFT_TOKENS, DraftSource
from ninfer.contract.errors import NInferError, NonFiniteLogits
from ninfer.contract.generation import FinishReason, Timings
from ninfer.engine.histograms import EngineHistograms
from ninfer.engine.token_rate import TokenRate

_DURATION_WEIGHT = 0.1


class Outcome(Enum):
    """How a request that was accepted by `submit` ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


def outcome_of(reason: FinishReason) -> Outcome:
    match reason:
        case FinishReason.STOP_TOKEN | FinishReason.STOP_STRING | FinishReason.TOOL_CALL:
            return Outcome.STOP
        case FinishReason.OUTPUT_LIMIT | FinishReason.CONTEXT_CAPACITY:
            return Outcome.LENGTH
        case FinishReason.CANCELLED:
            return Outcome.CANCELLED


@dataclass(slots=True)
class SourceMetrics:
    """What one source drafted."""

    rounds_total: int = 0
    drafted_total: int = 0
    accepted_total: int = 0


@dataclass(slots=True)
class DraftMetrics:
    """rounds: rows of decode steps that checked a draft. accepted_at[i]: rounds in which draft
    token number i, counted from 0, became part of an answer. by_source: each round has one."""

    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    by_source: dict[DraftSource, SourceMetrics] = field(
        default_factory=lambda: {source: SourceMetrics() for source in DraftSource}
    )

    @property
    def rounds_total(self) -> int:
        return sum(counts.rounds_total for counts in self.by_source.values())

    @property
    def drafted_total(self) -> int:
        return sum(counts.drafted_total for counts in self.by_source.values())

    @property
    def accepted_total(self) -> int:
        return sum(self.accepted_at)

    def note(self, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        """One round."""
        counts = self.by_source[source]
        counts.rounds_total += 1
        counts.drafted_total += num_drafted
        counts.accepted_total += num_accepted
        for index in range(num_accepted):
            self.accepted_at[index] += 1


@dataclass(slots=True)
class EngineMetrics:
    """Times are sums in seconds, to be divided by the count beside them.

    requests_total        by outcome
    requests_rejected     `submit` raised Unavailable or RequestError
    prompt_tokens_total, completion_tokens_total   committed
    completion_rate       of the last seconds
    queue_s_total / num_admitted, ttft_s_total / num_first_tokens   ttft includes the queue
    decode_rows_total / num_decode_units   mean batch size
    broken_calls_total    what looked like a tool call in an answer and turned out to be text
    cached_tokens_total   prompt tokens that newcomers got from the context cache; not computed
    num_pauses, num_resumes   of residents for want of memory or a lane
    num_replays           resumes that fed again what had been fed
    num_snapshots_lost    Snapshots of paused requests that were given up
    replayed_tokens_total   inputs that were fed again
    scheduling_s_total    processor time of boundaries and launches, between two units
    drafts                speculative decoding, all requests
    histograms            how these times and sizes are spread
    request_s_mean        smoothed duration of requests that ran to their end
    """

    requests_total: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    requests_rejected: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    completion_rate: TokenRate = field(default_factory=TokenRate)
    num_admitted: int = 0
    queue_s_total: float = 0.0
    num_first_tokens: int = 0
    ttft_s_total: float = 0.0
    num_prefill_units: int = 0
    num_decode_units: int = 0
    decode_rows_total: int = 0
    non_finite_rows_total: int = 0
    broken_calls_total: int = 0
    cached_tokens_total: int = 0
    num_pauses: int = 0
    num_resumes: int = 0
    num_replays: int = 0
    num_snapshots_lost: int = 0
    replayed_tokens_total: int = 0
    scheduling_s_total: float = 0.0
    drafts: DraftMetrics = field(default_factory=DraftMetrics)
    histograms: EngineHistograms = field(default_factory=EngineHistograms)
    request_s_mean: float | None = None

    def note_output(self, num_tokens: int, now: float) -> None:
        self.completion_tokens_total += num_tokens
        self.completion_rate.note(num_tokens, now)

    def note_admitted(self, queue_s: float) -> None:
        self.num_admitted += 1
        self.queue_s_total += queue_s

    def note_first_token(self, ttft_s: float) -> None:
        self.num_first_tokens += 1
        self.ttft_s_total += ttft_s
        self.histograms.first_token.observe(ttft_s)

    def note_finished(self, reason: FinishReason, timings: Timings) -> None:
        outcome = outcome_of(reason)
        self.requests_total[outcome] += 1
        if outcome is Outcome.CANCELLED:
            return
        running_s = timings.total_s - timings.queue_s
        if self.request_s_mean is None:
            self.request_s_mean = running_s
        else:
            self.request_s_mean += _DURATION_WEIGHT * (running_s - self.request_s_mean)

    def note_failed(self, error: NInferError) -> None:
        self.requests_total[Outcome.ERROR] += 1
        if isinstance(error, NonFiniteLogits):
            self.non_finite_rows_total += 1
