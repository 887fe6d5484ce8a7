"""Our figures under the names that dashboards, autoscalers and routers of other servers expect.

An alias is left out where its source is not reported, as before the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ninfer.contract.metrics import MetricFamily, MetricSample
from ninfer.contract.units import PAGE_TOKENS

_Sources: TypeAlias = Mapping[str, MetricFamily]
_FINISHED: Final = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Our outcomes -> the values of `finished_reason`."""
_SAME: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "vllm:": (
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("prompt_tokens", "prompt_tokens"),
        ("generation_tokens", "generation_tokens"),
        ("num_preemptions", "pauses"),
        ("prefix_cache_hits", "cached_tokens"),
        ("corrupted_requests", "non_finite_rows"),
        ("time_to_first_token_seconds", "request_first_token_seconds"),
        ("inter_token_latency_seconds", "token_gap_seconds"),
        ("time_per_output_token_seconds", "token_gap_seconds"),
        ("e2e_request_latency_seconds", "request_seconds"),
        ("request_queue_time_seconds", "request_queue_seconds"),
        ("request_prefill_time_seconds", "request_prefill_seconds"),
        ("request_decode_time_seconds", "request_decode_seconds"),
        ("request_inference_time_seconds", "request_inference_seconds"),
        ("request_prompt_tokens", "request_prompt_tokens"),
        ("request_generation_tokens", "request_generation_tokens"),
        ("request_params_max_tokens", "request_max_tokens"),
        ("request_params_n", "request_choices"),
        ("iteration_tokens_total", "unit_tokens"),
        ("spec_decode_num_drafts", "draft_rounds"),
        ("spec_decode_num_draft_tokens", "drafted_tokens"),
        ("spec_decode_num_accepted_tokens", "accepted_draft_tokens"),
        ("spec_decode_num_accepted_tokens_per_pos", "accepted_drafts_at"),
    ),
    "sglang:": (
        ("num_running_reqs", "requests_running"),
        ("num_queue_reqs", "requests_waiting"),
        ("gen_throughput", "generation_tokens_per_second"),
        ("prompt_tokens", "prompt_tokens"),
        ("generation_tokens", "generation_tokens"),
        ("time_to_first_token_seconds", "request_first_token_seconds"),
        ("time_per_output_token_seconds", "token_gap_seconds"),
        ("e2e_request_latency_seconds", "request_seconds"),
    ),
}
"""(alias, ours) that differ in nothing but the name."""
PREFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "vllm": ("vllm:",),
    "sglang": ("sglang:",),
    "all": ("vllm:", "sglang:"),
}
"""Values of `--metric-aliases` -> the names that are shown."""


def alias_families(families: Iterable[MetricFamily], kind: str) -> list[MetricFamily]:
    """The aliases of what is in `families`; `kind` is a key of PREFIXES."""
    sources = {family.name: family for family in families}
    return [
        alias
        for prefix in PREFIXES[kind]
        for make in (_renamed, _MORE[prefix])
        for alias in make(sources, prefix)
    ]


def _renamed(sources: _Sources, prefix: str) -> Iterator[MetricFamily]:
    for name, own in _SAME[prefix]:
        if own in sources:
            source = sources[own]
            yield MetricFamily(name, source.kind, source.help, source.samples, prefix)


def _vllm_only(sources: _Sources, prefix: str) -> Iterator[MetricFamily]:
    if "kv_pages" in sources:
        used, pages = _value(sources, "kv_pages_used"), _value(sources, "kv_pages")
        share = (MetricSample(_share(used, pages)),)
        yield MetricFamily(
            "kv_cache_usage_perc", "gauge", "KV pages in use, 1 is all", share, prefix
        )
        labels = (("block_size", str(PAGE_TOKENS)), ("num_gpu_blocks", str(int(pages))))
        info = (MetricSample(1, labels),)
        yield MetricFamily("cache_config_info", "gauge", "The KV cache", info, prefix)
    if "requests" in sources:
        ends = tuple(
            MetricSample(sample.value, (("finished_reason", _FINISHED[outcome]),))
            for sample in sources["requests"].samples
            for _, outcome in sample.labels
        )
        yield MetricFamily("request_success", "counter", "Requests that ended", ends, prefix)
    if "cached_tokens" in sources:
        asked = _value(sources, "cached_tokens") + _value(sources, "prompt_tokens")
        queries = (MetricSample(asked),)
        yield MetricFamily(
            "prefix_cache_queries", "counter", "Prompt tokens, cached or not", queries, prefix
        )


def _sglang_only(sources: _Sources, prefix: str) -> Iterator[MetricFamily]:
    if "kv_pages" in sources:
        used, pages = _value(sources, "kv_pages_used"), _value(sources, "kv_pages")
        tokens, share = (MetricSample(used * PAGE_TOKENS),), (MetricSample(_share(used, pages)),)
        yield MetricFamily("num_used_tokens", "gauge", "Tokens of KV pages in use", tokens, prefix)
        yield MetricFamily("token_usage", "gauge", "KV pages in use, 1 is all", share, prefix)
    if "cached_tokens" in sources:
        hits = _value(sources, "cached_tokens")
        rate = (MetricSample(_share(hits, hits + _value(sources, "prompt_tokens"))),)
        yield MetricFamily(
            "cache_hit_rate", "gauge", "Share of prompt tokens from the cache", rate, prefix
        )


_MORE: Final[Mapping[str, Callable[[_Sources, str], Iterator[MetricFamily]]]] = {
    "vllm:": _vllm_only,
    "sglang:": _sglang_only,
}
"""Aliases that are computed."""


def _value(sources: _Sources, name: str) -> float:
    return sum(sample.value for sample in sources[name].samples)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
