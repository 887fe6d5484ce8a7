"""Answers of the Responses API, whole and streamed, from deltas that a test makes up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ninfer.contract.chat import ToolSpec
from ninfer.contract.generation import (
    Admitted,
    Finish,
    Finished,
    FinishReason,
    OutputDelta,
    Progress,
    Usage,
)
from ninfer.gateway.choices import LiveEvent
from ninfer.gateway.responses.answer import (
    ResponseAnswer,
    ResponseBuilder,
    ResponseHead,
    ResponseWriter,
)
from ninfer.gateway.responses.output_recorder import OutputRecorder, OutputView
from ninfer.gateway.responses.tools import DeclaredTool, ToolSet
from ninfer.gateway.tool_fields import FunctionTool
from tests.helpers.answer_scripts import events_of
from tests.helpers.fake_engine import TIMINGS

TOOLS = ToolSet(
    (
        DeclaredTool(FunctionTool(ToolSpec("f")), "f"),
        DeclaredTool(FunctionTool(ToolSpec("patch"), is_custom=True), "patch"),
        DeclaredTool(FunctionTool(ToolSpec("box.g")), "g", "box"),
    )
)
STOP, LIMIT = FinishReason.STOP_TOKEN, FinishReason.OUTPUT_LIMIT


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id])


def make_answer(
    kept: list[dict[str, Any]] | None = None, view: OutputView | None = None
) -> ResponseAnswer:
    head = ResponseHead("resp_" + "x" * 24, "m", 1_700_000_000, {"metadata": {}, "tools": []})
    recorder = OutputRecorder(view or OutputView(), TOOLS, token_bytes)
    kept = [] if kept is None else kept
    return ResponseAnswer(head, recorder, kept.append)


def events_for(deltas: Sequence[OutputDelta], reason: FinishReason = STOP) -> list[LiveEvent]:
    """The last delta comes with the end."""
    *early, last = [*deltas, None]
    usage = Usage(3, len(deltas))
    ends: tuple[OutputDelta, ...] = () if last is None else (last,)
    return [
        Admitted(Usage(3)),
        *(Progress((delta,), usage) for delta in early if delta is not None),
        Finished(Finish(reason), ends, usage, TIMINGS),
    ]


def streamed(events: Iterable[LiveEvent], **view: bool) -> list[dict[str, Any]]:
    writer = ResponseWriter(make_answer(view=OutputView(**view)))
    frames = [*writer.opening()]
    for event in events:
        frames += writer.frames(0, event)
    return events_of(b"".join([*frames, *writer.closing()]))


def whole(events: Iterable[LiveEvent], **view: bool) -> dict[str, Any]:
    builder = ResponseBuilder(make_answer(view=OutputView(**view)))
    for event in events:
        builder.add(0, event)
    return builder.answer()
