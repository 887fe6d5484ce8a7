"""How each of the engine requests behind an HTTP request ended, told once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from ninfer.contract.errors import NInferError
from ninfer.contract.generation import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Timings,
    Usage,
)
from ninfer.gateway.answer_parts import cache_object

FAILED: Final = "failed"
ABORTED: Final = "aborted"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """Figures only: nothing that was said.

    finish    how it ended: the engine's reason, `failed`, or `aborted` by its client
    error     code of the error it failed with
    timings   of a request that finished
    """

    request_id: str
    usage: Usage
    finish: str
    error: str | None = None
    timings: Timings | None = None

    def because_of(self, failure: NInferError | None, *, is_told: bool) -> RequestEnd:
        """The same; where nobody read it to its end, with the reason. `is_told`: its client was
        given the reason, so that it did not leave."""
        if failure is None or self.finish != ABORTED:
            return self
        finish = FAILED if is_told else ABORTED
        return replace(self, finish=finish, error=self.error or failure.code)

    def as_json(self) -> dict[str, Any]:
        usage, timings = self.usage, self.timings
        return {
            "time": now_text(),
            "request_id": self.request_id,
            "finish": self.finish,
            "error": self.error,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "cached_tokens": usage.cached_tokens,
            "cache": None if usage.cache is None else cache_object(usage.cache),
            "queue_s": None if timings is None else timings.queue_s,
            "prefill_s": None if timings is None else timings.prefill_s,
            "decode_s": None if timings is None else timings.decode_s,
            "total_s": None if timings is None else timings.total_s,
        }


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RequestWatcher(Protocol):
    """Is told of the engine requests behind one HTTP request."""

    def note_begin(self, request_ids: Sequence[str]) -> None:
        """They are about to be submitted. An HTTP request may have several."""

    def note_end(self, end: RequestEnd) -> None:
        """Once for each request that was let in."""


class EndReports:
    """Watches the events of some requests and tells of each when it ends."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        watcher: RequestWatcher | None,
    ) -> None:
        self._watcher = watcher
        self._ids = [request.request_id for request in requests]
        self._open = {
            index: Usage(request.prompt.num_tokens) for index, request in enumerate(requests)
        }

    def begin(self) -> None:
        if self._watcher is not None:
            self._watcher.note_begin(self._ids)

    def note(self, index: int, event: Event) -> None:
        if index not in self._open:
            return
        self._open[index] = event.usage
        if isinstance(event, Finished):
            self._tell(index, event.finish.reason.value, timings=event.timings)
        elif isinstance(event, Failed):
            self._tell(index, FAILED, error=event.error.code)

    def close(self, error: BaseException | None) -> None:
        """Nobody reads on; `error` is why."""
        code = error.code if isinstance(error, NInferError) else None
        for index in list(self._open):
            self._tell(index, ABORTED, error=code)

    def _tell(
        self, index: int, finish: str, *, error: str | None = None, timings: Timings | None = None
    ) -> None:
        usage = self._open.pop(index)
        if self._watcher is not None:
            self._watcher.note_end(RequestEnd(self._ids[index], usage, finish, error, timings))
