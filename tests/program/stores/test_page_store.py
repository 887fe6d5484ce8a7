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


def test_shared_pages_are_free_when_their_last_holder_is_gone() -> None:
    store = PageStore(4)
    store.open(0)
    store.reserve(0, 2)
    assert store.share("checkpoint", (0, 1)) == (0, 1)
    assert store.num_used == 2
    assert [store.references(page) for page in range(3)] == [2, 2, 0]
    store.close(0)
    assert store.num_used == 2
    store.close("checkpoint")
    assert store.num_used == 0


def test_sharing_takes_new_pages_for_gaps_all_or_nothing() -> None:
    store = PageStore(4)
    store.open(0)
    store.reserve(0, 2)
    assert store.share(1, (0, None, None, None)) is None
    assert (store.num_used, store.references(0)) == (2, 1)
    assert store.share(1, (1, None)) == (1, 2)
    assert store.extents(1) == PageExtents(2, 2, 2)


def test_only_held_pages_are_shared() -> None:
    store = PageStore(4)
    with pytest.raises(InvariantError, match="page 3 is shared, but nobody holds it"):
        store.share(0, (3,))
    store.open(0)
    with pytest.raises(InvariantError, match="already holds"):
        store.share(0, ())


def test_a_copy_counts_as_the_original_until_it_has_ended() -> None:
    store = PageStore(5)
    store.open("checkpoint")
    store.reserve("checkpoint", 2)
    store.share(0, (0, 1))
    assert store.copy_last(0) == (1, 2)
    assert store.page_ids(0) == (0, 2)
    assert store.committed_ids(0) == (0, 1)
    store.close("checkpoint")
    assert store.num_used == 3
    store.end_copy(0)
    assert store.num_used == 2
    assert store.committed_ids(0) == (0, 2)
    with pytest.raises(InvariantError, match="copies no page"):
        store.end_copy(0)


def test_a_copy_that_never_ended_gives_both_pages_back() -> None:
    store = PageStore(3)
    store.open(1)
    store.reserve(1, 1)
    store.share(0, (0,))
    store.copy_last(0)
    with pytest.raises(InvariantError, match="no committed page to copy"):
        store.copy_last(0)
    store.close(0)
    assert store.num_used == 1
    store.check()


def test_there_is_no_copy_without_a_page() -> None:
    store = PageStore(1)
    store.open(0)
    with pytest.raises(InvariantError, match="no committed page to copy"):
        store.copy_last(0)
    store.reserve(0, 1)
    store.share(1, (0,))
    assert store.copy_last(1) is None
    assert store.page_ids(1) == (0,)


def test_a_page_has_a_new_version_when_it_may_hold_something_else() -> None:
    store = PageStore(2)
    store.open(0)
    store.reserve(0, 1)
    first = store.version(0)
    store.close(0)
    assert store.version(0) == first
    store.open(0)
    store.reserve(0, 1)
    second = store.version(0)
    assert second != first
    store.renew(0)
    assert store.version(0) not in (first, second)
    store.share(1, (0,))
    with pytest.raises(InvariantError, match="page 0 with 2 holders is to be written"):
        store.renew(0)


class PageStoreMachine(RuleBasedStateMachine):
    """Random calls against a model: owner -> (pages, mapped, committed), and its original."""

    def __init__(self) -> None:
        super().__init__()
        self.store = PageStore(NUM_PAGES)
        self.held: dict[int, list[int]] = {}
        self.extents: dict[int, PageExtents] = {}
        self.originals: dict[int, int] = {}

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
        self.originals.pop(owner, None)

    def free_pages(self) -> list[int]:
        held = {page for pages in self.held.values() for page in pages}
        return sorted(set(range(NUM_PAGES)) - held - set(self.originals.values()))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), owner=OWNERS, num_new=st.integers(0, 3))
    def share(self, data: st.DataObject, owner: int, num_new: int) -> None:
        """The committed pages of one as another's, and new ones behind them."""
        other = data.draw(st.sampled_from(sorted(self.held)))
        shared = self.store.committed_ids(other)
        if owner in self.held:
            with pytest.raises(InvariantError):
                self.store.share(owner, shared)
            return
        new = self.free_pages()[:num_new]
        expected = (*shared, *new) if len(new) == num_new else None
        assert self.store.share(owner, (*shared, *[None] * num_new)) == expected
        if expected is not None:
            self.held[owner] = list(expected)
            self.extents[owner] = PageExtents(*[len(expected)] * 3)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy_last(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        last = self.extents[owner].committed - 1
        if owner in self.originals or last < 0:
            with pytest.raises(InvariantError):
                self.store.copy_last(owner)
            return
        free = self.free_pages()
        expected = (self.held[owner][last], free[0]) if free else None
        assert self.store.copy_last(owner) == expected
        if expected is not None:
            self.originals[owner], self.held[owner][last] = expected

    @precondition(lambda self: self.originals)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.originals)))
        self.store.end_copy(owner)
        del self.originals[owner]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=COUNTS)
    def reserve(self, data: st.DataObject, count: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        free = self.free_pages()
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
        assert self.store.num_free == len(self.free_pages())
        assert self.store.num_used == NUM_PAGES - self.store.num_free
        holders = {owner: {*pages} for owner, pages in self.held.items()}
        for owner, page in self.originals.items():
            holders[owner].add(page)
        for owner, pages in self.held.items():
            assert self.store.page_ids(owner) == tuple(pages)
            assert self.store.extents(owner) == self.extents[owner]
            others = [held for other, held in holders.items() if other != owner]
            alone = holders[owner] - {page for held in others for page in held}
            assert self.store.reclaimable([owner]) == len(alone)
            rest = {page for held in others for page in held} - holders[owner]
            assert self.store.reclaimable(other for other in holders if other != owner) == len(rest)
        every = set().union(*holders.values())
        assert self.store.reclaimable(self.held) == len(every)
        for page in range(NUM_PAGES):
            assert self.store.references(page) == sum(page in held for held in holders.values())


TestPageStoreMachine = PageStoreMachine.TestCase
