"""Figures that parts report for monitoring, whatever writes them out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """How observed values are spread: `counts` of each bucket, the last one without an edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One figure; of a histogram the sum of the values, and `distribution` is set."""

    value: float
    labels: Labels = ()
    distribution: Distribution | None = None


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """`name` has neither `prefix` nor, of a counter, `_total`; units stand at its end."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[MetricSample, ...]
    prefix: str = "ninfer_"


class Histogram:
    """Counts values in buckets; an edge belongs to the bucket that it closes."""

    __slots__ = ("_counts", "_edges", "_sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def sample(self, labels: Labels = ()) -> MetricSample:
        return MetricSample(
            self._sum, labels, Distribution(self._edges, tuple(self._counts), self._sum)
        )


def counter(name: str, help: str, value: float) -> MetricFamily:
    return MetricFamily(name, "counter", help, (MetricSample(value),))


def gauge(name: str, help: str, value: float) -> MetricFamily:
    return MetricFamily(name, "gauge", help, (MetricSample(value),))


def histogram(name: str, help: str, values: Histogram) -> MetricFamily:
    return MetricFamily(name, "histogram", help, (values.sample(),))
