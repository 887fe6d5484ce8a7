"""ProgressLine: the one updating line a terminal shows while a model loads or is written."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Final, Self

from ninfer.cli.console import Console

_REDRAW_INTERVAL_S: Final = 0.1


class ProgressLine:
    """`weights 40%`, say, behind its verb; leaving the context wipes the line."""

    def __init__(self, console: Console, verb: str) -> None:
        self._console = console
        self._verb = verb
        self._drawn_at_s = -_REDRAW_INTERVAL_S
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = monotonic()
        is_due = now_s - self._drawn_at_s >= _REDRAW_INTERVAL_S
        if not is_due and stage == self._stage:
            return
        self._drawn_at_s, self._stage = now_s, stage
        share = f" {100 * done // total}%" if total > 0 else ""
        self._console.progress(f"{self._verb} {stage}{share}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._console.progress("")
