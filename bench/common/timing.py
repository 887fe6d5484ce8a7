"""Timing of chains of kernels: captured once, replayed, medians of device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

WARM_UP_REPLAYS: Final = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds for one item of a chain."""

    median_us: float
    p95_us: float
    spread: float
    """(max - min) / median over the replays."""


def time_chain(
    cp: Any, stream: Any, enqueue: Callable[[int], None], *, items: int, replays: int = 9
) -> Timing:
    """Capture enqueue(0) .. enqueue(items - 1) on `stream` and time replays of the graph.

    The items should touch different memory, so that the cache is cold for each; every entry has
    to be loaded already.
    """
    stream.begin_capture()
    for item in range(items):
        enqueue(item)
    graph = stream.end_capture()
    samples = []
    for replay in range(replays + WARM_UP_REPLAYS):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        if replay >= WARM_UP_REPLAYS:
            samples.append(cp.cuda.get_elapsed_time(start, end) * 1000.0 / items)
    samples.sort()
    median = statistics.median(samples)
    p95 = samples[min(len(samples) - 1, round(0.95 * (len(samples) - 1)))]
    return Timing(median, p95, (samples[-1] - samples[0]) / median)
