"""HostStore: blocks are free when their last holder is gone; a pair is the same page on both sides
for as long as it can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer.contract.errors import InvariantError
from ninfer.program.stores.host_store import HostStore
from ninfer.program.stores.page_store import PageStore

NUM_BLOCKS, NUM_PAGES = 6, 5


def stores() -> tuple[HostStore, PageStore]:
    pages = PageStore(NUM_PAGES)
    pages.open(0)
    pages.reserve(0, 2)
    return HostStore(NUM_BLOCKS, pages), pages


def test_taking_is_all_or_nothing() -> None:
    host, _ = stores()
    first = host.take([None] * 4)
    assert first is not None
    assert host.take([first[0], None, None, None]) is None
    assert host.num_free == 2
    assert host.take([first[0], None, None]) is not None
    assert (host.num_free, host.num_used) == (0, 6)


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    host, _ = stores()
    (block,) = host.take([None]) or ()
    assert host.take([block]) == (block,)
    host.release([block])
    assert host.num_used == 1
    host.release([block])
    assert host.num_used == 0
    with pytest.raises(InvariantError, match="is freed, but nobody holds it"):
        host.release([block])
    with pytest.raises(InvariantError, match="is shared, but nobody holds it"):
        host.take([block])


def test_a_pair_ends_when_its_page_is_given_back() -> None:
    host, pages = stores()
    (block,) = host.take([None]) or ()
    host.pair(block, 1)
    assert (host.block_of(1), host.page_of(block)) == (block, 1)
    pages.close(0)
    assert (host.block_of(1), host.page_of(block)) == (None, None)
    pages.open(0)
    pages.reserve(0, 2)
    assert (host.block_of(1), host.page_of(block)) == (None, None)


def test_a_pair_ends_when_its_page_is_written_over() -> None:
    host, pages = stores()
    (block,) = host.take([None]) or ()
    host.pair(block, 1)
    pages.renew(1)
    assert (host.block_of(1), host.page_of(block)) == (None, None)


def test_a_pair_ends_when_its_block_is_given_back() -> None:
    host, _ = stores()
    (block,) = host.take([None]) or ()
    host.pair(block, 1)
    host.release([block])
    assert host.block_of(1) is None
    assert host.take([None]) == (block,)
    assert host.page_of(block) is None


def test_only_what_is_held_can_be_a_pair() -> None:
    host, _ = stores()
    (block,) = host.take([None]) or ()
    for pair in ((block, 4), (block + 1, 1)):
        with pytest.raises(InvariantError, match="not both held"):
            host.pair(*pair)


@pytest.mark.parametrize("holders", [[], [0, 0], [0, 1]])
def test_check_compares_with_the_holders(holders: list[int]) -> None:
    host, _ = stores()
    host.take([None])
    host.check([0])
    with pytest.raises(InvariantError, match="host blocks are held"):
        host.check(holders)


def test_a_store_without_blocks_gives_none() -> None:
    host = HostStore(0, PageStore(1))
    assert host.take([None]) is None
    assert host.take([]) == ()
    host.check([])


class HostStoreMachine(RuleBasedStateMachine):
    """Against a model that knows what every page and block contains: an item of its own each time a
    page is handed out or written, and a copy of the page's item in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageStore(NUM_PAGES)
        self.host = HostStore(NUM_BLOCKS, self.pages)
        self.held: Counter[int] = Counter()
        self.page_items: dict[int, int] = {}
        self.block_items: dict[int, int] = {}
        self.num_items = 0

    def new_item(self) -> int:
        self.num_items += 1
        return self.num_items

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        taken = self.host.take([None] * count)
        assert (taken is None) == (count > NUM_BLOCKS - len(self.held))
        for block in taken or ():
            assert block not in self.held
            self.held[block] = 1
            self.block_items[block] = self.new_item()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.host.take([block])
        self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.host.release([block])
        self.held[block] -= 1
        self.held = +self.held

    @rule(owner=st.integers(0, 2))
    def toggle_pages(self, owner: int) -> None:
        if owner in self.pages.owners:
            self.pages.close(owner)
            return
        self.pages.open(owner)
        for page in self.pages.reserve(owner, min(2, self.pages.num_free)) or ():
            self.page_items[page] = self.new_item()

    @precondition(lambda self: self.held_pages())
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held_pages()))
        self.pages.renew(page)
        self.page_items[page] = self.new_item()

    @precondition(lambda self: self.held_pages() and self.held)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held_pages()))
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.block_items[block] = self.page_items[page]
        self.host.pair(block, page)

    def held_pages(self) -> list[int]:
        return [page for page in range(NUM_PAGES) if self.pages.references(page)]

    @invariant()
    def pairs_hold_the_same(self) -> None:
        self.host.check(self.held.elements())
        assert self.host.num_used == len(self.held)
        for page in self.held_pages():
            block = self.host.block_of(page)
            if block is not None:
                assert self.held[block] > 0
                assert self.block_items[block] == self.page_items[page]
                assert self.host.page_of(block) == page
        for block in self.held:
            page_of = self.host.page_of(block)
            assert page_of is None or page_of in self.held_pages()
        assert self.host.reclaimable(self.held.elements()) == len(self.held)


TestHostStoreMachine = HostStoreMachine.TestCase
