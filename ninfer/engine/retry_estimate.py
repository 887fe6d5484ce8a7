"""When a place or a lane is likely to be free, for `Retry-After`.

How long a request still runs is not known. It is expected to take as long as requests do on
average; one that has run for longer, or when none has ended yet, as long again as it has run so
far. Of several that run, one ends the sooner the more there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ninfer.engine.metrics import EngineMetrics
from ninfer.engine.request_record import Phase, RequestRecord

MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0


def until_ends_s(ages_s: Sequence[float], mean_s: float | None, num_ends: int = 1) -> float:
    """Estimated time until `num_ends` of the requests that run, or follow them, have ended.

    ages_s   how long each has run
    mean_s   how long requests ran that have ended; None: none has
    Returns MIN_RETRY_S to MAX_RETRY_S.
    """
    rate = sum(1.0 / max(_rest_s(age_s, mean_s or 0.0), MIN_RETRY_S) for age_s in ages_s)
    estimate_s = num_ends / rate if rate else 0.0
    return min(max(estimate_s, MIN_RETRY_S), MAX_RETRY_S)


def _rest_s(age_s: float, mean_s: float) -> float:
    return max(mean_s - age_s, age_s)


class RetryEstimates:
    """Estimates from the requests there are.

    records          all of them, by ticket
    longest_wait_s   how long one waits for a lane before it gives up
    """

    def __init__(
        self,
        records: Mapping[int, RequestRecord],
        metrics: EngineMetrics,
        clock: Callable[[], float],
        longest_wait_s: Callable[[RequestRecord], float],
    ) -> None:
        self._records = records
        self._metrics = metrics
        self._clock = clock
        self._longest_wait_s = longest_wait_s

    def until_place_s(self) -> float:
        """Until one of them ends, or gives up waiting."""
        now = self._clock()
        ends = [
            record.submitted_s + self._longest_wait_s(record) - now for record in self._waiting()
        ]
        return max(min([self._until_ends_s(1), *ends]), MIN_RETRY_S)

    def until_lane_s(self, record: RequestRecord) -> float:
        """Until `record`, behind all others that wait, has a lane."""
        return self._until_ends_s(1 + sum(other is not record for other in self._waiting()))

    def _until_ends_s(self, num_ends: int) -> float:
        now = self._clock()
        admitted_s = [record.admitted_s for record in self._records.values()]
        ages_s = [now - start_s for start_s in admitted_s if start_s is not None]
        return until_ends_s(ages_s, self._metrics.request_s_mean, num_ends)

    def _waiting(self) -> list[RequestRecord]:
        return [record for record in self._records.values() if record.phase is Phase.WAITING]
