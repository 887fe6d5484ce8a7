"""KV pages: which are free, which belong to whom, and how far each owner may use its own.

An owner holds an ordered list of pages. Three lengths of that list are its extents:

    0 <= committed <= mapped <= reserved

reserved    pages set aside for the owner; nobody else gets them
mapped      pages a unit may address through its page table
committed   pages that hold committed tokens; what a unit may read

The store holds ids only, never their contents. Pages are handed out lowest first, so that a
sequence alone gets a contiguous run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from ninfer.contract.errors import InvariantError


@dataclass(frozen=True, slots=True)
class PageExtents:
    """Numbers of pages; see the module."""

    reserved: int
    mapped: int
    committed: int


@dataclass(slots=True)
class _Holding:
    page_ids: list[int] = field(default_factory=list)
    num_mapped: int = 0
    num_committed: int = 0


class PageStore:
    """Owners are small integers chosen by the caller. Misuse is an InvariantError."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InvariantError(f"a page store needs at least one page, not {num_pages}")
        self._num_pages = num_pages
        self._free = list(range(num_pages))
        self._references = [0] * num_pages
        self._holdings: dict[int, _Holding] = {}

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

    def open(self, owner: int) -> None:
        """Start an empty holding."""
        if owner in self._holdings:
            raise InvariantError(f"owner {owner} already holds pages")
        self._holdings[owner] = _Holding()

    def close(self, owner: int) -> None:
        """Give every page of the owner back."""
        holding = self._holding(owner)
        del self._holdings[owner]
        for page_id in holding.page_ids:
            self._release(page_id)

    def page_ids(self, owner: int) -> tuple[int, ...]:
        """The reserved pages in the order of the tokens they hold."""
        return tuple(self._holding(owner).page_ids)

    def num_reserved(self, owner: int) -> int:
        """The reserved extent."""
        return len(self._holding(owner).page_ids)

    def extents(self, owner: int) -> PageExtents:
        holding = self._holding(owner)
        return PageExtents(len(holding.page_ids), holding.num_mapped, holding.num_committed)

    def reserve(self, owner: int, num_pages: int) -> tuple[int, ...] | None:
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

    def map(self, owner: int, num_pages: int) -> None:
        """Set the mapped extent, between the committed and the reserved one."""
        holding = self._holding(owner)
        if not holding.num_committed <= num_pages <= len(holding.page_ids):
            raise InvariantError(
                f"owner {owner} cannot map {num_pages} pages: {holding.num_committed} are"
                f" committed and {len(holding.page_ids)} reserved"
            )
        holding.num_mapped = num_pages

    def commit(self, owner: int, num_pages: int) -> None:
        """Raise the committed extent, up to the mapped one."""
        holding = self._holding(owner)
        if not holding.num_committed <= num_pages <= holding.num_mapped:
            raise InvariantError(
                f"owner {owner} cannot commit {num_pages} pages: {holding.num_committed} are"
                f" committed and {holding.num_mapped} mapped"
            )
        holding.num_committed = num_pages

    def unmap(self, owner: int) -> None:
        """Take the mapped extent back to the committed one; reservations stay."""
        holding = self._holding(owner)
        holding.num_mapped = holding.num_committed

    def check(self) -> None:
        """Verify that every page is either free or referenced by exactly its holders."""
        held = Counter(
            page_id for holding in self._holdings.values() for page_id in holding.page_ids
        )
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
            if len(set(holding.page_ids)) != len(holding.page_ids):
                raise InvariantError(f"owner {owner} holds a page twice")

    def _holding(self, owner: int) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise InvariantError(f"owner {owner} holds no pages")
        return holding

    def _take(self) -> int:
        page_id = heapq.heappop(self._free)
        self._references[page_id] = 1
        return page_id

    def _release(self, page_id: int) -> None:
        if self._references[page_id] < 1:
            raise InvariantError(f"page {page_id} was freed twice")
        self._references[page_id] -= 1
        if self._references[page_id] == 0:
            heapq.heappush(self._free, page_id)


def _check_extents(owner: int, extents: PageExtents) -> None:
    if not 0 <= extents.committed <= extents.mapped <= extents.reserved:
        raise InvariantError(f"owner {owner} has extents out of order: {extents}")
