from __future__ import annotations

import pytest

from ninfer.contract.errors import InvariantError, NonFiniteLogits
from ninfer.contract.generation import FinishReason, Timings
from ninfer.engine.metrics import EngineMetrics, Outcome


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FinishReason.STOP_TOKEN, Outcome.STOP),
        (FinishReason.STOP_STRING, Outcome.STOP),
        (FinishReason.OUTPUT_LIMIT, Outcome.LENGTH),
        (FinishReason.CONTEXT_CAPACITY, Outcome.LENGTH),
        (FinishReason.CANCELLED, Outcome.CANCELLED),
    ],
)
def test_each_way_to_end_is_counted_once(reason: FinishReason, outcome: Outcome) -> None:
    metrics = EngineMetrics()
    metrics.note_finished(reason, Timings(0, 0, 0, 0))
    assert [key for key, count in metrics.requests_total.items() if count] == [outcome]
    assert metrics.requests_total[outcome] == 1


def test_failures_count_non_finite_rows_apart() -> None:
    metrics = EngineMetrics()
    metrics.note_failed(NonFiniteLogits("nan"))
    metrics.note_failed(InvariantError("bug"))
    assert metrics.requests_total[Outcome.ERROR] == 2
    assert metrics.non_finite_rows_total == 1


def test_retry_time_follows_the_running_time_within_its_bounds() -> None:
    metrics = EngineMetrics()
    assert metrics.retry_after_s(4) == 1.0
    metrics.note_finished(FinishReason.STOP_TOKEN, Timings(500.0, 10.0, 30.0, 540.0))
    assert metrics.retry_after_s(4) == 10.0
    metrics.note_finished(FinishReason.CANCELLED, Timings(0.0, 0.0, 0.0, 9000.0))
    assert metrics.retry_after_s(4) == 10.0
    for _ in range(100):
        metrics.note_finished(FinishReason.STOP_TOKEN, Timings(0.0, 0.0, 900.0, 900.0))
    assert metrics.retry_after_s(4) == 60.0
