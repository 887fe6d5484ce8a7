"""Figures that parts report for monitoring, whatever writes them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MetricSample:
    value: float
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """`name` has no product prefix and, of a counter, no `_total`; units stand at its end."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: tuple[MetricSample, ...]


def counter(name: str, help: str, value: float) -> MetricFamily:
    return MetricFamily(name, "counter", help, (MetricSample(value),))


def gauge(name: str, help: str, value: float) -> MetricFamily:
    return MetricFamily(name, "gauge", help, (MetricSample(value),))
