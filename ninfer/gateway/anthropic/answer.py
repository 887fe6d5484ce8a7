"""Answers of /v1/messages: one message, or the stream of events that adds up to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import orjson

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import Admitted, Finish, Finished, FinishReason, Usage
from ninfer.gateway.answers import Ending
from ninfer.gateway.anthropic.block_events import (
    DELTA_FIELDS,
    BlockDelta,
    BlockEvent,
    BlockEvents,
    BlockStart,
    BlockStop,
    DeltaKind,
)
from ninfer.gateway.choices import LiveEvent
from ninfer.gateway.errors import ErrorFamily, describe_error
from ninfer.gateway.frame_template import FrameTemplate
from ninfer.gateway.sse import event_frame

PING_FRAME: Final = event_frame("ping", {"type": "ping"})
Stop: TypeAlias = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class MessageHead:
    """`request_id`: the exchange's, for errors inside a stream."""

    message_id: str
    model: str
    request_id: str
    hides_thinking: bool = False

    def message(
        self, content: list[Any], stop: tuple[str | None, str | None], usage: dict[str, Any]
    ) -> dict[str, Any]:
        reason, sequence = stop
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


def stop_of(finish: Finish, num_calls: int) -> Stop:
    """(stop_reason, stop_sequence). Whoever was cut off hears of that first; a complete call is to
    be run, whatever ended the turn behind it."""
    match finish.reason:
        case FinishReason.OUTPUT_LIMIT:
            return "max_tokens", None
        case FinishReason.CONTEXT_CAPACITY:
            return "model_context_window_exceeded", None
        case FinishReason.TOOL_CALL:
            return "tool_use", None
        case FinishReason.STOP_STRING | FinishReason.STOP_TOKEN if num_calls > 0:
            return "tool_use", None
        case FinishReason.STOP_STRING:
            return "stop_sequence", finish.matched if isinstance(finish.matched, str) else None
        case FinishReason.STOP_TOKEN:
            return "end_turn", None
        case FinishReason.CANCELLED:
            raise InvariantError("a request was cancelled while its client was still reading")


def input_usage(usage: Usage) -> dict[str, int]:
    """The three counts of a prompt; they add up to all of it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def full_usage(usage: Usage) -> dict[str, Any]:
    return {
        **input_usage(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessageBuilder:
    """Collects all events of a request into one message. A call that was cut off is left out."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._ending = Ending()
        self._blocks = BlockEvents(hides_thinking=head.hides_thinking)
        self._content: list[dict[str, Any]] = []
        self._block: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}

    def add(self, index: int, event: LiveEvent) -> None:
        self._ending.update(event)
        if isinstance(event, Admitted):
            return
        self._collect(self._blocks.add(event.deltas))
        if isinstance(event, Finished):
            self._collect(self._blocks.close())

    def answer(self) -> dict[str, Any]:
        stop = stop_of(self._ending.require_finish(), self._blocks.num_calls)
        return self._head.message(self._content, stop, full_usage(self._ending.usage))

    def _collect(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlockStart():
                    self._block, self._texts = dict(event.content), {}
                case BlockDelta():
                    self._texts.setdefault(DELTA_FIELDS[event.kind], []).append(event.text)
                case BlockStop():
                    if event.is_whole:
                        self._content.append(self._filled_block())

    def _filled_block(self) -> dict[str, Any]:
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        arguments = texts.pop("partial_json", None)
        if arguments is None:
            return self._block | texts
        return self._block | {"input": orjson.Fragment(arguments)}


class MessageWriter:
    """Turns events into frames. Those of deltas come from a template, one a block and kind."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._ending = Ending()
        self._blocks = BlockEvents(hides_thinking=head.hides_thinking)
        self._templates: dict[tuple[int, DeltaKind], FrameTemplate] = {}

    def opening(self) -> list[bytes]:
        """Nothing: the first event brings the usage that the first frame reports."""
        return []

    def frames(self, index: int, event: LiveEvent) -> list[bytes]:
        self._ending.update(event)
        if isinstance(event, Admitted):
            return [self._start_frame(event.usage), PING_FRAME]
        frames = [self._block_frame(item) for item in self._blocks.add(event.deltas)]
        if isinstance(event, Finished):
            frames += [self._block_frame(item) for item in self._blocks.close()]
        return frames

    def closing(self) -> list[bytes]:
        reason, sequence = stop_of(self._ending.require_finish(), self._blocks.num_calls)
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": full_usage(self._ending.usage),
        }
        return [_frame(end), _frame({"type": "message_stop"})]

    def keep_alive(self) -> bytes:
        return PING_FRAME

    def failure(self, error: Exception) -> bytes:
        answer = describe_error(error, ErrorFamily.ANTHROPIC, self._head.request_id)
        return event_frame("error", answer.body)

    def _start_frame(self, usage: Usage) -> bytes:
        counts = {**input_usage(usage), "output_tokens": 0}
        message = self._head.message([], (None, None), counts)
        return _frame({"type": "message_start", "message": message})

    def _block_frame(self, event: BlockEvent) -> bytes:
        match event:
            case BlockDelta():
                key = (event.index, event.kind)
                template = self._templates.get(key)
                if template is None:
                    template = self._templates[key] = FrameTemplate(partial(_delta_frame, *key))
                return template.fill(event.text)
            case BlockStart():
                payload = {"type": "content_block_start", "index": event.index}
                return _frame(payload | {"content_block": event.content})
            case BlockStop():
                return _frame({"type": "content_block_stop", "index": event.index})


def _delta_frame(index: int, kind: DeltaKind, text: str) -> bytes:
    delta = {"type": kind, DELTA_FIELDS[kind]: text}
    return _frame({"type": "content_block_delta", "index": index, "delta": delta})


def _frame(payload: dict[str, Any]) -> bytes:
    return event_frame(payload["type"], payload)
