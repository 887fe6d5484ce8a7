"""What the request log is told of one HTTP request: its body on demand, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ninfer.contract.errors import NInferError, RequestError
from ninfer.gateway.request_end import RequestEnd, now_text
from ninfer.gateway.request_log import RequestLog
from ninfer.gateway.trace import Trace

REFUSED: Final = "refused"
"""How a request ended that no engine request came of."""


class ExchangeLog:
    """The lines of one exchange; they have a head in common.

    log          where they go, if anywhere
    logs_bodies  also what clients send
    """

    def __init__(
        self, log: RequestLog | None, request_id: str, path: str, trace: Trace, *, logs_bodies: bool
    ) -> None:
        self._log = log
        self._head = {
            "exchange_id": request_id,
            "trace_id": trace.trace_id,
            "parent_span_id": trace.parent_id,
            "path": path,
        }
        self._logs_bodies = logs_bodies
        self._has_read = False
        self._has_ended = False

    def note_body(self, body: Mapping[str, Any]) -> None:
        """A body was received and is JSON. May be called from a thread."""
        if self._log is not None and self._logs_bodies:
            self._log.write({**self._head, "time": now_text(), "body": body})

    def note_read(self) -> None:
        """The request is one with a body: whatever becomes of it is worth a line."""
        self._has_read = True

    def note_end(self, end: RequestEnd) -> None:
        """One of its engine requests has ended."""
        self._has_ended = True
        if self._log is not None:
            self._log.write({**self._head, **end.as_json()})

    def note_error(self, error: Exception) -> None:
        """It is answered with an error, before any engine request ended."""
        if self._log is None or self._has_ended or not self._has_read:
            return
        line = {
            "time": now_text(),
            "request_id": None,
            "finish": REFUSED,
            "error": error.code if isinstance(error, NInferError) else NInferError.code,
            "param": error.param if isinstance(error, RequestError) else None,
        }
        self._log.write({**self._head, **line})
