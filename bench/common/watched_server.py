"""`ninfer serve` with events round every decode graph: how long the device waits between two.

    python -m bench.common.watched_server RECORD.json MODEL [options of serve]

The record is written when the server ends. By number of rows: what lay between two decode graphs
that followed each other without a prompt in between. Recording the event ahead of a graph lies in
the gap, as the copies of inputs and results do.

    gap      from the event behind a graph to the event ahead of the next one
    period   from the end of a graph to the end of the next one
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ninfer.cli.main import main as run_command
from ninfer.program import cuda_loader
from ninfer.program.executors.cuda_device import CudaDevice
from ninfer.program.executors.cuda_driver import Graph

_SKIPPED: Final = 4
"""Steps of each size that warm up."""
_MOST_STEPS: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Step:
    """A replayed graph; `follows` is None for the first behind a prompt."""

    num_rows: int
    start: Any
    end: Any
    follows: _Step | None


class WatchedDevice(CudaDevice):
    """A CudaDevice that remembers its replays."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[_Step] = []
        self._events = [self._cupy.cuda.Event() for _ in range(2 * _MOST_STEPS)]
        self._rows: dict[int, int] = {}
        self._graphs: list[Graph] = []
        self._newest: _Step | None = None
        self._is_replayed = False
        opened.append(self)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Graphs come in the order of their sizes, from 1."""
        graph = super().capture(enqueue)
        self._graphs.append(graph)
        self._rows[id(graph)] = len(self._graphs)
        return graph

    def replay(self, graph: Graph) -> None:
        start, end = self._events.pop(), self._events.pop()
        self._runtime.eventRecord(start.ptr, self.stream)
        super().replay(graph)
        self._runtime.eventRecord(end.ptr, self.stream)
        step = _Step(self._rows[id(graph)], start, end, self._newest)
        self._newest, self._is_replayed = step, True
        self.steps.append(step)

    def mark(self, place: int = 0) -> None:
        """Behind a unit; one without a graph is a prompt."""
        if not self._is_replayed:
            self._newest = None
        self._is_replayed = False
        super().mark(place)

    def figures(self) -> dict[str, Any]:
        """Microseconds by number of rows."""
        elapsed = self._cupy.cuda.get_elapsed_time
        gaps: dict[int, list[tuple[float, ...]]] = {}
        for step in self.steps:
            before = step.follows
            if before is not None and before.num_rows == step.num_rows:
                gaps.setdefault(step.num_rows, []).append(
                    (
                        1e3 * elapsed(before.end, step.start),
                        1e3 * elapsed(before.end, step.end),
                    )
                )
        return {
            str(rows): {
                name: _spread(column)
                for name, column in zip(
                    ("gap_us", "period_us"),
                    zip(*found[_SKIPPED:], strict=True),
                    strict=True,
                )
            }
            for rows, found in sorted(gaps.items())
            if len(found) > 2 * _SKIPPED
        }


opened: list[WatchedDevice] = []


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max": ordered[-1],
    }


def main() -> int:
    record, *arguments = sys.argv[1:]
    cuda_loader.CudaDevice = WatchedDevice  # type: ignore[attr-defined]
    code = run_command(["serve", *arguments])
    # The device is closed by now, but its context and the events are there until the process ends.
    Path(record).write_text(json.dumps(opened[0].figures()) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
