"""Endings: every way a request ends, and the one terminal event that says so.

A request gives back what it owns, then its event is formed; the outbox publishes it later.
"""

from __future__ import annotations

from collections.abc import Callable

from ninfer.contract.errors import NInferError, Unavailable
from ninfer.contract.generation import (
    Failed,
    Finish,
    Finished,
    FinishReason,
    OutputDelta,
    Progress,
)
from ninfer.engine.metrics import EngineMetrics
from ninfer.engine.outbox import Outbox
from ninfer.engine.request_record import Phase, RequestRecord
from ninfer.engine.settlement import call_session


class Endings:
    def __init__(
        self,
        release: Callable[[RequestRecord], None],
        outbox: Outbox,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        """`release` gives back all that a request owns."""
        self._release = release
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock

    def finish(
        self, record: RequestRecord, finish: Finish, deltas: tuple[OutputDelta, ...] = ()
    ) -> None:
        """It ended normally, with `deltas` as the last it has to show."""
        self._retire(record)
        timings = record.timings(self._clock())
        usage = record.usage()
        self._metrics.note_finished(finish.reason, timings)
        if finish.reason is not FinishReason.CANCELLED:
            self._metrics.histograms.note_ended(timings, usage, record.request.max_tokens)
        self._outbox.add(record, Finished(finish, deltas, usage, timings))

    def fail(self, record: RequestRecord, error: NInferError) -> None:
        self._retire(record)
        self._metrics.note_failed(error)
        self._outbox.add(record, Failed(error, record.usage()))

    def cut_off(self, record: RequestRecord, error: NInferError | None) -> None:
        """End from outside: as cancelled, or with `error`. Text held back is shown first."""
        try:
            deltas = _flush(record)
        except NInferError as session_error:
            self.fail(record, session_error)
            return
        if error is None:
            self.finish(record, Finish(FinishReason.CANCELLED), deltas)
            return
        if deltas:
            self._outbox.add(record, Progress(deltas, record.usage()))
        self.fail(record, error)

    def answer_stopped(self, record: RequestRecord) -> None:
        """The engine has stopped. What the request owns is left to the Program's own end."""
        if record.is_resident:
            record.move(Phase.MODEL_FINISHED)
        record.move(Phase.DONE)
        error = Unavailable("engine_unavailable", "the engine has stopped")
        self._metrics.note_failed(error)
        self._outbox.add(record, Failed(error, record.usage()))

    def _retire(self, record: RequestRecord) -> None:
        self._metrics.broken_calls_total += record.broken_calls
        if record.is_resident:
            record.move(Phase.MODEL_FINISHED)
        self._release(record)
        record.move(Phase.DONE)


def _flush(record: RequestRecord) -> tuple[OutputDelta, ...]:
    if record.completion_tokens == 0:
        return ()
    return call_session(record, record.request.session.flush)
