"""StateStore: the root is nobody's, a slot is free when its last holder is gone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import ROOT_SLOT
from ninfer.program.stores.state_store import StateStore


def test_every_slot_but_the_root_is_handed_out_once() -> None:
    store = StateStore(4)
    slots = [store.acquire() for _ in range(3)]
    assert slots == [1, 2, 3]
    assert ROOT_SLOT not in slots
    assert store.acquire() is None
    assert (store.num_used, store.num_free, store.num_slots) == (3, 0, 3)


@pytest.mark.parametrize("slot", [2, ROOT_SLOT, 99])
def test_what_nobody_holds_can_be_neither_freed_nor_shared(slot: int) -> None:
    store = StateStore(4)
    store.acquire()
    with pytest.raises(InvariantError, match=f"slot {slot} is freed, but nobody"):
        store.release(slot)
    with pytest.raises(InvariantError, match=f"slot {slot} is shared, but nobody"):
        store.share(slot)
    assert store.num_used == 1


def test_a_shared_slot_is_free_when_its_last_holder_is_gone() -> None:
    store = StateStore(2)
    slot = store.acquire()
    assert slot is not None
    assert store.share(slot) == slot
    store.release(slot)
    assert store.num_free == 0
    store.release(slot)
    assert store.num_free == 1
    with pytest.raises(InvariantError, match="nobody holds it"):
        store.release(slot)


@pytest.mark.parametrize("holders", [[], [1], [1, 1, 1], [1, 2], [1, 1, 2, 3]])
def test_check_compares_with_the_holders(holders: list[int]) -> None:
    store = StateStore(5)
    store.acquire()
    store.acquire()
    store.share(1)
    store.check([2, 1, 1])
    with pytest.raises(InvariantError, match="slots are held"):
        store.check(holders)


def test_a_store_without_slots_is_refused() -> None:
    with pytest.raises(InvariantError, match="besides the root"):
        StateStore(1)


def test_a_wanted_slot_is_given_while_it_is_free() -> None:
    store = StateStore(7)
    assert [store.acquire() for _ in range(4)] == [1, 2, 3, 4]
    store.release(2)
    store.release(3)
    assert store.acquire(3) == 3
    assert store.acquire(3) == 2
    store.check([1, 2, 3, 4])
    assert [store.acquire(6), store.acquire(ROOT_SLOT), store.acquire(5)] == [6, 5, None]


def test_a_slot_is_shared_from_its_second_holder_on() -> None:
    store = StateStore(3)
    slot = store.acquire()
    assert slot is not None
    assert not store.is_shared(slot)
    store.share(slot)
    assert store.is_shared(slot)
    store.release(slot)
    assert not store.is_shared(slot)
    assert not store.is_shared(ROOT_SLOT)


@given(st.lists(st.tuples(st.sampled_from(("acquire", "share", "release")), st.integers(0, 6))))
def test_conservation_under_any_calls(calls: list[tuple[str, int]]) -> None:
    store = StateStore(6)
    held: Counter[int] = Counter()
    for call, slot in calls:
        if call == "acquire":
            wanted = slot % 6
            got = store.acquire(wanted)
            free = sorted(set(range(1, 6)) - held.keys())
            assert got == (wanted if wanted in free else free[0] if free else None)
            held.update([got] if got is not None else [])
        elif held[slot] == 0:
            with pytest.raises(InvariantError):
                store.share(slot) if call == "share" else store.release(slot)
        elif call == "share":
            store.share(slot)
            held[slot] += 1
        else:
            store.release(slot)
            held[slot] -= 1
        held = +held
        store.check(held.elements())
        assert store.num_used == len(held)
        for picked in ([1], [1, 1, 2], list(held.elements())):
            named = [slot for slot in picked if held[slot] >= picked.count(slot)]
            freed = sum(held[slot] == named.count(slot) for slot in set(named))
            assert store.reclaimable(named) == freed
