"""/metrics in Prometheus text, and /flush_cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ninfer.contract.metrics import MetricFamily, counter, gauge
from ninfer.gateway.counters import GatewayCounters
from ninfer.gateway.exchange import Exchange

_PREFIX: Final = "ninfer_"
_MODEL_LABEL: Final = "model_name"


async def metrics(exchange: Exchange) -> web.StreamResponse:
    """Also while the model is loading: what is known then."""
    model = exchange.lifecycle.model
    families = [*gateway_families(exchange.counters), *(model.metrics() if model else ())]
    return exchange.text(prometheus_text(families, exchange.served_name), CONTENT_TYPE_LATEST)


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
            names = [name for sample in family.samples[:1] for name, _ in sample.labels]
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(_PREFIX + family.name, family.help, labels=[_MODEL_LABEL, *names])
            for sample in family.samples:
                values = [self._model_name, *(value for _, value in sample.labels)]
                metric.add_metric(values, sample.value)
            yield metric
