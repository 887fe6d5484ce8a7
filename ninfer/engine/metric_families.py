"""What the engine and its context cache report for monitoring. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

from ninfer.contract.cache import CheckpointKind, MissReason, Tier
from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import EngineStatus
from ninfer.contract.metrics import MetricFamily, MetricSample, counter, gauge, histogram
from ninfer.contract.program import TransferKind
from ninfer.engine.context_metrics import ContextHoldings, ContextMetrics
from ninfer.engine.histograms import EngineHistograms
from ninfer.engine.metrics import DraftMetrics, EngineMetrics
from ninfer.engine.token_rate import WINDOW_S

E = TypeVar("E", bound=Enum)
_MISSES = tuple(reason for reason in MissReason if reason is not MissReason.DISABLED)
"""Who does not want the cache misses nothing."""


def engine_families(status: EngineStatus, metrics: EngineMetrics, now: float) -> list[MetricFamily]:
    """`now`: of the engine's clock."""
    return [
        gauge("requests_running", "Requests with a lane", status.running),
        gauge("requests_waiting", "Requests without a lane, paused ones too", status.waiting),
        gauge(
            "kv_pages_used", "KV pages in use, those of the context cache too", status.pages_used
        ),
        gauge("kv_pages", "KV pages", status.pages_total),
        gauge("state_slots_used", "States in use, saved ones too", status.slots_used),
        gauge("state_slots", "States there is room for", status.slots_total),
        MetricFamily(
            "requests",
            "counter",
            "Requests that ended, by how",
            tuple(
                MetricSample(count, (("outcome", outcome.value),))
                for outcome, count in metrics.requests_total.items()
            ),
        ),
        counter("requests_rejected", "Requests that were not let in", metrics.requests_rejected),
        counter("prompt_tokens", "Prompt tokens computed", metrics.prompt_tokens_total),
        counter("generation_tokens", "Tokens generated", metrics.completion_tokens_total),
        gauge(
            "generation_tokens_per_second",
            f"Tokens generated a second, over the last {WINDOW_S} s",
            metrics.completion_rate.per_second(now),
        ),
        counter("admitted_requests", "Requests that left the queue", metrics.num_admitted),
        counter("queue_seconds", "Time in the queue, all requests", metrics.queue_s_total),
        counter("first_tokens", "Requests with a first token", metrics.num_first_tokens),
        counter(
            "time_to_first_token_seconds",
            "Time to the first token, queue and all, summed over requests",
            metrics.ttft_s_total,
        ),
        counter("prefill_units", "Prompt chunks computed", metrics.num_prefill_units),
        counter("decode_units", "Decode steps", metrics.num_decode_units),
        counter("decode_rows", "Rows of all decode steps", metrics.decode_rows_total),
        counter(
            "non_finite_rows", "Rows whose logits were not finite", metrics.non_finite_rows_total
        ),
        counter(
            "broken_tool_calls",
            "What looked like a tool call in an answer and turned out to be text",
            metrics.broken_calls_total,
        ),
        counter("pauses", "Requests paused for want of memory or a lane", metrics.num_pauses),
        counter("resumes", "Paused requests that went on", metrics.num_resumes),
        counter("replays", "Resumes that fed again what had been fed", metrics.num_replays),
        counter(
            "snapshots_lost", "Snapshots of paused requests given up", metrics.num_snapshots_lost
        ),
        counter("replayed_tokens", "Tokens fed again after a pause", metrics.replayed_tokens_total),
        counter(
            "scheduling_seconds",
            "Processor time between units",
            metrics.scheduling_s_total,
        ),
        counter(
            "cached_tokens",
            "Prompt tokens that came from the context cache",
            metrics.cached_tokens_total,
        ),
        *_draft_families(metrics.drafts),
        *_histogram_families(metrics.histograms),
    ]


def _draft_families(drafts: DraftMetrics) -> list[MetricFamily]:
    places = tuple(
        MetricSample(count, (("position", str(place)),))
        for place, count in enumerate(drafts.accepted_at)
    )
    sources = drafts.by_source.items()
    return [
        counter("draft_rounds", "Rows of decode steps that checked a draft", drafts.rounds_total),
        counter("drafted_tokens", "Tokens in drafts", drafts.drafted_total),
        counter("accepted_draft_tokens", "Drafted tokens that were right", drafts.accepted_total),
        MetricFamily(
            "accepted_drafts_at",
            "counter",
            "Drafts that were right as far as a place in them, 0 the first",
            places,
        ),
        _by("draft_rounds_by_source", "Rounds with a draft of this source", "source",
            DraftSource, {source: counts.rounds_total for source, counts in sources}),
        _by("drafted_tokens_by_source", "Tokens in drafts of this source", "source",
            DraftSource, {source: counts.drafted_total for source, counts in sources}),
        _by("accepted_draft_tokens_by_source", "Drafted tokens of this source that were right",
            "source", DraftSource, {source: counts.accepted_total for source, counts in sources}),
    ]  # fmt: skip


def _histogram_families(values: EngineHistograms) -> list[MetricFamily]:
    return [
        histogram("request_queue_seconds", "Time in the queue", values.queue),
        histogram("request_prefill_seconds", "Time from the queue to the first token",
            values.prefill),
        histogram("request_decode_seconds", "Time from the first token to the last", values.decode),
        histogram("request_inference_seconds", "Time behind the queue", values.inference),
        histogram("request_seconds", "Time from arrival to the end", values.total),
        histogram("request_first_token_seconds", "Time from arrival to the first token",
            values.first_token),
        histogram("token_gap_seconds", "Time between two tokens of a request", values.token_gap),
        histogram("request_prompt_tokens", "Tokens of a prompt", values.prompt_tokens),
        histogram("request_generation_tokens", "Tokens of an answer", values.output_tokens),
        histogram("request_max_tokens", "Tokens an answer might have had",
            values.max_output_tokens),
        histogram("unit_tokens", "Inputs computed in one step", values.unit_tokens),
    ]  # fmt: skip


def context_families(metrics: ContextMetrics, holdings: ContextHoldings) -> list[MetricFamily]:
    return [
        _by_source("cache_hits", "Requests that started from a checkpoint", metrics.hits),
        _by_source("cache_hit_tokens", "Prompt tokens these did not compute", metrics.hit_tokens),
        _by("cache_misses", "Requests that could not reuse all they had in common, by reason",
            "reason", _MISSES, metrics.misses),
        _by("cache_captures", "Checkpoints made", "kind", CheckpointKind, metrics.captures),
        _by("cache_captures_refused", "Checkpoints that were wanted without memory for them",
            "kind", CheckpointKind, metrics.captures_refused),
        _by("cache_evictions", "Checkpoints given up for good, by their best tier",
            "tier", Tier, metrics.evictions),
        _by("cache_drops", "Copies given up that another tier has", "tier", Tier, metrics.drops),
        _by("cache_transfers", "Transfers that ended well",
            "transfer", TransferKind, metrics.transfers),
        _by("cache_transfers_failed", "Transfers of damaged bytes, or whose device failed",
            "transfer", TransferKind, metrics.transfers_failed),
        _by("cache_transfers_refused", "Transfers that found no room",
            "transfer", TransferKind, metrics.transfers_refused),
        gauge("cache_checkpoints", "Checkpoints held", holdings.num_entries),
        _by("cache_tier_checkpoints", "Checkpoints with a copy in a tier",
            "tier", Tier, holdings.entries, "gauge"),
        _by("cache_tier_tokens", "Tokens of these checkpoints",
            "tier", Tier, holdings.tokens, "gauge"),
        _by("cache_tier_bytes", "Bytes that only the context cache holds in a tier",
            "tier", Tier, holdings.num_bytes, "gauge"),
        gauge("cache_identity_bytes", "Bytes of what identifies prefixes", holdings.id_bytes),
        gauge("cache_sessions", "Conversations remembered", holdings.num_sessions),
        gauge("cache_evicted_known", "Checkpoints remembered as given up", holdings.num_evicted),
    ]  # fmt: skip


def _by(
    name: str,
    help: str,
    label: str,
    members: Iterable[E],
    counts: Mapping[E, int],
    kind: str = "counter",
) -> MetricFamily:
    """One sample a member, 0 where nothing was counted."""
    samples = tuple(
        MetricSample(counts.get(member, 0), ((label, str(member.value)),)) for member in members
    )
    return MetricFamily(name, "counter" if kind == "counter" else "gauge", help, samples)


def _by_source(
    name: str, help: str, counts: Mapping[tuple[CheckpointKind, Tier], int]
) -> MetricFamily:
    samples = tuple(
        MetricSample(counts.get((kind, tier), 0), (("kind", kind.value), ("tier", tier.value)))
        for kind in CheckpointKind
        for tier in Tier
    )
    return MetricFamily(name, "counter", help, samples)
