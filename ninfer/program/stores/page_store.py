"""KV pages: which are free, who holds them, and how far each owner may use its own.

An owner (a lane or a checkpoint) holds an ordered list of pages. A page may be in several lists; it
is free when it is in none. Three lengths of a list are its extents:

    0 <= committed <= mapped <= reserved

reserved    pages set aside for the owner; no more than these can be written
mapped      pages a unit may address through its page table
committed   pages that hold committed tokens; what a unit may read

Copy on write: the last committed page can be given a copy of its own. Until the unit that fills the
copy is committed, the owner holds the original as well and still counts it as committed.

The store holds ids only, never their contents. Pages are handed out lowest first, so that a
sequence alone gets a contiguous run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ninfer.contract.errors import InvariantError

Owner: TypeAlias = Hashable
"""Chosen by the caller: the number of a lane, or a checkpoint's record."""


@dataclass(frozen=True, slots=True)
class PageExtents:
    """Numbers of pages; see the module."""

    reserved: int
    mapped: int
    committed: int


@dataclass(slots=True)
class _Holding:
    """`original` is the page that the last committed one is about to be a copy of."""

    page_ids: list[int] = field(default_factory=list)
    num_mapped: int = 0
    num_committed: int = 0
    original: int | None = None

    def held(self) -> Iterator[int]:
        yield from self.page_ids
        if self.original is not None:
            yield self.original


class PageStore:
    """Misuse is an InvariantError."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InvariantError(f"a page store needs at least one page, not {num_pages}")
        self._num_pages = num_pages
        self._free = list(range(num_pages))
        self._references = [0] * num_pages
        self._versions = [0] * num_pages
        self._holdings: dict[Owner, _Holding] = {}

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one owner; a shared page counts once."""
        return self._num_pages - len(self._free)

    @property
    def owners(self) -> frozenset[Owner]:
        return frozenset(self._holdings)

    def references(self, page_id: int) -> int:
        """How many hold the page; 0 when it is free."""
        return self._references[page_id]

    def version(self, page_id: int) -> int:
        """Changes whenever the page may get other contents than it was handed out for: when it is
        taken from the free list and when `renew` says so."""
        return self._versions[page_id]

    def renew(self, page_id: int) -> None:
        """The one holder of this page is about to write over some of it."""
        if self._references[page_id] != 1:
            raise InvariantError(
                f"page {page_id} with {self._references[page_id]} holders is to be written"
            )
        self._versions[page_id] += 1

    def reclaimable(self, owners: Iterable[Owner]) -> int:
        """Pages that would be free if all of these owners were closed together."""
        chosen = set(owners)
        if 2 * len(chosen) > len(self._holdings):
            others = [holding for owner, holding in self._holdings.items() if owner not in chosen]
            return self.num_used - len({page for holding in others for page in holding.held()})
        held = Counter(page_id for owner in chosen for page_id in self._holding(owner).held())
        return sum(self._references[page_id] == count for page_id, count in held.items())

    def open(self, owner: Owner) -> None:
        """Start an empty holding."""
        if owner in self._holdings:
            raise InvariantError(f"owner {owner} already holds pages")
        self._holdings[owner] = _Holding()

    def share(self, owner: Owner, page_ids: Sequence[int | None]) -> tuple[int, ...] | None:
        """Start a holding, all of it committed: pages that others hold, and new ones for None.

        Returns the pages, or None when too few are free; nothing has changed then.
        """
        if owner in self._holdings:
            raise InvariantError(f"owner {owner} already holds pages")
        for page_id in page_ids:
            if page_id is not None and self._references[page_id] == 0:
                raise InvariantError(f"page {page_id} is shared, but nobody holds it")
        if sum(page_id is None for page_id in page_ids) > len(self._free):
            return None
        shared = [self._take() if page_id is None else self._add(page_id) for page_id in page_ids]
        self._holdings[owner] = _Holding(shared, len(shared), len(shared))
        return tuple(shared)

    def close(self, owner: Owner) -> None:
        """Give every page of the owner back."""
        holding = self._holding(owner)
        del self._holdings[owner]
        for page_id in holding.held():
            self._release(page_id)

    def page_ids(self, owner: Owner) -> tuple[int, ...]:
        """The reserved pages in the order of the tokens they hold."""
        return tuple(self._holding(owner).page_ids)

    def committed_ids(self, owner: Owner) -> tuple[int, ...]:
        """The pages that hold the committed tokens now; the original of a copy, not the copy."""
        holding = self._holding(owner)
        page_ids = holding.page_ids[: holding.num_committed]
        if holding.original is not None:
            page_ids[-1] = holding.original
        return tuple(page_ids)

    def extents(self, owner: Owner) -> PageExtents:
        holding = self._holding(owner)
        return PageExtents(len(holding.page_ids), holding.num_mapped, holding.num_committed)

    def reserve(self, owner: Owner, num_pages: int) -> tuple[int, ...] | None:
        """Raise the reserved extent to at least `num_pages`.

        Returns the pages that were added, in order (none when enough were reserved already), or
        None when too few are free; nothing has changed then.
        """
        holding = self._holding(owner)
        num_missing = num_pages - len(holding.page_ids)
        if num_missing <= 0:
            return ()
        if num_missing > len(self._free):
            return None
        added = tuple(self._take() for _ in range(num_missing))
        holding.page_ids.extend(added)
        return added

    def copy_last(self, owner: Owner) -> tuple[int, int] | None:
        """Put a new page in the place of the last committed one: (original, copy), or None when no
        page is free. The original is held until `end_copy`."""
        holding = self._holding(owner)
        if holding.original is not None or holding.num_committed == 0:
            raise InvariantError(f"owner {owner} has no committed page to copy")
        if not self._free:
            return None
        last = holding.num_committed - 1
        holding.original, holding.page_ids[last] = holding.page_ids[last], self._take()
        return holding.original, holding.page_ids[last]

    def end_copy(self, owner: Owner) -> None:
        """The copy is filled and committed; the original is given back."""
        holding = self._holding(owner)
        if holding.original is None:
            raise InvariantError(f"owner {owner} copies no page")
        self._release(holding.original)
        holding.original = None

    def map(self, owner: Owner, num_pages: int) -> None:
        """Set the mapped extent, between the committed and the reserved one."""
        holding = self._holding(owner)
        if not holding.num_committed <= num_pages <= len(holding.page_ids):
            raise InvariantError(
                f"owner {owner} cannot map {num_pages} pages: {holding.num_committed} are"
                f" committed and {len(holding.page_ids)} reserved"
            )
        holding.num_mapped = num_pages

    def commit(self, owner: Owner, num_pages: int) -> None:
        """Raise the committed extent, up to the mapped one."""
        holding = self._holding(owner)
        if not holding.num_committed <= num_pages <= holding.num_mapped:
            raise InvariantError(
                f"owner {owner} cannot commit {num_pages} pages: {holding.num_committed} are"
                f" committed and {holding.num_mapped} mapped"
            )
        holding.num_committed = num_pages

    def unmap(self, owner: Owner) -> None:
        """Take the mapped extent back to the committed one; reservations stay."""
        holding = self._holding(owner)
        holding.num_mapped = holding.num_committed

    def check(self) -> None:
        """Verify that every page is either free or referenced by exactly its holders."""
        held = Counter(page_id for holding in self._holdings.values() for page_id in holding.held())
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a page is twice in the free list")
        for page_id, count in enumerate(self._references):
            if count != held[page_id] or (count == 0) != (page_id in free):
                raise InvariantError(
                    f"page {page_id} has {count} references, {held[page_id]} holders and is"
                    f" {'free' if page_id in free else 'not free'}"
                )
        for owner, holding in self._holdings.items():
            _check_extents(owner, self.extents(owner))
            if len(set(holding.held())) != len(tuple(holding.held())):
                raise InvariantError(f"owner {owner} holds a page twice")

    def _holding(self, owner: Owner) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise InvariantError(f"owner {owner} holds no pages")
        return holding

    def _take(self) -> int:
        page_id = heapq.heappop(self._free)
        self._references[page_id] = 1
        self._versions[page_id] += 1
        return page_id

    def _add(self, page_id: int) -> int:
        self._references[page_id] += 1
        return page_id

    def _release(self, page_id: int) -> None:
        if self._references[page_id] < 1:
            raise InvariantError(f"page {page_id} was freed twice")
        self._references[page_id] -= 1
        if self._references[page_id] == 0:
            heapq.heappush(self._free, page_id)


def _check_extents(owner: Owner, extents: PageExtents) -> None:
    if not 0 <= extents.committed <= extents.mapped <= extents.reserved:
        raise InvariantError(f"owner {owner} has extents out of order: {extents}")
