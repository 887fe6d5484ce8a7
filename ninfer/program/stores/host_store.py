"""Host blocks: which are free, how many hold each of the others, and which page each is a copy of.

A block and a page that hold the same complete page of tokens are a pair: whoever needs the page on
the host takes one more share of the block, and whoever needs the block on the device one more share
of the page. A pair holds as long as both are held and the page keeps its version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ninfer.contract.errors import InvariantError
from ninfer.program.stores.page_store import PageStore


class HostStore:
    """Blocks 0 .. num_blocks - 1; there may be none. Misuse is an InvariantError."""

    def __init__(self, num_blocks: int, pages: PageStore) -> None:
        self._num_blocks = num_blocks
        self._pages = pages
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._page_of: dict[int, tuple[int, int]] = {}

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder; a shared block counts once."""
        return len(self._references)

    def take(self, shared: Sequence[int | None]) -> tuple[int, ...] | None:
        """Blocks with one more holder: those named, and new ones for None. None when too few are
        free; nothing has changed then."""
        for block in shared:
            if block is not None and block not in self._references:
                raise InvariantError(f"host block {block} is shared, but nobody holds it")
        if sum(block is None for block in shared) > len(self._free):
            return None
        return tuple(self._take() if block is None else self._add(block) for block in shared)

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less of each; the last one frees a block."""
        for block in blocks:
            if block not in self._references:
                raise InvariantError(f"host block {block} is freed, but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                self._part(block)
                self._free.append(block)

    def reclaimable(self, blocks: Iterable[int]) -> int:
        """Blocks that would be free if each of these (as often as named) had one holder less."""
        return sum(self._references[block] == count for block, count in Counter(blocks).items())

    def pair(self, block: int, page_id: int) -> None:
        """The block holds what the page holds, all 64 tokens of it."""
        if block not in self._references or self._pages.references(page_id) == 0:
            raise InvariantError(f"host block {block} and page {page_id} are not both held")
        self._part(block)
        known = self._block_of.pop(page_id, None)
        if known is not None:
            del self._page_of[known]
        self._page_of[block] = (page_id, self._pages.version(page_id))
        self._block_of[page_id] = block

    def block_of(self, page_id: int) -> int | None:
        """The block that holds what this page holds."""
        block = self._block_of.get(page_id)
        return block if block is not None and self.page_of(block) == page_id else None

    def page_of(self, block: int) -> int | None:
        """The page that holds what this block holds."""
        page_id, version = self._page_of.get(block, (0, -1))
        is_same = self._pages.version(page_id) == version and self._pages.references(page_id) > 0
        return page_id if is_same else None

    def check(self, holders: Iterable[int]) -> None:
        """Verify that every block is either free or held exactly as often as it is named in
        `holders`, and that pairs are of held blocks."""
        held = Counter(holders)
        if held != self._references:
            raise InvariantError(f"host blocks are held {dict(held)}, counted {self._references}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a host block is twice in the free list")
        if free & held.keys() or free | held.keys() != set(range(self._num_blocks)):
            raise InvariantError(
                f"host blocks are lost or doubled: {len(free)} free, {len(held)} held"
                f" of {self._num_blocks}"
            )
        if {block: page for page, block in self._block_of.items()} != {
            block: page for block, (page, _) in self._page_of.items()
        } or not self._page_of.keys() <= held.keys():
            raise InvariantError("pairs of pages and host blocks disagree")

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _add(self, block: int) -> int:
        self._references[block] += 1
        return block

    def _part(self, block: int) -> None:
        page_id, _ = self._page_of.pop(block, (None, 0))
        if page_id is not None:
            del self._block_of[page_id]
