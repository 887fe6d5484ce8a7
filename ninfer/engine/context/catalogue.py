"""Catalogue: every checkpoint the context cache owns, found by the tokens it stands for.

Entries form a forest: the parent of one is the longest other entry that is a prefix of it, from
which it could be computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ninfer.contract.cache import CheckpointId, CheckpointKind
from ninfer.contract.errors import InvariantError
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.identity import Identity, cut
from ninfer.engine.context.page_tree import PageTree
from ninfer.engine.context.records import Entry, PageNode, Session

MAX_SHARING: Final = 64
"""Entries that are looked at when the first pages of any will do."""
_MAX_STEPS: Final = 4096


class Catalogue:
    """`revision` changes whenever an answer could."""

    def __init__(self, tree: PageTree) -> None:
        self._tree = tree
        self._entries: dict[CheckpointId, Entry] = {}
        self.revision = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, checkpoint: CheckpointId) -> Entry | None:
        return self._entries.get(checkpoint)

    def touch(self) -> None:
        """Something about an entry has changed."""
        self.revision += 1

    def find(self, path: Sequence[PageNode], identity: Identity, frontier: int) -> Entry | None:
        """The entry of exactly the first `frontier` tokens. `path` is the identity's path in the
        tree of pages."""
        depth = frontier // PAGE_TOKENS
        if depth < len(path):
            tail = identity.tail(frontier)
            for entry in path[depth].entries:
                if entry.frontier == frontier and entry.tail == tail:
                    return entry
        return None

    def prefixes(self, path: Sequence[PageNode], identity: Identity, limit: int) -> list[Entry]:
        """Entries of at most `limit` tokens that are prefixes of the identity, ascending. `path` is
        the identity's path in the tree."""
        found = []
        for node in path:
            if node.entries:
                start = node.depth * PAGE_TOKENS
                found += [
                    entry
                    for entry in node.entries
                    if entry.frontier <= limit
                    and identity.part(start, entry.frontier) == entry.tail
                ]
        return sorted(found, key=lambda entry: entry.frontier)

    def sharing(self, path: Sequence[PageNode]) -> list[tuple[Entry, int]]:
        """Entries that begin with pages of a path, and how many pages; most pages first, then
        newest branches. Not all of them when there are many."""
        found: list[tuple[Entry, int]] = []
        inner: PageNode | None = None
        num_steps = 0
        for start in reversed(path):
            stack = [start]
            while stack and len(found) < MAX_SHARING and num_steps < _MAX_STEPS:
                node = stack.pop()
                num_steps += 1
                found += [(entry, start.depth) for entry in node.entries]
                stack += [child for child in node.children.values() if child is not inner]
            inner = start
        return found

    def add(
        self,
        checkpoint: CheckpointId,
        identity: Identity,
        frontier: int,
        kind: CheckpointKind,
        session: Session | None,
        order: int,
    ) -> Entry:
        """InvariantError for tokens that have an entry already."""
        if self.find(self._tree.path(identity), identity, frontier) is not None:
            raise InvariantError(f"two checkpoints of the same {frontier} tokens")
        node = self._tree.hold(identity, frontier // PAGE_TOKENS)
        digests = identity.digests[node.depth], identity.digest(frontier)
        entry = Entry(
            checkpoint, frontier, kind, node, identity.tail(frontier), *digests, session, order
        )
        shorter = self.prefixes(self._tree.path(identity), identity, frontier - 1)
        entry.parent = shorter[-1] if shorter else None
        node.entries.append(entry)
        self._entries[checkpoint] = entry
        for other in self._longer(entry):
            if other.parent is entry.parent:
                if other.parent is not None:
                    other.parent.children.discard(other)
                other.parent = entry
                entry.children.add(other)
        if entry.parent is not None:
            entry.parent.children.add(entry)
        if session is not None:
            session.entries.add(entry)
        self.revision += 1
        return entry

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.checkpoint]
        entry.node.entries.remove(entry)
        self._tree.drop(entry.node)
        for child in entry.children:
            child.parent = entry.parent
            if entry.parent is not None:
                entry.parent.children.add(child)
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        if entry.session is not None:
            entry.session.entries.discard(entry)
        entry.parent = None
        entry.children = set()
        self.revision += 1

    def _longer(self, entry: Entry) -> Iterator[Entry]:
        """Entries of which this one is a prefix."""
        start, count = entry.node.depth * PAGE_TOKENS, entry.frontier % PAGE_TOKENS
        for other in entry.node.entries:
            length = other.frontier - start
            if length > count and cut(other.tail, start, length, count) == entry.tail:
                yield other
        stack = [
            child
            for child in entry.node.children.values()
            if cut(child.key, start, PAGE_TOKENS, count) == entry.tail
        ]
        while stack:
            node = stack.pop()
            yield from node.entries
            stack += node.children.values()
