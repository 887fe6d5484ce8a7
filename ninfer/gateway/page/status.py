"""GET /v1/status: where the server stands, small enough to be asked for every second.

Totals only ever grow; `clock_s` is the clock by which a reader of two answers gets rates.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

import ninfer
from ninfer.contract.metrics import MetricFamily
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.lifecycle import ServedModel


async def status(exchange: Exchange) -> web.StreamResponse:
    """Also while the model is loading; always 200, `status` says how things stand."""
    model, counters, card = exchange.lifecycle.model, exchange.counters, exchange.lifecycle.card
    return exchange.json(
        {
            "status": exchange.lifecycle.health.value,
            "clock_s": time.monotonic(),
            "version": ninfer.__version__,
            "model": {"id": exchange.served_name, "max_context": card.max_context},
            "http": {
                "active": counters.exchanges_active,
                "total": counters.exchanges_total,
                "aborts": counters.aborts,
            },
            "engine": None if model is None else _engine_object(model),
            "cache": None if model is None else _cache_object(model.metrics()),
            "errors": {"total": counters.errors.total, "last": counters.errors.as_json()},
        }
    )


def _engine_object(model: ServedModel) -> dict[str, Any]:
    now = model.engine.status()
    return {
        "running": now.running,
        "max_concurrency": now.max_concurrency,
        "waiting": now.waiting,
        "max_pending": now.max_pending,
        "pages_used": now.pages_used,
        "pages_total": now.pages_total,
        "prompt_tokens_total": now.prompt_tokens_total,
        "completion_tokens_total": now.completion_tokens_total,
        "error": now.error,
    }


def _cache_object(families: Iterable[MetricFamily]) -> dict[str, Any] | None:
    """None when the engine reports no cache."""
    by_name = {family.name: family for family in families}
    if "cache_hits" not in by_name:
        return None
    columns = {
        "hits": _by_label(by_name["cache_hits"], "tier"),
        "hit_tokens": _by_label(by_name["cache_hit_tokens"], "tier"),
        "checkpoints": _by_label(by_name["cache_tier_checkpoints"], "tier"),
        "tokens": _by_label(by_name["cache_tier_tokens"], "tier"),
        "bytes": _by_label(by_name["cache_tier_bytes"], "tier"),
    }
    return {
        "cached_tokens_total": sum(columns["hit_tokens"].values()),
        "tiers": {
            tier: {name: column.get(tier, 0) for name, column in columns.items()}
            for tier in columns["bytes"]
        },
        "misses": _by_label(by_name["cache_misses"], "reason"),
    }


def _by_label(family: MetricFamily, label: str) -> dict[str, float]:
    """Sums of the samples with the same value of one label."""
    sums: dict[str, float] = {}
    for sample in family.samples:
        key = dict(sample.labels)[label]
        sums[key] = sums.get(key, 0) + sample.value
    return sums
