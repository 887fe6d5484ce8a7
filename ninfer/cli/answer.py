"""One answer: from a prepared prompt through the engine to streamed text and its figures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

from ninfer.cli.call_text import CallTexts
from ninfer.contract.chat import ToolCall
from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import (
    Admitted,
    Channel,
    Failed,
    Finish,
    Finished,
    FinishReason,
    GenerationEngine,
    GenerationRequest,
    OutputDelta,
    Progress,
    Timings,
    Usage,
)

TextWriter: TypeAlias = Callable[[Channel, str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, why it ended and what it took."""

    text: str
    reasoning: str
    finish: Finish
    usage: Usage
    timings: Timings
    calls: tuple[ToolCall, ...] = ()

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed; None when there was no step to measure."""
        steps = self.usage.completion_tokens - 1
        if steps <= 0 or self.timings.decode_s <= 0.0:
            return None
        return steps / self.timings.decode_s


class StopSwitch:
    """Ctrl-C as "stop this": remembered until there is something to cancel, then its cancel."""

    def __init__(self) -> None:
        self.is_pressed = False
        self._cancel: Callable[[], object] | None = None

    def press(self) -> None:
        self.is_pressed = True
        if self._cancel is not None:
            self._cancel()

    def bind(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        if self.is_pressed:
            cancel()

    @contextmanager
    def on_interrupt(self, call_soon: Callable[[Callable[[], None]], object]) -> Iterator[None]:
        """While inside, SIGINT presses the switch (through the loop's `call_soon_threadsafe`)."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            call_soon(self.press)

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


async def stream_answer(
    engine: GenerationEngine,
    request: GenerationRequest,
    write: TextWriter,
    stop: StopSwitch | None = None,
) -> Answer:
    """Run `request`, hand text to `write` as it becomes final, a call as `name(arguments)`.

    Raises what preparing it and `submit` raise, and the error of a request that failed.
    """
    if request.prepare is not None:
        await request.prepare()
    said: dict[Channel, list[str]] = {"reasoning": [], "content": []}
    calls = CallTexts()

    def publish(deltas: tuple[OutputDelta, ...]) -> None:
        for delta in deltas:
            if delta.channel == "call":
                write("call", calls.add(delta))
            elif delta.text:
                said[delta.channel].append(delta.text)
                write(delta.channel, delta.text)

    async with engine.submit(request) as handle:
        if stop is not None:
            stop.bind(handle.cancel)
        async for event in handle:
            match event:
                case Admitted():
                    pass
                case Progress(deltas=deltas):
                    publish(deltas)
                case Finished():
                    publish(event.deltas)
                    text, reasoning = "".join(said["content"]), "".join(said["reasoning"])
                    return Answer(
                        text, reasoning, event.finish, event.usage, event.timings, calls.complete()
                    )
                case Failed(error=error):
                    raise error
    raise InvariantError(f"request {request.request_id} ended without a last event")


def remark_on(finish: Finish) -> str | None:
    """Why an answer ended, where a user should know; None for a natural end."""
    match finish.reason:
        case FinishReason.STOP_TOKEN | FinishReason.STOP_STRING | FinishReason.TOOL_CALL:
            return None
        case FinishReason.OUTPUT_LIMIT:
            return "cut at max_tokens"
        case FinishReason.CONTEXT_CAPACITY:
            return "cut, the context is full"
        case FinishReason.CANCELLED:
            return "stopped"


def report_of(answer: Answer) -> str:
    """`[12 prompt + 40 answer tokens, 81.3 tokens/s, 0.6 s]`"""
    usage, speed = answer.usage, answer.tokens_per_s
    thinking = f" ({usage.reasoning_tokens} thinking)" if usage.reasoning_tokens else ""
    parts = [
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} answer tokens{thinking}",
        *([f"{speed:.1f} tokens/s"] if speed is not None else []),
        f"{answer.timings.total_s:.2f} s",
    ]
    remark = remark_on(answer.finish)
    return f"[{', '.join(parts)}{f'; {remark}' if remark else ''}]"
