"""Scheduler: who is admitted, who runs next and who makes room. Pure policy over tickets.

It knows no clock, arrays, pages or text: only lanes, the order of arrival and how far a prompt is.

    enqueue -> take_lane -> bind -> prefill chunks -> decode rows -> remove
                  ^                        |              |
                  +---- paused <- pause ---+--------------+

* The queue is everyone without a lane, waiting or paused, by ticket. A member may be overtaken by
  at most `max_concurrency` younger newcomers in its life.
* Decode takes all ready rows in one batch; one prefill chunk runs between two decode batches, and
  residents in prefill take turns.
* At most one resident is protected: it goes first and cannot be paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import REPLAY_TOKENS, Capacity
from ninfer.engine.chunks import chunk_end


@dataclass(frozen=True, slots=True)
class PrefillUnit:
    """`is_last`: the chunk ends the prompt."""

    ticket: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class DecodeUnit:
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplayUnit:
    """Tokens of a ready row that were forced: all but the newest, as many as fit."""

    ticket: int
    num_tokens: int


UnitPlan: TypeAlias = PrefillUnit | DecodeUnit | ReplayUnit


@dataclass(slots=True)
class _Entry:
    """`overtaken`: younger requests that were admitted while this one had no lane. `num_forced`: of
    a ready row, inputs to be fed several at once before it decodes."""

    num_prompt_tokens: int
    stops: tuple[int, ...] = ()
    frontier: int = 0
    overtaken: int = 0
    num_forced: int = 0


class Scheduler:
    """Each ticket is in one of: waiting, binding (it has a lane and no sequence), prefilling,
    ready, paused. `revision` counts what may let somebody in or give a row its memory."""

    def __init__(self, capacity: Capacity) -> None:
        self._num_lanes = capacity.max_concurrency
        self._prefill_chunk = capacity.prefill_chunk
        self._replay_tokens = min(REPLAY_TOKENS, capacity.prefill_chunk)
        self._waiting: dict[int, _Entry] = {}
        self._binding: dict[int, _Entry] = {}
        self._prefilling: dict[int, _Entry] = {}
        self._ready: dict[int, _Entry] = {}
        self._paused: dict[int, _Entry] = {}
        self._last_ticket = -1
        self._is_prefill_turn = False
        self._protected: int | None = None
        self.revision = 0

    @property
    def num_waiting(self) -> int:
        """Newcomers without a lane."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def num_running(self) -> int:
        """Lanes in use."""
        return len(self._binding) + len(self._prefilling) + len(self._ready)

    @property
    def has_prompts(self) -> bool:
        """Some resident has inputs that come before its next decode step."""
        return bool(self._prefilling) or any(entry.num_forced for entry in self._ready.values())

    @property
    def has_free_lane(self) -> bool:
        return self.num_running < self._num_lanes

    @property
    def protected(self) -> int | None:
        return self._protected

    @property
    def oldest_paused(self) -> int | None:
        return min(self._paused, default=None)

    def residents(self) -> list[int]:
        """Tickets for which units can run, ascending."""
        return sorted((*self._prefilling, *self._ready))

    def note_event(self) -> None:
        """Memory or the transfer slot became free."""
        self.revision += 1

    def enqueue(self, ticket: int, *, num_prompt_tokens: int) -> None:
        """Append to the queue; tickets rise."""
        if ticket <= self._last_ticket:
            raise InvariantError(f"ticket {ticket} comes after {self._last_ticket}")
        self._last_ticket = ticket
        self._waiting[ticket] = _Entry(num_prompt_tokens)
        self.revision += 1

    def admissible(self, holds_back: Callable[[int], bool] = lambda _: False) -> Iterator[int]:
        """Waiting tickets to try, oldest first: the head and at most `max_concurrency` followers,
        without those that hold back: they want no lane now.

        Take a lane for each before asking for the next, or not.
        """
        num_tried = 0
        for ticket in list(self._waiting):
            if not self.has_free_lane or not self._may_be_admitted(ticket):
                return
            if holds_back(ticket):
                continue
            if num_tried > self._num_lanes:
                return
            num_tried += 1
            yield ticket

    def take_lane(self, ticket: int) -> None:
        """A waiting or paused ticket will be bound. InvariantError when it is not its turn."""
        if not self.has_free_lane:
            raise InvariantError(f"ticket {ticket} finds no free lane")
        if (entry := self._paused.pop(ticket, None)) is None:
            if ticket not in self._waiting or not self._may_be_admitted(ticket):
                raise InvariantError(f"ticket {ticket} may not be admitted now")
            entry = self._waiting.pop(ticket)
            for older in self._blocked(ticket):
                older.overtaken += 1
        self._binding[ticket] = entry

    def bind(self, ticket: int, frontier: int, stops: tuple[int, ...] = ()) -> None:
        """Its sequence is open at `frontier`; `stops` are where its chunks end besides."""
        entry = self._binding.pop(ticket, None)
        if entry is None:
            raise InvariantError(f"ticket {ticket} has no lane to be bound to")
        entry.stops, entry.num_forced = stops, 0
        entry.frontier = min(frontier, entry.num_prompt_tokens)
        is_ready = entry.frontier == entry.num_prompt_tokens
        (self._ready if is_ready else self._prefilling)[ticket] = entry
        self.revision += 1

    def give_back(self, ticket: int) -> None:
        """A ticket that was paused cannot be bound now; its lane is free again."""
        self._paused[ticket] = self._binding.pop(ticket)
        self._unprotect(ticket)

    def pause(self, ticket: int) -> None:
        """A resident gives up its lane."""
        if ticket == self._protected:
            raise InvariantError(f"ticket {ticket} is protected")
        self._paused[ticket] = self._pop_resident(ticket)
        self.revision += 1

    def protectable(self) -> int | None:
        """The oldest paused ticket when it is older than everyone with a lane and nobody is
        protected."""
        ticket = self.oldest_paused
        if ticket is None or self._protected is not None:
            return None
        others = (*self._binding, *self._prefilling, *self._ready)
        return ticket if ticket < min(others, default=ticket + 1) else None

    def protect(self, ticket: int) -> None:
        """Until `end_protection`; only what `protectable` says."""
        if self.protectable() != ticket:
            raise InvariantError(f"ticket {ticket} may not be protected")
        self._protected = ticket

    def end_protection(self, ticket: int) -> None:
        """The ticket has made progress of its own. Without effect on others."""
        if ticket == self._protected:
            self._protected = None
            self.revision += 1

    def victim(self, ticket: int) -> int | None:
        """The youngest resident that is younger than `ticket` (or, for the protected ticket, any)
        and may be paused for it."""
        may_be_older = ticket == self._protected
        for other in reversed(self.residents()):
            if other not in (ticket, self._protected) and (may_be_older or other > ticket):
                return other
        return None

    def candidates(self, chunk_limit: int | None = None) -> list[UnitPlan]:
        """Units in order of preference; each later one is for when those before get no memory.

        chunk_limit   most tokens of a chunk while rows are ready to decode
        """
        limit = chunk_limit if self._ready else None
        decode: list[UnitPlan] = []
        ready = sorted(self._ready, key=self._priority)
        tickets = tuple(ticket for ticket in ready if not self._ready[ticket].num_forced)
        if tickets:
            decode.append(DecodeUnit(tickets))
        order = sorted(self._prefilling, key=lambda ticket: ticket != self._protected)
        prefills: list[UnitPlan] = [self._next_chunk(ticket, limit) for ticket in order]
        first: list[UnitPlan] = [
            ReplayUnit(ticket, min(self._ready[ticket].num_forced, self._replay_tokens))
            for ticket in ready
            if self._ready[ticket].num_forced
        ]
        others = first + prefills
        return others + decode if self._is_prefill_turn else decode + others

    def note_launched(self, unit: UnitPlan) -> None:
        """The unit runs: the other kind is next, and this resident's prefill turn is over."""
        self._is_prefill_turn = isinstance(unit, DecodeUnit)
        if isinstance(unit, PrefillUnit):
            self._prefilling[unit.ticket] = self._prefilling.pop(unit.ticket)

    def note_prefilled(self, ticket: int, frontier: int) -> None:
        """Prompt inputs up to `frontier` are committed; at the prompt's end the row is ready."""
        entry = self._prefilling[ticket]
        if not entry.frontier <= frontier <= entry.num_prompt_tokens:
            raise InvariantError(f"ticket {ticket} went from {entry.frontier} to {frontier}")
        entry.frontier = frontier
        if frontier == entry.num_prompt_tokens:
            self._ready[ticket] = self._prefilling.pop(ticket)

    def note_forced(self, ticket: int, num_tokens: int) -> None:
        """So many inputs of a ready row are to be fed before it decodes."""
        self._ready[ticket].num_forced = num_tokens

    def note_replayed(self, ticket: int, num_tokens: int) -> None:
        """A ReplayUnit of it is committed."""
        entry = self._ready[ticket]
        entry.num_forced = max(0, entry.num_forced - num_tokens)

    def remove(self, ticket: int) -> None:
        """Forget a ticket in whatever state it is."""
        for group in (self._waiting, self._binding, self._paused):
            if group.pop(ticket, None) is not None:
                break
        else:
            self._pop_resident(ticket)
        self._unprotect(ticket)
        self.revision += 1

    def _may_be_admitted(self, ticket: int) -> bool:
        return all(older.overtaken < self._num_lanes for older in self._blocked(ticket))

    def _blocked(self, ticket: int) -> Iterator[_Entry]:
        """Members of the queue that are older than `ticket`."""
        for group in (self._paused, self._waiting):
            for other, entry in group.items():
                if other < ticket:
                    yield entry
                elif group is self._waiting:
                    break

    def _priority(self, ticket: int) -> tuple[bool, int]:
        return ticket != self._protected, ticket

    def _unprotect(self, ticket: int) -> None:
        if ticket == self._protected:
            self._protected = None

    def _pop_resident(self, ticket: int) -> _Entry:
        entry = self._prefilling.pop(ticket, None) or self._ready.pop(ticket, None)
        if entry is None:
            raise InvariantError(f"ticket {ticket} is not known, or no resident")
        return entry

    def _next_chunk(self, ticket: int, limit: int | None) -> PrefillUnit:
        entry = self._prefilling[ticket]
        end = chunk_end(
            entry.frontier, entry.num_prompt_tokens, self._prefill_chunk, entry.stops, limit
        )
        return PrefillUnit(ticket, end - entry.frontier, end == entry.num_prompt_tokens)
