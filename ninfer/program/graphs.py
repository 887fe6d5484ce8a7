"""DecodeGraphs: one captured graph for every batch size, made at start and only replayed later.

A graph holds the copies and launches of one decode step with all their addresses, so whatever
differs from step to step is data in fixed buffers. The size is exact: no row is ever padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from ninfer.contract.errors import InvariantError

G = TypeVar("G")


class GraphDriver(Protocol[G]):
    """What graphs need of a device."""

    def capture(self, enqueue: Callable[[], None]) -> G: ...

    def replay(self, graph: G) -> None: ...

    def synchronize(self) -> None: ...


def capture_warm(driver: GraphDriver[G], enqueue: Callable[[], None]) -> G:
    """Run what `enqueue` queues once, so that all kernels are loaded and nothing is set up during a
    capture, then capture it."""
    enqueue()
    driver.synchronize()
    return driver.capture(enqueue)


class DecodeGraphs(Generic[G]):
    """Graphs of batches of 1 .. max_rows rows."""

    def __init__(
        self,
        driver: GraphDriver[G],
        max_rows: int,
        *,
        prepare: Callable[[int], None],
        enqueue: Callable[[int], None],
    ) -> None:
        """For each size `prepare(num_rows)` queues harmless inputs, then `enqueue` is captured."""
        if max_rows < 1:
            raise InvariantError(f"graphs for batches of up to {max_rows} rows")
        self._driver = driver
        self._graphs: list[G] = []
        for num_rows in range(1, max_rows + 1):
            prepare(num_rows)
            self._graphs.append(capture_warm(driver, partial(enqueue, num_rows)))

    @property
    def max_rows(self) -> int:
        return len(self._graphs)

    def replay(self, num_rows: int) -> None:
        """Queue one step of a batch of exactly `num_rows` rows."""
        self._driver.replay(self.of(num_rows))

    def of(self, num_rows: int) -> G:
        """The graph of a size."""
        if not 1 <= num_rows <= self.max_rows:
            raise InvariantError(f"a decode batch of {num_rows} rows, at most {self.max_rows}")
        return self._graphs[num_rows - 1]
