"""PageStore: conservation, extents and refusal of misuse under any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer.contract.errors import InvariantError
from ninfer.program.stores.page_store import PageExtents, PageStore

NUM_PAGES = 11
OWNERS = st.integers(0, 3)
COUNTS = st.integers(0, NUM_PAGES + 2)


def test_pages_are_handed_out_lowest_first() -> None:
    store = PageStore(4)
    store.open(0)
    store.open(1)
    assert store.reserve(0, 2) == (0, 1)
    assert store.reserve(1, 2) == (2, 3)
    store.close(0)
    assert store.reserve(1, 3) == (0,)


def test_reserve_is_all_or_nothing() -> None:
    store = PageStore(3)
    store.open(0)
    assert store.reserve(0, 2) == (0, 1)
    assert store.reserve(0, 4) is None
    assert store.page_ids(0) == (0, 1)
    assert store.num_free == 1


def test_reserve_is_idempotent() -> None:
    store = PageStore(3)
    store.open(0)
    store.reserve(0, 2)
    assert store.reserve(0, 2) == ()
    assert store.reserve(0, 1) == ()
    assert store.num_used == 2


def test_unmap_falls_back_to_the_committed_extent() -> None:
    store = PageStore(8)
    store.open(0)
    store.reserve(0, 5)
    store.map(0, 2)
    store.commit(0, 2)
    store.map(0, 4)
    store.unmap(0)
    assert store.extents(0) == PageExtents(reserved=5, mapped=2, committed=2)


@pytest.mark.parametrize("num_pages", [0, 6])
def test_map_outside_committed_and_reserved_is_refused(num_pages: int) -> None:
    store = PageStore(8)
    store.open(0)
    store.reserve(0, 5)
    store.map(0, 1)
    store.commit(0, 1)
    with pytest.raises(InvariantError, match="cannot map"):
        store.map(0, num_pages)


@pytest.mark.parametrize("num_pages", [1, 4])
def test_commit_outside_committed_and_mapped_is_refused(num_pages: int) -> None:
    store = PageStore(8)
    store.open(0)
    store.reserve(0, 5)
    store.map(0, 3)
    store.commit(0, 2)
    with pytest.raises(InvariantError, match="cannot commit"):
        store.commit(0, num_pages)


def test_closing_twice_is_refused() -> None:
    store = PageStore(1)
    store.open(0)
    store.close(0)
    with pytest.raises(InvariantError, match="owner 0 holds no pages"):
        store.close(0)


def test_opening_twice_is_refused() -> None:
    store = PageStore(1)
    store.open(0)
    with pytest.raises(InvariantError, match="already holds"):
        store.open(0)


def test_an_empty_store_is_refused() -> None:
    with pytest.raises(InvariantError, match="at least one page"):
        PageStore(0)


class PageStoreMachine(RuleBasedStateMachine):
    """Random calls against a model: owner -> (pages, mapped, committed)."""

    def __init__(self) -> None:
        super().__init__()
        self.store = PageStore(NUM_PAGES)
        self.held: dict[int, list[int]] = {}
        self.extents: dict[int, PageExtents] = {}

    @rule(owner=OWNERS)
    def open(self, owner: int) -> None:
        if owner in self.held:
            with pytest.raises(InvariantError):
                self.store.open(owner)
            return
        self.store.open(owner)
        self.held[owner] = []
        self.extents[owner] = PageExtents(0, 0, 0)

    @rule(owner=OWNERS)
    def close(self, owner: int) -> None:
        if owner not in self.held:
            with pytest.raises(InvariantError):
                self.store.close(owner)
            return
        self.store.close(owner)
        del self.held[owner], self.extents[owner]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=COUNTS)
    def reserve(self, data: st.DataObject, count: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        free = sorted(
            set(range(NUM_PAGES)) - {page for held in self.held.values() for page in held}
        )
        missing = max(0, count - len(self.held[owner]))
        added = self.store.reserve(owner, count)
        assert added == (tuple(free[:missing]) if missing <= len(free) else None)
        self.held[owner].extend(added or ())
        before = self.extents[owner]
        self.extents[owner] = PageExtents(len(self.held[owner]), before.mapped, before.committed)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=COUNTS)
    def map(self, data: st.DataObject, count: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        before = self.extents[owner]
        if before.committed <= count <= before.reserved:
            self.store.map(owner, count)
            self.extents[owner] = PageExtents(before.reserved, count, before.committed)
        else:
            with pytest.raises(InvariantError):
                self.store.map(owner, count)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=COUNTS)
    def commit(self, data: st.DataObject, count: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        before = self.extents[owner]
        if before.committed <= count <= before.mapped:
            self.store.commit(owner, count)
            self.extents[owner] = PageExtents(before.reserved, before.mapped, count)
        else:
            with pytest.raises(InvariantError):
                self.store.commit(owner, count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.store.unmap(owner)
        before = self.extents[owner]
        self.extents[owner] = PageExtents(before.reserved, before.committed, before.committed)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.store.check()
        assert self.store.num_used == sum(len(pages) for pages in self.held.values())
        assert self.store.num_free == NUM_PAGES - self.store.num_used
        for owner, pages in self.held.items():
            assert self.store.page_ids(owner) == tuple(pages)
            assert self.store.extents(owner) == self.extents[owner]


TestPageStoreMachine = PageStoreMachine.TestCase
