"""ContextCache: which prefixes are kept, where a request starts, and what goes first.

    arrive     the prompt's identity
    choose     the cheapest true prefix, pinned
    bound      the request joins its session; what it may start from later is renewed
    reached    a checkpoint inside the prompt, if it is worth what must go for it
    finished   the checkpoint of the whole history; the session has gone on

It knows tokens, kinds, uses and ages. How much memory anything takes is the Program's to say.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice
from typing import Final

from ninfer.contract.cache import CacheUse, CheckpointKind, Tier
from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import (
    Amounts,
    Program,
    SequenceHandle,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.contract.prompt import PromptFrontier
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.background import Background
from ninfer.engine.context.costs import CostModel
from ninfer.engine.context.demand import Demand
from ninfer.engine.context.identity import Identity, identity_of
from ninfer.engine.context.keeper import Keeper
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context.misses import ClosestHistory, Reuse, first_difference, miss_reason
from ninfer.engine.context.notes import read_note
from ninfer.engine.context.records import Entry, PageNode, Session
from ninfer.engine.context.sessions import Known
from ninfer.engine.context.sources import Candidate, candidates, cheapest
from ninfer.engine.context.ticket import Ticket, answer_start_of, most_reusable, places_of
from ninfer.engine.context_metrics import ContextHoldings, ContextMetrics
from ninfer.engine.context_protocol import SourceChoice, TransferPlan

_logger = logging.getLogger(__name__)

MAX_DOMAINS: Final = 4
"""Sessions that are remembered as users of an entry."""
_NUM_PROMOTED: Final = 4
"""Waiting requests, oldest first, for which checkpoints are brought up ahead of time."""
_UNMARKED_FREE_ONLY: Final = frozenset({CheckpointKind.LONG_ANCHOR, CheckpointKind.STABLE_PREFIX})


class ContextCache:
    """Implements ContextPolicy. Used by the worker task alone."""

    def __init__(
        self, program: Program, memory: CacheMemory, limits: CacheLimits | None = None
    ) -> None:
        """Takes over the checkpoints that the Program found on disk."""
        self.metrics = ContextMetrics()
        self._program = program
        self._memory = memory
        self._limits = limits or CacheLimits()
        self._costs = CostModel()
        self._demand = Demand()
        self._tickets: dict[int, Ticket] = {}
        keeper = Keeper(program, memory, self._limits, self._costs, self.metrics)
        self._keeper = keeper
        self._catalogue = keeper.catalogue
        self._background = Background(program, memory, self._limits, self._costs, keeper)
        self._adopt_files()

    def arrive(self, ticket: int, request: GenerationRequest) -> None:
        if ticket in self._tickets:
            raise InvariantError(f"ticket {ticket} arrives twice")
        self._keeper.now += 1
        places = places_of(request, self._limits.min_tokens, has_states=self._memory.has_states)
        stable = [p.num_tokens for p in places.values() if p.kind is CheckpointKind.STABLE_PREFIX]
        self._tickets[ticket] = Ticket(
            number=ticket,
            identity=identity_of(request.prompt, request.cache.salt),
            key=request.cache.session_key,
            places=places,
            stable=max(stable, default=0),
            most=most_reusable(request),
            answer_start=answer_start_of(request.prompt),
        )

    def choose(self, ticket: int) -> SourceChoice:
        known = self._tickets[ticket]
        self._unpin(known)
        while True:
            best = self._best(known)
            if best is None:
                return SourceChoice(None, self._use(known, None))
            if best.entry.is_on_device or best.entry.is_on_host or self._has_host_room(best.entry):
                return self._pin(known, best)
            known.exclude(best.entry)

    def unpin(self, ticket: int) -> None:
        self._unpin(self._tickets[ticket])

    def bound(self, ticket: int, choice: SourceChoice) -> None:
        known = self._tickets[ticket]
        self._unpin(known)
        path = self._keeper.tree.path(known.identity)
        session = known.session
        if session is None:
            session = known.session = self._join_session(known, path)
            self.metrics.note_use(choice.use)
        self._renew(known, session, path)
        known.num_used = 0
        if choice.source is not None:
            known.num_used = choice.source.num_tokens
            self._note_source(session, choice.source)
        self._catalogue.touch()

    def stops(self, ticket: int) -> tuple[int, ...]:
        known = self._tickets[ticket]
        path = self._keeper.tree.path(known.identity)
        return tuple(
            sorted(
                frontier
                for frontier in known.places
                if known.num_used < frontier <= known.limit
                and self._catalogue.find(path, known.identity, frontier) is None
            )
        )

    def reached(self, ticket: int, handle: SequenceHandle, frontier: int) -> None:
        known = self._tickets[ticket]
        place, session = known.places.get(frontier), known.session
        path = self._keeper.tree.path(known.identity)
        if place is None or session is None:
            return
        if self._catalogue.find(path, known.identity, frontier) is not None:
            return
        if not self._has_slot(known, place, path):
            self.metrics.captures_refused[place.kind] += 1
            return
        checkpoint = self._program.capture(handle)
        if checkpoint is None:
            self.metrics.captures_refused[place.kind] += 1
            return
        self.metrics.captures[place.kind] += 1
        self._publish(session, known.number)
        entry = self._keeper.add(
            checkpoint, known.identity, frontier, place.kind, session, known.number
        )
        entry.is_explicit = place.is_explicit
        if place.kind is CheckpointKind.STABLE_PREFIX:
            entry.domains.add(session.number)

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        known = self._tickets[ticket]
        session, num_prompt = known.session, known.identity.num_tokens
        if session is None or session.newest > ticket or frontier < num_prompt:
            return False
        identity = known.identity.extended(accepted[: frontier - num_prompt])
        path = self._keeper.tree.path(identity)
        answers = _answers_within(self._known(known, identity, path), num_prompt)
        if frontier > num_prompt:
            answers = (*answers, (known.answer_start, frontier))
        self._publish(session, ticket)
        self._keeper.sessions.publish(session, identity, answers)
        self._catalogue.touch()
        is_new = self._catalogue.find(path, identity, frontier) is None
        if frontier < self._limits.min_tokens or not is_new:
            self._keeper.keep_bounds()
            return False
        checkpoint = self._program.pause(handle, keeps_state=True).checkpoint
        if checkpoint is not None:
            self.metrics.captures[CheckpointKind.SESSION_END] += 1
            kind = CheckpointKind.SESSION_END
            self._keeper.add(checkpoint, identity, frontier, kind, session, ticket)
        return True

    def left(self, ticket: int) -> None:
        self._unpin(self._tickets[ticket])
        del self._tickets[ticket]
        self._catalogue.touch()

    def relieve(self, need: Amounts) -> bool:
        if need.pages > 0 or need.slots > 0:
            return self._keeper.relieve_device(need)
        return need.host_blocks > 0 and self._keeper.relieve_host(need.host_blocks)

    def clear_device(self) -> bool:
        return self._keeper.clear_device()

    def reclaimable(self) -> Amounts:
        return self._keeper.reclaimable()

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        waiting = (t for t in self._tickets.values() if t.is_waiting and t.pin is None)
        for known in islice(waiting, _NUM_PROMOTED):
            best = self._best(known)
            if best is not None:
                plan = self._promotion(known, best.entry)
                if plan is not None:
                    return plan
        return self._background.next_plan(is_idle=is_idle)

    def transferred(self, plan: TransferPlan, transfer: Transfer | None, *, is_ok: bool) -> None:
        self._count(plan.kind, was_begun=transfer is not None, is_ok=is_ok)
        entry = self._catalogue.get(plan.checkpoint)
        if entry is None:
            return
        origin = entry.tier
        for known in self._tickets.values():
            if known.move is not plan:
                continue
            known.move = None
            if is_ok:
                known.origins.setdefault(entry.checkpoint, origin)
            elif known.pin is entry or transfer is not None:
                known.exclude(entry)
        if not is_ok:
            entry.refused.add(plan.kind)
        if transfer is None:
            return
        if plan.kind is TransferKind.STORE:
            self._refresh_files()
        self._refresh(entry)

    def note_rates(
        self, *, prefill_tokens_s: float | None = None, move_tokens_s: float | None = None
    ) -> None:
        self._costs.note(prefill_tokens_s, move_tokens_s)

    def flush(self) -> None:
        self._keeper.flush()
        self._demand.clear()

    def holdings(self) -> ContextHoldings:
        """Counts for metrics; they cost a pass over the catalogue."""
        entries: Counter[Tier] = Counter()
        tokens: Counter[Tier] = Counter()
        for entry in self._catalogue:
            places = (
                (Tier.DEVICE, entry.is_on_device),
                (Tier.HOST, entry.is_on_host),
                (Tier.DISK, entry.is_on_disk),
            )
            for tier, is_there in places:
                if is_there:
                    entries[tier] += 1
                    tokens[tier] += entry.frontier
        amounts = self._program.reclaimable([entry.checkpoint for entry in self._catalogue])
        memory = self._memory
        num_bytes = Counter(
            {
                Tier.DEVICE: amounts.pages * memory.page_bytes + amounts.slots * memory.slot_bytes,
                Tier.HOST: amounts.host_blocks * memory.page_bytes,
                Tier.DISK: amounts.disk_bytes,
            }
        )
        return ContextHoldings(
            num_entries=len(self._catalogue),
            entries=entries,
            tokens=tokens,
            num_bytes=num_bytes,
            id_bytes=self._keeper.tree.num_bytes,
            num_sessions=len(self._keeper.sessions),
            num_evicted=len(self._keeper.evicted),
        )

    def _promotion(self, known: Ticket, entry: Entry) -> TransferPlan | None:
        """Bring up what a waiting request will start from, once: others may want the room too."""
        move = entry.checkpoint, entry.tier
        plan = None if move in known.promoted else self._background.promotion(entry)
        if plan is not None:
            known.promoted.add(move)
            known.move = plan
        return plan

    def _best(self, known: Ticket) -> Candidate | None:
        session = known.session
        return cheapest(
            self._candidates(known),
            self._costs,
            known.identity.num_tokens,
            None if session is None else session.number,
            known.excluded,
        )

    def _candidates(self, known: Ticket) -> list[Candidate]:
        revision = self._catalogue.revision
        if known.found is None or known.found[0] != revision:
            path = self._keeper.tree.path(known.identity)
            found = candidates(
                self._catalogue,
                path,
                known.identity,
                known.most,
                has_states=self._memory.has_states,
            )
            known.found = revision, path, found
        return known.found[2]

    def _path(self, known: Ticket) -> list[PageNode]:
        self._candidates(known)
        return [] if known.found is None else known.found[1]

    def _pin(self, known: Ticket, best: Candidate) -> SourceChoice:
        entry = best.entry
        entry.num_pins += 1
        known.pin = entry
        use = self._use(known, best)
        if not entry.is_on_device:
            kind = TransferKind.RESTORE if entry.is_on_host else TransferKind.FETCH
            known.move = TransferPlan(kind, entry.checkpoint)
            return SourceChoice(None, use, known.move)
        consumes = self._is_consumed(known, best)
        return SourceChoice(Source(entry.checkpoint, best.num_tokens, consumes), use)

    def _is_consumed(self, known: Ticket, best: Candidate) -> bool:
        """A session's end that the session goes on from, when there is no memory to have both."""
        entry = best.entry
        has_room = self._program.free().pages > 0 and self._num_spare_slots() > 1
        if has_room or entry.kind is not CheckpointKind.SESSION_END or entry.is_shared:
            return False
        if entry.is_on_host or entry.is_on_disk or entry.num_pins > 1:
            return False
        closest = self._known(known, known.identity, self._path(known))
        is_own = closest is not None and closest.is_same and closest.session is entry.session
        facts = self._program.checkpoint(entry.checkpoint)
        return is_own and best.num_tokens == entry.frontier and not facts.is_leased

    def _unpin(self, known: Ticket) -> None:
        if known.pin is not None:
            known.pin.num_pins -= 1
            known.pin = known.move = None

    def _use(self, known: Ticket, best: Candidate | None) -> CacheUse:
        path = self._path(known)
        closest = self._known(known, known.identity, path)
        num_used = 0 if best is None else best.num_tokens
        deepest = max((c.num_tokens for c in self._candidates(known)), default=0)
        reuse = Reuse(
            num_tokens=known.identity.num_tokens,
            num_used=num_used,
            least=self._limits.min_tokens,
            granule=1 if self._memory.has_states else PAGE_TOKENS,
            closest=None if closest is None else _facts_of(closest),
            has_unrestored=max(known.lost, deepest) > num_used,
            has_evicted=self._keeper.evicted.has_between(known.identity, num_used, known.most),
            most=known.most if known.most < known.limit else None,
        )
        return CacheUse(
            num_tokens=num_used,
            kind=None if best is None else best.entry.kind,
            tier=None if best is None else self._origin(known, best.entry),
            miss=miss_reason(reuse),
            first_difference=first_difference(reuse),
        )

    def _origin(self, known: Ticket, entry: Entry) -> Tier:
        return known.origins.get(entry.checkpoint, entry.tier)

    def _known(self, known: Ticket, identity: Identity, path: list[PageNode]) -> Known | None:
        return self._keeper.sessions.known(identity, path, known.key, known.stable)

    def _join_session(self, known: Ticket, path: list[PageNode]) -> Session:
        closest = self._known(known, known.identity, path)
        session = self._keeper.sessions.session_of(known.identity, closest, known.key, known.stable)
        for place in known.places.values():
            if place.kind is CheckpointKind.STABLE_PREFIX:
                self._demand.note(known.identity.digest(place.num_tokens), session.number)
        if closest is not None and closest.session is session:
            is_cut = closest.common < min(session.num_tokens, known.identity.num_tokens)
            session.is_rewritten = is_cut
        return session

    def _renew(self, known: Ticket, session: Session, path: list[PageNode]) -> None:
        """Entries at this prompt's places are of use to whoever continues it."""
        for entry in self._catalogue.prefixes(path, known.identity, known.limit):
            if entry.frontier not in known.places:
                continue
            entry.last_used = self._keeper.now
            entry.is_superseded = False
            if entry.session is session:
                entry.order = max(entry.order, known.number)
            if known.places[entry.frontier].kind is CheckpointKind.STABLE_PREFIX:
                entry.kind = CheckpointKind.STABLE_PREFIX
                _add_domain(entry, session)

    def _note_source(self, session: Session, source: Source) -> None:
        entry = self._catalogue.get(source.checkpoint)
        if entry is None:
            raise InvariantError(f"checkpoint {source.checkpoint} is a source, but not known")
        if source.consumes:
            self._keeper.consumed(entry)
            return
        entry.num_uses += 1
        entry.last_used = self._keeper.now
        entry.refused.clear()
        _add_domain(entry, session)

    def _publish(self, session: Session, order: int) -> None:
        """The session has gone on: what only its older requests had use for goes first."""
        session.newest = max(session.newest, order)
        for entry in session.entries:
            if entry.order < session.newest and entry.kind is not CheckpointKind.STABLE_PREFIX:
                entry.is_superseded = True

    def _has_slot(self, known: Ticket, place: PromptFrontier, path: list[PageNode]) -> bool:
        """Whether a StateImage slot is left for the capture when every row has one for its next
        unit, if need be in place of a checkpoint that is worth less."""
        if self._num_spare_slots() > 0:
            return True
        identity, frontier = known.identity, place.num_tokens
        is_observed = self._demand.is_observed(identity.digest(frontier))
        if place.kind in _UNMARKED_FREE_ONLY and not (place.is_explicit or is_observed):
            return False
        shorter = self._catalogue.prefixes(path, identity, frontier - 1)
        num_new = frontier - (shorter[-1].frontier if shorter else 0)
        gain = (2 if is_observed else 1), self._costs.prefill_s(num_new)
        victims = self._keeper.victims(Tier.DEVICE, lambda amounts: min(1, amounts.slots))
        ranks = [self._loss(victim) for victim in victims]
        if not ranks or max(level for level, _ in ranks) > gain[0]:
            return False
        if sum(loss_s for level, loss_s in ranks if level == gain[0]) >= gain[1]:
            return False
        self._keeper.drop_all(victims, Tier.DEVICE)
        return True

    def _num_spare_slots(self) -> int:
        """Free StateImage slots that no row needs for its next unit."""
        if not self._memory.has_states:
            return self._program.capacity.num_slots
        return self._program.free().slots - self._program.occupancy().lanes_used

    def _loss(self, entry: Entry) -> tuple[int, float]:
        return self._keeper.retention.rank(entry, self._keeper.now, tier=Tier.DEVICE)

    def _has_host_room(self, entry: Entry) -> bool:
        return self._keeper.make_host_room(
            entry.num_pages + self._memory.num_state_blocks, keep=entry
        )

    def _count(self, kind: TransferKind, *, was_begun: bool, is_ok: bool) -> None:
        if is_ok:
            self.metrics.transfers[kind] += 1
        elif was_begun:
            self.metrics.transfers_failed[kind] += 1
        else:
            self.metrics.transfers_refused[kind] += 1

    def _refresh_files(self) -> None:
        """Files that were put out for a new one are gone."""
        for entry in list(self._catalogue):
            if entry.is_on_disk:
                self._refresh(entry)

    def _refresh(self, entry: Entry) -> None:
        self._keeper.refresh(entry)
        if self._catalogue.get(entry.checkpoint) is None:
            for known in self._tickets.values():
                if known.pin is entry:
                    known.exclude(entry)
                    self._unpin(known)

    def _adopt_files(self) -> None:
        for checkpoint, note in self._program.disk_notes().items():
            frontier = self._program.checkpoint(checkpoint).frontier
            read = read_note(note, frontier)
            if read is None:
                _logger.warning("cache: a file of %d tokens is not used: its note", frontier)
                self._program.release(checkpoint)
                continue
            path = self._keeper.tree.path(read.identity)
            if self._catalogue.find(path, read.identity, frontier) is not None:
                self._program.release(checkpoint)
                continue
            entry = self._keeper.add(checkpoint, read.identity, frontier, read.kind, None, -1)
            if read.is_shared:
                entry.domains |= {-1, -2}


def _add_domain(entry: Entry, session: Session) -> None:
    if len(entry.domains) < MAX_DOMAINS:
        entry.domains.add(session.number)


def _answers_within(known: Known | None, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Answers of the closest history that a prompt of so many tokens begins with."""
    if known is None:
        return ()
    limit = min(known.common, num_tokens)
    return tuple(answer for answer in known.session.answers if answer[1] <= limit)


def _facts_of(known: Known) -> ClosestHistory:
    session = known.session
    return ClosestHistory(known.common, session.num_tokens, session.answers, known.is_same)
