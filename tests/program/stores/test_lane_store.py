"""LaneStore: one sequence a lane, and handles that die with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.contract.program import SequenceHandle
from ninfer.program.stores.lane_store import LaneStore


def test_a_reused_lane_has_a_new_generation() -> None:
    store = LaneStore(1)
    first = store.acquire()
    assert first is not None
    assert store.acquire() is None
    store.release(first)
    second = store.acquire()
    assert second is not None
    assert second.lane == first.lane
    with pytest.raises(InvariantError, match="stale handle"):
        store.verify(first)
    store.verify(second)


@pytest.mark.parametrize(
    "handle", [SequenceHandle(0, 2), SequenceHandle(1, 0), SequenceHandle(9, 1)]
)
def test_a_foreign_handle_is_refused(handle: SequenceHandle) -> None:
    store = LaneStore(2)
    store.acquire()
    with pytest.raises(InvariantError, match="stale handle"):
        store.release(handle)
    assert store.num_used == 1


def test_a_store_without_lanes_is_refused() -> None:
    with pytest.raises(InvariantError, match="at least one lane"):
        LaneStore(0)


@given(st.lists(st.integers(0, 5)))
def test_conservation_under_any_calls(calls: list[int]) -> None:
    """0 acquires, n releases the n-th handle ever given, dead or alive."""
    store, given_out = LaneStore(3), list[SequenceHandle]()
    alive: set[SequenceHandle] = set()
    for call in calls:
        if call == 0:
            handle = store.acquire()
            assert (handle is None) == (len(alive) == 3)
            if handle is not None:
                given_out.append(handle)
                alive.add(handle)
        elif call <= len(given_out):
            handle = given_out[call - 1]
            if handle in alive:
                store.release(handle)
                alive.remove(handle)
            else:
                with pytest.raises(InvariantError):
                    store.release(handle)
        store.check()
        assert store.bound == {handle.lane for handle in alive}
