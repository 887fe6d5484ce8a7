"""Scheduler: who is admitted and which unit runs next. Pure policy over tickets.

It knows no clock, arrays, pages or text: only lanes, the worst case of each request in pages and
how far its prompt is. Tickets are in order of arrival and admission never overtakes.

    enqueue -> (next_admission, admit) -> prefill chunks -> decode rows -> remove

* Decode takes all ready rows in one batch; one prefill chunk runs between two decode batches, and
  residents in prefill take turns.
* Chunk borders are multiples of the chunk size from 0, whatever else runs, so that a busy server
  computes a request exactly as an idle one does.
* Residents' worst cases together fit the pool, so a resident always gets its next unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import Capacity


@dataclass(frozen=True, slots=True)
class PrefillUnit:
    """`is_last`: the chunk ends the prompt, so the unit also samples."""

    ticket: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class DecodeUnit:
    tickets: tuple[int, ...]


UnitPlan: TypeAlias = PrefillUnit | DecodeUnit


@dataclass(slots=True)
class _Entry:
    num_prompt_tokens: int
    worst_case_pages: int
    frontier: int = 0


class Scheduler:
    """Each ticket is in one of the waiting queue, the prefill rotation and the ready set."""

    def __init__(self, capacity: Capacity) -> None:
        self._num_lanes = capacity.max_concurrency
        self._num_pages = capacity.num_pages
        self._prefill_chunk = capacity.prefill_chunk
        self._waiting: dict[int, _Entry] = {}
        self._prefilling: dict[int, _Entry] = {}
        self._ready: dict[int, _Entry] = {}
        self._promised_pages = 0
        self._last_ticket = -1
        self._is_prefill_turn = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._ready)

    @property
    def has_prompts(self) -> bool:
        """Some resident's prompt is not done."""
        return bool(self._prefilling)

    def enqueue(self, ticket: int, *, num_prompt_tokens: int, worst_case_pages: int) -> None:
        """Append to the queue. Tickets rise; a worst case beyond the pool is an InvariantError."""
        if ticket <= self._last_ticket:
            raise InvariantError(f"ticket {ticket} comes after {self._last_ticket}")
        if worst_case_pages > self._num_pages:
            raise InvariantError(f"ticket {ticket} can never be admitted")
        self._last_ticket = ticket
        self._waiting[ticket] = _Entry(num_prompt_tokens, worst_case_pages)

    def next_admission(self) -> int | None:
        """The head of the queue if it can be admitted now."""
        if not self._waiting or self.num_running >= self._num_lanes:
            return None
        ticket, entry = next(iter(self._waiting.items()))
        if self._promised_pages + entry.worst_case_pages > self._num_pages:
            return None
        return ticket

    def admit(self, ticket: int) -> None:
        """Make the head of the queue a resident; InvariantError for any other ticket."""
        if self.next_admission() != ticket:
            raise InvariantError(f"ticket {ticket} may not be admitted now")
        entry = self._waiting.pop(ticket)
        self._promised_pages += entry.worst_case_pages
        self._prefilling[ticket] = entry

    def candidates(self) -> Iterator[UnitPlan]:
        """Units in order of preference; each later one is for when those before get no memory."""
        decode = [DecodeUnit(tuple(self._ready))] if self._ready else []
        prefills = [self._next_chunk(ticket) for ticket in self._prefilling]
        if self._is_prefill_turn:
            yield from prefills
            yield from decode
        else:
            yield from decode
            yield from prefills

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

    def remove(self, ticket: int) -> None:
        """Forget a ticket in whatever state it is."""
        if self._waiting.pop(ticket, None) is not None:
            return
        entry = self._prefilling.pop(ticket, None) or self._ready.pop(ticket, None)
        if entry is None:
            raise InvariantError(f"ticket {ticket} is not known")
        self._promised_pages -= entry.worst_case_pages

    def _next_chunk(self, ticket: int) -> PrefillUnit:
        entry = self._prefilling[ticket]
        border = (entry.frontier // self._prefill_chunk + 1) * self._prefill_chunk
        is_last = border >= entry.num_prompt_tokens
        stop = entry.num_prompt_tokens if is_last else border
        return PrefillUnit(ticket, stop - entry.frontier, is_last)
