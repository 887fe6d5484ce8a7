"""Sources: what a prompt can start from, and what is cheapest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ninfer.contract.cache import CheckpointId
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.catalogue import Catalogue
from ninfer.engine.context.costs import CostModel
from ninfer.engine.context.identity import Identity
from ninfer.engine.context.records import Entry, PageNode


@dataclass(frozen=True, slots=True)
class Candidate:
    """`num_tokens` of the entry are a prefix of the prompt."""

    entry: Entry
    num_tokens: int


def candidates(
    catalogue: Catalogue,
    path: Sequence[PageNode],
    identity: Identity,
    limit: int,
    *,
    has_states: bool,
) -> list[Candidate]:
    """Everything of at most `limit` tokens that the prompt can start from. `path` is the prompt's
    path in the tree of pages. A model of attention alone can use the first pages of any entry."""
    found = [
        Candidate(entry, entry.frontier) for entry in catalogue.prefixes(path, identity, limit)
    ]
    if not has_states:
        known = {candidate.entry.checkpoint for candidate in found}
        for entry, num_pages in catalogue.sharing(path):
            num_tokens = min(num_pages, limit // PAGE_TOKENS) * PAGE_TOKENS
            if num_tokens > 0 and entry.checkpoint not in known:
                found.append(Candidate(entry, num_tokens))
    return found


def cheapest(
    found: Sequence[Candidate],
    costs: CostModel,
    num_prompt_tokens: int,
    session: int | None,
    excluded: Collection[CheckpointId],
) -> Candidate | None:
    """The candidate with the least time to have the whole prompt; None when computing it from the
    start takes no longer. Ties: fewer bytes to move, deeper, the session's own, the younger."""
    best: tuple[tuple[float, int, int, bool, int], Candidate] | None = None
    from_root_s = costs.prefill_s(num_prompt_tokens)
    for candidate in found:
        entry = candidate.entry
        if entry.checkpoint in excluded or entry.is_lost:
            continue
        seconds = costs.source_s(
            num_prompt_tokens, candidate.num_tokens, entry.frontier, entry.tier
        )
        if seconds >= from_root_s:
            continue
        is_foreign = entry.session is None or entry.session.number != session
        num_moved = 0 if entry.is_on_device else entry.frontier
        rank = seconds, num_moved, -candidate.num_tokens, is_foreign, -entry.order
        if best is None or rank < best[0]:
            best = rank, candidate
    return None if best is None else best[1]
