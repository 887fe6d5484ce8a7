"""StateStore: the root is nobody's, every other slot has one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import ROOT_SLOT
from ninfer.program.stores.state_store import StateStore


def test_every_slot_but_the_root_is_handed_out_once() -> None:
    store = StateStore(4)
    slots = [store.acquire(owner) for owner in (0, 1, 0)]
    assert slots == [1, 2, 3]
    assert ROOT_SLOT not in slots
    assert store.acquire(2) is None
    assert (store.num_used, store.num_free, store.num_slots) == (3, 0, 3)
    assert store.slots_of(0) == {1, 3}


@pytest.mark.parametrize(("owner", "slot"), [(1, 1), (0, 2), (0, ROOT_SLOT), (0, 99)])
def test_freeing_what_is_not_owned_is_refused(owner: int, slot: int) -> None:
    store = StateStore(4)
    store.acquire(0)
    with pytest.raises(InvariantError, match=f"owner {owner} frees slot {slot}"):
        store.release(owner, slot)
    assert store.num_used == 1


def test_freeing_twice_is_refused() -> None:
    store = StateStore(2)
    slot = store.acquire(0)
    assert slot is not None
    store.release(0, slot)
    with pytest.raises(InvariantError, match="nobody owns"):
        store.release(0, slot)


def test_a_store_without_slots_is_refused() -> None:
    with pytest.raises(InvariantError, match="besides the root"):
        StateStore(1)


def test_an_owner_alternates_between_two_slots() -> None:
    store = StateStore(7)
    held = {owner: store.acquire(owner) for owner in (0, 1, 2)}
    new = {owner: store.acquire(owner) for owner in (0, 1, 2)}
    for _ in range(3):
        for owner, slot in held.items():
            assert slot is not None
            store.release(owner, slot)
        held, new = new, {owner: store.acquire(owner) for owner in (2, 0, 1)}
        assert set(new.values()) | set(held.values()) == set(range(1, 7))
    first, second = held[0], new[0]
    assert first is not None
    store.release(0, first)
    assert store.acquire(0) == first
    assert {first, second} == store.slots_of(0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 6))))
def test_conservation_under_any_calls(calls: list[tuple[bool, int, int]]) -> None:
    store = StateStore(6)
    owners: dict[int, int] = {}
    given_back: dict[int, int] = {}
    for is_acquire, owner, slot in calls:
        if is_acquire:
            got = store.acquire(owner)
            free = sorted(set(range(1, 6)) - owners.keys())
            own = given_back.get(owner)
            assert got == (own if own in free else free[0] if free else None)
            if got is not None:
                owners[got] = owner
                given_back.pop(owner, None)
        elif owners.get(slot) == owner:
            store.release(owner, slot)
            given_back[owner] = slot
            del owners[slot]
        else:
            with pytest.raises(InvariantError):
                store.release(owner, slot)
        store.check()
        assert store.num_used == len(owners)
        for candidate in range(4):
            assert store.slots_of(candidate) == {s for s, o in owners.items() if o == candidate}
