"""Sessions: which conversation a request belongs to, and what its history was.

A client's session key may stand for one conversation or for many; without a key the tokens alone
tell. So a request continues the session whose newest history it shares most with, as long as that
is more than the beginning which any two requests of one application share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.identity import Identity, num_common
from ninfer.engine.context.page_tree import PageTree
from ninfer.engine.context.records import PageNode, Session

MAX_SESSIONS: Final = 1024
MAX_PER_KEY: Final = 8
"""Conversations that are remembered under one key."""
_MIN_SHARED: Final = 16
"""Tokens behind the stable prefix that make two requests one conversation."""


@dataclass(frozen=True, slots=True)
class Known:
    """The known history that is closest to a prompt.

    common       tokens they have in common
    is_same      it is the session's own
    """

    session: Session
    common: int
    is_same: bool


class Sessions:
    """Bounded: the one that was quiet longest is forgotten first; its entries stay."""

    def __init__(self, tree: PageTree, max_sessions: int = MAX_SESSIONS) -> None:
        self._tree = tree
        self._max_sessions = max_sessions
        self._by_number: OrderedDict[int, Session] = OrderedDict()
        self._by_key: dict[tuple[bytes, str], list[Session]] = {}
        self._roots: dict[int, bytes] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_number.values())

    def known(
        self, identity: Identity, path: Sequence[PageNode], key: str | None, stable: int
    ) -> Known | None:
        """The closest history: of the key's sessions, else the last that came along the path.

        stable   tokens of the prompt's shared beginning
        """
        own = self._closest(identity, path, key)
        if own is not None:
            return Known(own[0], own[1], is_same=True)
        latest = _latest(path)
        if latest is None:
            return None
        common = common_tokens(identity, path, latest)
        known = Known(latest, common, is_same=False)
        if key is None and latest.key is None and _is_most(known, stable):
            return Known(latest, common, is_same=True)
        return known

    def session_of(
        self, identity: Identity, known: Known | None, key: str | None, stable: int
    ) -> Session:
        """The session a request with this closest history belongs to, new if need be."""
        if known is not None and known.is_same and _continues(known, stable):
            self._by_number.move_to_end(known.session.number)
            return known.session
        self._last_number += 1
        session = Session(self._last_number, key)
        self._register(session, identity.root)
        return session

    def publish(
        self, session: Session, identity: Identity, answers: tuple[tuple[int, int], ...]
    ) -> None:
        """The session's newest history."""
        if session.number not in self._by_number:
            self._register(session, identity.root)
        node = self._tree.hold(identity, identity.num_tokens // PAGE_TOKENS)
        if session.node is not None:
            self._tree.drop(session.node)
        session.node, session.tail = node, identity.tail(identity.num_tokens)
        session.num_tokens, session.answers = identity.num_tokens, answers
        above: PageNode | None = node
        while above is not None:
            above.latest = session
            above = above.parent

    def forget_oldest(self, *, is_bare: bool) -> bool:
        """Forget the history that was quiet longest; False when there is none. `is_bare`: only one
        whose session has no checkpoints."""
        for session in self._by_number.values():
            if session.node is not None and not (is_bare and session.entries):
                self._forget(session)
                return True
        return False

    def _register(self, session: Session, root: bytes) -> None:
        self._by_number[session.number] = session
        self._roots[session.number] = root
        if session.key is not None:
            siblings = self._by_key.setdefault((root, session.key), [])
            siblings.append(session)
            if len(siblings) > MAX_PER_KEY:
                self._forget(siblings[0])
        while len(self._by_number) > self._max_sessions:
            self._forget(next(iter(self._by_number.values())))

    def _forget(self, session: Session) -> None:
        del self._by_number[session.number]
        root = self._roots.pop(session.number)
        if session.key is not None:
            siblings = self._by_key[root, session.key]
            siblings.remove(session)
            if not siblings:
                del self._by_key[root, session.key]
        if session.node is not None:
            self._tree.drop(session.node)
            session.node, session.tail, session.num_tokens = None, b"", 0

    def _closest(
        self, identity: Identity, path: Sequence[PageNode], key: str | None
    ) -> tuple[Session, int] | None:
        if key is None:
            return None
        best: tuple[Session, int] | None = None
        for session in reversed(self._by_key.get((identity.root, key), ())):
            if session.node is not None:
                common = common_tokens(identity, path, session)
                if best is None or common > best[1]:
                    best = session, common
        return best


def _latest(path: Sequence[PageNode]) -> Session | None:
    """Whoever came through last as far along the path as anyone did."""
    for node in reversed(path):
        if node.latest is not None and node.latest.node is not None:
            return node.latest
    return None


def _is_most(known: Known, stable: int) -> bool:
    """They share most of what the history has between the stable prefix and its last answer."""
    answers = known.session.answers
    end = answers[-1][0] if answers else known.session.num_tokens
    num_shared = known.common - stable
    return num_shared >= _MIN_SHARED and 2 * num_shared >= end - stable


def _continues(known: Known, stable: int) -> bool:
    """Where the stable prefix is known, a little beyond it under one key is one conversation."""
    return _is_most(known, stable) or (stable > 0 and known.common >= stable + _MIN_SHARED)


def common_tokens(identity: Identity, path: Sequence[PageNode], session: Session) -> int:
    """Tokens that a prompt and a session's newest history begin with alike. `path` is the prompt's
    path in the tree of pages."""
    node, key, num_tokens = session.node, session.tail, session.num_tokens % PAGE_TOKENS
    while node is not None and (node.depth >= len(path) or path[node.depth] is not node):
        key, num_tokens, node = node.key, PAGE_TOKENS, node.parent
    if node is None:
        return 0
    start = node.depth * PAGE_TOKENS
    stop = min(start + PAGE_TOKENS, identity.num_tokens)
    return start + num_common(identity.part(start, stop), key, start, stop - start, num_tokens)
