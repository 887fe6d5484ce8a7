"""A response from its admission to its end: the object, whole or as a stream of events.

    opening -> add* -> complete | fail

Both forms are made of the same items, so a streamed response is the whole one told in pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ninfer.contract.errors import NInferError, RequestError, Unavailable
from ninfer.contract.generation import Admitted, Usage
from ninfer.gateway.answer_parts import finish_reason
from ninfer.gateway.answers import Ending
from ninfer.gateway.choices import LiveEvent
from ninfer.gateway.errors import describe_error
from ninfer.gateway.responses.output_items import Event
from ninfer.gateway.responses.output_recorder import OutputRecorder
from ninfer.gateway.sse import event_frame

_FAILURES: Final[Mapping[str, str]] = {
    "context_length_exceeded": "context_length_exceeded",
    "request_aborted": "server_error",
    "server_overloaded": "rate_limit_exceeded",
}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What stays the same. `created_s`: seconds since the epoch; `echo`: repeats the request."""

    response_id: str
    model: str
    created_s: int
    echo: Mapping[str, Any]

    def as_json(
        self, status: str, output: Sequence[Mapping[str, Any]] = (), **ending: Any
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            **self.echo,
            "usage": None,
            **ending,
        }


class ResponseAnswer:
    """`keep`, if any, is given the response once, when it has ended."""

    def __init__(
        self,
        head: ResponseHead,
        recorder: OutputRecorder,
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._head = head
        self._recorder = recorder
        self._keep = keep
        self._ending = Ending()

    def begun(self) -> dict[str, Any]:
        return self._head.as_json("in_progress")

    def add(self, event: LiveEvent) -> list[Event]:
        self._ending.update(event)
        return [] if isinstance(event, Admitted) else self._recorder.add(event.deltas)

    def complete(self) -> tuple[dict[str, Any], list[Event]]:
        """The response, and the events that close its last item."""
        is_cut = finish_reason(self._ending.require_finish()) == "length"
        events = self._recorder.finish(is_cut=is_cut)
        if is_cut:
            reason = {"reason": "max_output_tokens"}
            return self._ended("incomplete", incomplete_details=reason), events
        return self._ended("completed", completed_at=int(time.time())), events

    def fail(self, error: Exception) -> tuple[dict[str, Any], list[Event]]:
        """As `complete` does; what is open is cut."""
        events = self._recorder.finish(is_cut=True)
        return self._ended("failed", error=failure_object(error)), events

    def _ended(self, status: str, **ending: Any) -> dict[str, Any]:
        usage = usage_object(self._ending.usage)
        response = self._head.as_json(status, self._recorder.output(), usage=usage, **ending)
        if self._keep is not None:
            self._keep(response)
        return response


class ResponseBuilder:
    """Collects all events into one response."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def add(self, index: int, event: LiveEvent) -> None:
        self._answer.add(event)

    def answer(self) -> dict[str, Any]:
        response, _ = self._answer.complete()
        return response


class ResponseWriter:
    """Turns events into frames. Each has the next number; so has one that only breaks silence."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._begun = answer.begun()
        self._next_number = 0

    def opening(self) -> Iterator[bytes]:
        yield self._response_frame("created", self._begun)
        yield self.keep_alive()

    def frames(self, index: int, event: LiveEvent) -> Iterable[bytes]:
        return map(self._frame, self._answer.add(event))

    def closing(self) -> Iterator[bytes]:
        response, events = self._answer.complete()
        yield from map(self._frame, events)
        yield self._response_frame(response["status"], response)

    def keep_alive(self) -> bytes:
        """Readers count parsed events only, so that a comment would not do."""
        return self._response_frame("in_progress", self._begun)

    def failure(self, error: Exception) -> bytes:
        response, events = self._answer.fail(error)
        frames = [self._frame(event) for event in events]
        return b"".join([*frames, self._response_frame("failed", response)])

    def _response_frame(self, what: str, response: Mapping[str, Any]) -> bytes:
        return self._frame({"type": f"response.{what}", "response": response})

    def _frame(self, event: Event) -> bytes:
        kind = event["type"]
        frame = event_frame(kind, {"sequence_number": self._next_number, **event})
        self._next_number += 1
        return frame


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_object(error: Exception) -> dict[str, str]:
    """`error` of a response that failed after its stream had begun."""
    own_code = error.code if isinstance(error, NInferError) else ""
    fallback = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
    code = _FAILURES.get(own_code, fallback)
    message = str(describe_error(error).body["error"]["message"])
    if code == "rate_limit_exceeded" and isinstance(error, Unavailable):
        wait_s = max(1, round(error.retry_after_s or 1.0))
        message = f"{message} Please try again in {wait_s}s."
    return {"code": code, "message": message}
