"""Counts of what happened on the HTTP surface, kept for the metrics page and for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ninfer.gateway.http_metrics import HttpMetrics
from ninfer.gateway.recent_errors import RecentErrors


@dataclass(slots=True)
class GatewayCounters:
    """Totals since start.

    exchanges_active     requests being answered right now
    aborts               connections that went away before their answer was complete
    surrogates_replaced  lone surrogates of request texts that became U+FFFD
    http                 requests by route, and how long they took
    errors               what requests were answered with
    """

    exchanges_active: int = 0
    exchanges_total: int = 0
    aborts: int = 0
    surrogates_replaced: int = 0
    errors: RecentErrors = field(default_factory=RecentErrors)
    http: HttpMetrics = field(default_factory=HttpMetrics)
