"""What the context cache keeps: pages of known histories, sessions, and entries for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from ninfer.contract.cache import CheckpointId, CheckpointKind, Tier
from ninfer.contract.program import TransferKind
from ninfer.contract.units import PAGE_TOKENS


class PageNode:
    """One complete page behind its parent; the path from the root is a prefix of `depth` pages.

    children      by their key
    num_holders   children, and whoever ends here
    entries       checkpoints whose frontier lies in the page that follows, or at its start
    latest        the session that came through last
    """

    __slots__ = ("children", "depth", "entries", "key", "latest", "num_holders", "parent")

    def __init__(self, key: bytes, parent: PageNode | None) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, PageNode] = {}
        self.entries: list[Entry] = []
        self.latest: Session | None = None
        self.num_holders = 0


@dataclass(slots=True, eq=False)
class Session:
    """A conversation: requests of which each mostly continues the one before.

    number        names it
    key           what the client calls it, or None
    newest        ticket of the newest request that published something
    node, tail, num_tokens   its newest history; node is None before the first
    answers       where in that history generated tokens are, ascending
    entries       its private checkpoints
    is_rewritten  the last request changed an earlier answer
    """

    number: int
    key: str | None
    newest: int = -1
    node: PageNode | None = None
    tail: bytes = b""
    num_tokens: int = 0
    answers: tuple[tuple[int, int], ...] = ()
    entries: set[Entry] = field(default_factory=set)
    is_rewritten: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """A checkpoint and what it is worth. Times count requests.

    node, tail   where it ends in the tree of pages
    page_digest, digest   name its complete pages, and all of its tokens
    session      whose private continuation it is; None for what was found on disk
    order        ticket of the newest request that made it or had its frontier as a place
    domains      numbers of some sessions that started from it
    is_superseded   its session has gone on to a deeper one
    num_pins     requests that have chosen it and are not bound yet
    refused      kinds of transfers that could not begin, or failed, since it was last used
    parent, children   the forest of the catalogue
    """

    checkpoint: CheckpointId
    frontier: int
    kind: CheckpointKind
    node: PageNode
    tail: bytes
    page_digest: bytes
    digest: bytes
    session: Session | None
    order: int
    is_explicit: bool = False
    is_on_device: bool = False
    is_on_host: bool = False
    is_on_disk: bool = False
    num_uses: int = 0
    last_used: int = 0
    domains: set[int] = field(default_factory=set)
    is_superseded: bool = False
    num_pins: int = 0
    refused: set[TransferKind] = field(default_factory=set)
    parent: Entry | None = None
    children: set[Entry] = field(default_factory=set)

    @property
    def tier(self) -> Tier:
        """The best one; of one that is nowhere, disk."""
        if self.is_on_device:
            return Tier.DEVICE
        return Tier.HOST if self.is_on_host else Tier.DISK

    @property
    def is_lost(self) -> bool:
        return not (self.is_on_device or self.is_on_host or self.is_on_disk)

    @property
    def num_pages(self) -> int:
        return -(-self.frontier // PAGE_TOKENS)

    @property
    def is_shared(self) -> bool:
        """Sessions that have nothing else in common started from it."""
        return len(self.domains) > 1

    @property
    def marginal_tokens(self) -> int:
        """Tokens to compute from the next best entry to have it again."""
        return self.frontier - (0 if self.parent is None else self.parent.frontier)
