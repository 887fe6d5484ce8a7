"""What the HTTP surface counts: requests by route and status, their times, errors by code."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final

from ninfer.contract.errors import NInferError
from ninfer.contract.metrics import Histogram, MetricFamily, MetricSample
from ninfer.gateway.errors import ERROR_RULES

ABORTED: Final = "aborted"
"""The status of a request whose client left before its answer was complete."""
_EDGES_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CHOICE_EDGES: Final = (1, 2, 5, 10, 20, 50, 100)


class HttpMetrics:
    """Labels come from tables of ours, never from what clients send, so their number is bounded."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._errors: Counter[str] = Counter()
        self.choices = Histogram(_CHOICE_EDGES)
        """Engine requests of one HTTP request."""

    def note_answered(self, route: str, method: str, status: int | None, seconds: float) -> None:
        """`status` is None where the client left first."""
        known = method if method in _METHODS else "other"
        text = ABORTED if status is None else f"{status // 100}xx"
        self._requests[route, known, text] += 1
        if (route, known) not in self._durations:
            self._durations[route, known] = Histogram(_EDGES_S)
        self._durations[route, known].observe(seconds)

    def note_error(self, error: BaseException) -> None:
        code = error.code if isinstance(error, NInferError) else NInferError.code
        self._errors[code if code in ERROR_RULES else NInferError.code] += 1

    def families(self) -> list[MetricFamily]:
        """The first two have the names that dashboards know, without a prefix."""
        counted = tuple(
            MetricSample(count, (("handler", route), ("method", method), ("status", status)))
            for (route, method, status), count in sorted(self._requests.items())
        )
        timed = tuple(
            values.sample((("handler", route), ("method", method)))
            for (route, method), values in sorted(self._durations.items())
        )
        errors = tuple(
            MetricSample(count, (("code", code),)) for code, count in sorted(self._errors.items())
        )
        add = partial(MetricFamily, prefix="")
        return [
            add("http_requests", "counter", "HTTP requests by route and status", counted),
            add("http_request_duration_seconds", "histogram", "Time to an answer's end", timed),
            MetricFamily("http_errors", "counter", "Errors that were answered, by code", errors),
            MetricFamily(
                "request_choices", "histogram", "Answers that one HTTP request asks for",
                (self.choices.sample(),),
            ),
        ]  # fmt: skip
