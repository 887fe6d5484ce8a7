"""/metrics in Prometheus text, and /flush_cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ninfer.contract.errors import InvariantError
from ninfer.contract.metrics import MetricFamily, MetricSample, counter, gauge
from ninfer.gateway.counters import GatewayCounters
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.metric_aliases import alias_families

_MODEL_LABEL: Final = "model_name"
_AnyMetric: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_KINDS: Final[Mapping[str, type[_AnyMetric]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


async def metrics(exchange: Exchange) -> web.StreamResponse:
    """Also while the model is loading: what is known then."""
    model = exchange.lifecycle.model
    families = [*gateway_families(exchange.counters), *(model.metrics() if model else ())]
    families += alias_families(families, exchange.options.metric_aliases)
    # Writing takes milliseconds, in which streams would stand still.
    text = await asyncio.to_thread(prometheus_text, families, exchange.served_name)
    return exchange.text(text, CONTENT_TYPE_LATEST)


async def flush_cache(exchange: Exchange) -> web.StreamResponse:
    """Release what the context cache holds and nobody uses. Raises Unavailable."""
    exchange.lifecycle.require_model().engine.flush_cache()
    return exchange.json({"status": "ok"})


def gateway_families(counters: GatewayCounters) -> list[MetricFamily]:
    return [
        gauge("http_exchanges_active", "HTTP requests being answered", counters.exchanges_active),
        counter("http_exchanges", "HTTP requests", counters.exchanges_total),
        counter(
            "http_aborts",
            "HTTP requests whose client left before the answer was complete",
            counters.aborts,
        ),
        counter(
            "http_surrogates_replaced",
            "Lone surrogates in request texts that became U+FFFD",
            counters.surrogates_replaced,
        ),
        *counters.http.families(),
    ]


def prometheus_text(families: Sequence[MetricFamily], model_name: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families, model_name))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[MetricFamily], model_name: str) -> None:
        self._families = families
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering collects nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            names = [
                _MODEL_LABEL,
                *(name for sample in family.samples[:1] for name, _ in sample.labels),
            ]
            metric = _KINDS[family.kind](family.prefix + family.name, family.help, labels=names)
            for sample in family.samples:
                _add(metric, [self._model_name, *(value for _, value in sample.labels)], sample)
            yield metric


def _add(metric: _AnyMetric, labels: list[str], sample: MetricSample) -> None:
    if not isinstance(metric, HistogramMetricFamily):
        metric.add_metric(labels, sample.value)
        return
    if sample.distribution is None:
        raise InvariantError(f"{metric.name} has no distribution")
    edges = [*map(floatToGoString, sample.distribution.edges), "+Inf"]
    totals = accumulate(sample.distribution.counts)
    buckets = list(zip(edges, map(float, totals), strict=True))
    metric.add_metric(labels, buckets, sample.distribution.sum)
