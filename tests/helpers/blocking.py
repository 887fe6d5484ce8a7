"""Calls that block an event loop are errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blockbuster import BlockBuster, blockbuster_ctx


@contextmanager
def no_blocking_calls(*modules: str) -> Iterator[BlockBuster]:
    """Below a frame of `modules`, or anywhere.

    A module may be imported: to find one takes files, and a path where its lines are counted.
    """
    with blockbuster_ctx(list(modules)) as blockbuster:
        blockbuster.functions["os.path.abspath"].can_block_in(
            "<frozen importlib._bootstrap>", {"_find_and_load"}
        )
        yield blockbuster
