"""The last errors that requests were answered with, for whoever looks after the server."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ninfer.contract.errors import NInferError, RequestError

MAX_KEPT: Final = 20
_MAX_NAME: Final = 80
_STRAY_CODES: Final = frozenset({"invalid_api_key", "method_not_allowed", "not_found"})
"""Sent to whoever tries doors; they would push out what is worth seeing."""


@dataclass(frozen=True, slots=True)
class RecentError:
    """No texts: messages may quote what clients sent."""

    time: str
    path: str
    code: str
    param: str | None
    request_id: str


class RecentErrors:
    """The newest `MAX_KEPT` and how many there were since the start."""

    def __init__(self) -> None:
        self._kept: deque[RecentError] = deque(maxlen=MAX_KEPT)
        self.total = 0

    def note(self, error: Exception, path: str, request_id: str) -> None:
        code = error.code if isinstance(error, NInferError) else NInferError.code
        if code in _STRAY_CODES:
            return
        self.total += 1
        param = error.param if isinstance(error, RequestError) else None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._kept.append(
            RecentError(now, path[:_MAX_NAME], code, param and param[:_MAX_NAME], request_id)
        )

    def as_json(self) -> list[dict[str, Any]]:
        """Newest first."""
        return [asdict(error) for error in reversed(self._kept)]
