"""PageTree: known histories as a tree of pages, so that what they share is held once.

A node is one complete page behind its parent; the path to it is a prefix. Finding a prompt in it
takes a look-up a page, each of which compares the page's key, however many histories there are.
"""

from __future__ import annotations

from ninfer.contract.errors import InvariantError
from ninfer.engine.context.identity import Identity
from ninfer.engine.context.records import PageNode


class PageTree:
    """`num_bytes` counts the keys of all nodes."""

    def __init__(self) -> None:
        self._roots: dict[bytes, PageNode] = {}
        self.num_bytes = 0
        self.num_nodes = 0

    def path(self, identity: Identity) -> list[PageNode]:
        """Nodes from the root along the identity's pages, as far as they are known. Empty when
        nothing with this salt is."""
        node = self._roots.get(identity.root)
        if node is None:
            return []
        path = [node]
        for key in identity.pages:
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def hold(self, identity: Identity, num_pages: int) -> PageNode:
        """The node of the first pages, made if need be, with one more holder."""
        node = self._roots.get(identity.root)
        if node is None:
            node = self._roots[identity.root] = PageNode(identity.root, None)
        for key in identity.pages[:num_pages]:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = PageNode(key, node)
                node.num_holders += 1
                self.num_nodes += 1
                self.num_bytes += len(key)
            node = child
        if node.depth != num_pages:
            raise InvariantError(f"a history of {node.depth} pages ends at page {num_pages}")
        node.num_holders += 1
        return node

    def drop(self, node: PageNode) -> None:
        """One holder less; what nobody holds is forgotten."""
        if node.num_holders < 1:
            raise InvariantError("a page of a history is dropped twice")
        node.num_holders -= 1
        while node.num_holders == 0:
            parent = node.parent
            if parent is None:
                del self._roots[node.key]
                return
            del parent.children[node.key]
            self.num_nodes -= 1
            self.num_bytes -= len(node.key)
            parent.num_holders -= 1
            node = parent
