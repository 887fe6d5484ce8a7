"""Outbox: events that are formed but not yet visible to consumers.

The worker forms events while the device is idle and publishes them once the next unit runs.
"""

from __future__ import annotations

from ninfer.contract.generation import Event, Failed, Finished
from ninfer.engine.request_record import RequestRecord


class Outbox:
    def __init__(self) -> None:
        self._events: list[tuple[RequestRecord, Event]] = []

    def add(self, record: RequestRecord, event: Event) -> None:
        self._events.append((record, event))

    def publish(self) -> None:
        """Hand over everything in order. A terminal event gives up the response's half of the
        request's place."""
        events, self._events = self._events, []
        for record, event in events:
            record.stream.push(event)
            if isinstance(event, Finished | Failed):
                record.place.let_go_response()
