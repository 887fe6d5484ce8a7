from __future__ import annotations

import pytest

from ninfer.contract.errors import InvariantError, NonFiniteLogits
from ninfer.contract.generation import FinishReason, Timings
from ninfer.contract.metrics import Histogram
from ninfer.engine.metrics import EngineMetrics, Outcome
from tests.helpers.engine_rig import capacity, read, running_engine


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


def test_mean_running_time_is_that_of_requests_that_ran_to_their_end() -> None:
    metrics = EngineMetrics()
    assert metrics.request_s_mean is None
    metrics.note_finished(FinishReason.STOP_TOKEN, Timings(500.0, 10.0, 30.0, 540.0))
    metrics.note_finished(FinishReason.CANCELLED, Timings(0.0, 0.0, 0.0, 9000.0))
    assert metrics.request_s_mean == 40.0
    for _ in range(100):
        metrics.note_finished(FinishReason.STOP_TOKEN, Timings(0.0, 0.0, 900.0, 900.0))
    assert metrics.request_s_mean == pytest.approx(900.0, rel=0.01)


async def test_times_and_sizes_of_requests_are_spread_out() -> None:
    async with running_engine(capacity(lanes=2)) as rig:
        requests = [rig.request(10, max_tokens=3), rig.request(6, max_tokens=2)]
        for handle in [rig.engine.submit(request) for request in requests]:
            await read(handle)
        values = rig.engine.metrics.histograms
        assert counts_of(values.first_token) == (2, 0)
        assert counts_of(values.token_gap) == (3, 0)
        assert counts_of(values.prompt_tokens) == (2, 16)
        assert counts_of(values.output_tokens) == (2, 5)
        assert counts_of(values.max_output_tokens) == (2, 5)
        units = rig.engine.metrics.num_prefill_units + rig.engine.metrics.num_decode_units
        assert counts_of(values.unit_tokens) == (units, 16 + 3)


async def test_cancelled_requests_are_no_measure() -> None:
    async with running_engine() as rig:
        handle = rig.engine.submit(rig.request(max_tokens=500))
        handle.cancel()
        await read(handle)
        assert counts_of(rig.engine.metrics.histograms.total) == (0, 0)


def counts_of(values: Histogram) -> tuple[int, float]:
    spread = values.sample().distribution
    assert spread is not None
    return sum(spread.counts), spread.sum


async def test_broken_calls_are_counted() -> None:
    async with running_engine() as rig:
        await read(rig.engine.submit(rig.request(max_tokens=4)))
        assert rig.engine.metrics.broken_calls_total == 2  # one for each two tokens, as scripted
