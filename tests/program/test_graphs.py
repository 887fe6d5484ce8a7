"""DecodeGraphs: a graph for every size, captured after a run, replayed by exact size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.program.graphs import DecodeGraphs


class Recorder:
    """Both the driver and the work: `events` in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.captured: list[int] | None = None

    def enqueue(self, num_rows: int) -> None:
        if self.captured is None:
            self.events.append(("run", num_rows))
        else:
            self.captured.append(num_rows)

    def prepare(self, num_rows: int) -> None:
        assert self.captured is None
        self.events.append(("prepare", num_rows))

    def capture(self, enqueue: Callable[[], None]) -> list[int]:
        self.captured = []
        enqueue()
        graph, self.captured = self.captured, None
        self.events.append(("capture", graph[0]))
        return graph

    def replay(self, graph: list[int]) -> None:
        self.events.append(("replay", graph[0]))

    def synchronize(self) -> None:
        self.events.append(("synchronize", 0))


def graphs_of(recorder: Recorder, max_rows: int) -> DecodeGraphs[list[int]]:
    return DecodeGraphs(recorder, max_rows, prepare=recorder.prepare, enqueue=recorder.enqueue)


def test_every_size_is_run_once_then_captured() -> None:
    recorder = Recorder()
    assert graphs_of(recorder, 2).max_rows == 2
    assert recorder.events == [
        ("prepare", 1), ("run", 1), ("synchronize", 0), ("capture", 1),
        ("prepare", 2), ("run", 2), ("synchronize", 0), ("capture", 2),
    ]  # fmt: skip


def test_the_graph_of_the_exact_size_is_replayed() -> None:
    recorder = Recorder()
    graphs = graphs_of(recorder, 5)
    recorder.events.clear()
    for num_rows in (3, 1, 5, 3):
        graphs.replay(num_rows)
    assert recorder.events == [("replay", 3), ("replay", 1), ("replay", 5), ("replay", 3)]


@pytest.mark.parametrize("num_rows", [-1, 0, 4])
def test_other_sizes_are_refused(num_rows: int) -> None:
    with pytest.raises(InvariantError, match="at most 3"):
        graphs_of(Recorder(), 3).replay(num_rows)


def test_no_graphs_at_all_are_refused() -> None:
    with pytest.raises(InvariantError, match="up to 0 rows"):
        graphs_of(Recorder(), 0)


def test_a_failing_first_run_reaches_the_caller() -> None:
    recorder = Recorder()

    def fail(num_rows: int) -> None:
        raise DeviceError(f"no kernel for {num_rows}")

    with pytest.raises(DeviceError, match="no kernel for 1"):
        DecodeGraphs(recorder, 2, prepare=recorder.prepare, enqueue=fail)
    assert recorder.events == [("prepare", 1)]
