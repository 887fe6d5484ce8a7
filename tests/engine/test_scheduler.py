from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import Capacity
from ninfer.engine.scheduler import DecodeUnit, PrefillUnit, Scheduler

CHUNK = 8


def scheduler(*, lanes: int = 2, num_pages: int = 10) -> Scheduler:
    return Scheduler(Capacity(lanes, 1024, num_pages, 2 * lanes + 1, CHUNK))


def enqueue(target: Scheduler, ticket: int, prompt: int = 5, pages: int = 1) -> None:
    target.enqueue(ticket, num_prompt_tokens=prompt, worst_case_pages=pages)


def admit_all(target: Scheduler) -> list[int]:
    admitted = []
    while (ticket := target.next_admission()) is not None:
        target.admit(ticket)
        admitted.append(ticket)
    return admitted


def run_one(target: Scheduler) -> PrefillUnit | DecodeUnit:
    """Run the preferred unit to its commit."""
    unit = next(target.candidates())
    target.note_launched(unit)
    return unit


class TestAdmission:
    def test_goes_by_arrival_while_lanes_are_free(self) -> None:
        target = scheduler(lanes=2)
        for ticket in (3, 5, 9):
            enqueue(target, ticket)
        assert admit_all(target) == [3, 5]
        assert (target.num_waiting, target.num_running) == (1, 2)
        target.remove(3)
        assert admit_all(target) == [9]

    def test_head_that_does_not_fit_is_not_overtaken(self) -> None:
        target = scheduler(lanes=4, num_pages=10)
        enqueue(target, 0, pages=6)
        enqueue(target, 1, pages=5)
        enqueue(target, 2, pages=1)
        assert admit_all(target) == [0]
        target.remove(0)
        assert admit_all(target) == [1, 2]

    def test_worst_cases_may_fill_the_pool_exactly(self) -> None:
        target = scheduler(num_pages=10)
        enqueue(target, 0, pages=4)
        enqueue(target, 1, pages=6)
        assert admit_all(target) == [0, 1]

    def test_waiting_ticket_can_be_removed_from_the_middle(self) -> None:
        target = scheduler(lanes=1)
        for ticket in range(4):
            enqueue(target, ticket)
        admit_all(target)
        target.remove(2)
        target.remove(0)
        assert admit_all(target) == [1]
        target.remove(1)
        assert admit_all(target) == [3]

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda target: target.admit(1),
            lambda target: target.admit(7),
            lambda target: target.remove(7),
            lambda target: enqueue(target, 1),
            lambda target: enqueue(target, 2, pages=11),
        ],
        ids=["not the head", "unknown", "remove unknown", "ticket twice", "never fits"],
    )
    def test_misuse_is_an_invariant_error(self, misuse: Callable[[Scheduler], None]) -> None:
        target = scheduler()
        enqueue(target, 0)
        enqueue(target, 1)
        with pytest.raises(InvariantError):
            misuse(target)


class TestUnits:
    def test_idle_scheduler_has_none(self) -> None:
        assert list(scheduler().candidates()) == []

    @pytest.mark.parametrize("prompt", [1, 7, 8, 9, 16, 31])
    def test_chunk_borders_are_multiples_of_the_chunk(self, prompt: int) -> None:
        target = scheduler()
        enqueue(target, 0, prompt)
        admit_all(target)
        frontier = 0
        while frontier < prompt:
            unit = run_one(target)
            assert isinstance(unit, PrefillUnit)
            assert unit.num_tokens == min(CHUNK, prompt - frontier)
            frontier += unit.num_tokens
            assert unit.is_last == (frontier == prompt)
            target.note_prefilled(0, frontier)
        assert list(target.candidates()) == [DecodeUnit((0,))]

    def test_chunk_after_an_odd_frontier_ends_at_the_next_border(self) -> None:
        target = scheduler()
        enqueue(target, 0, 30)
        admit_all(target)
        target.note_prefilled(0, 11)
        assert list(target.candidates()) == [PrefillUnit(0, 5, is_last=False)]

    def test_refused_chunk_is_offered_again(self) -> None:
        target = scheduler()
        enqueue(target, 0, 12)
        admit_all(target)
        unit = run_one(target)
        target.note_prefilled(0, 0)
        assert list(target.candidates()) == [unit]

    def test_alternates_decode_and_prefill_and_rotates_prefills(self) -> None:
        target = scheduler(lanes=3)
        for ticket, prompt in enumerate([2, 32, 32]):
            enqueue(target, ticket, prompt)
        admit_all(target)
        frontiers = [0, 0, 0]
        seen: list[int | str] = []
        for _ in range(8):
            unit = run_one(target)
            if isinstance(unit, DecodeUnit):
                seen.append("decode")
                continue
            frontiers[unit.ticket] += unit.num_tokens
            target.note_prefilled(unit.ticket, frontiers[unit.ticket])
            seen.append(unit.ticket)
        assert seen == [0, "decode", 1, "decode", 2, "decode", 1, "decode"]

    def test_starved_preference_leaves_the_others_as_candidates(self) -> None:
        target = scheduler(lanes=3)
        for ticket, prompt in enumerate([2, 32, 32]):
            enqueue(target, ticket, prompt)
        admit_all(target)
        run_one(target)
        target.note_prefilled(0, 2)
        kinds = [
            unit.tickets if isinstance(unit, DecodeUnit) else unit.ticket
            for unit in target.candidates()
        ]
        assert kinds == [(0,), 1, 2]

    @pytest.mark.parametrize("frontier", [-1, 13])
    def test_impossible_frontier_is_an_invariant_error(self, frontier: int) -> None:
        target = scheduler()
        enqueue(target, 0, 12)
        admit_all(target)
        with pytest.raises(InvariantError):
            target.note_prefilled(0, frontier)


@dataclass(slots=True)
class _Model:
    prompt: int
    pages: int
    frontier: int = 0
    chunks_of_others: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, endings and refused units against plain bookkeeping."""

    @initialize(lanes=st.integers(1, 4), num_pages=st.integers(1, 12))
    def start(self, lanes: int, num_pages: int) -> None:
        self.lanes, self.num_pages = lanes, num_pages
        self.target = scheduler(lanes=lanes, num_pages=num_pages)
        self.waiting: dict[int, _Model] = {}
        self.running: dict[int, _Model] = {}
        self.next_ticket = 0
        self.last_kind: type[PrefillUnit | DecodeUnit] | None = None
        self.had_both = False

    @rule(prompt=st.integers(1, 40), pages=st.integers(1, 12))
    def arrive(self, prompt: int, pages: int) -> None:
        pages = min(pages, self.num_pages)
        enqueue(self.target, self.next_ticket, prompt, pages)
        self.waiting[self.next_ticket] = _Model(prompt, pages)
        self.next_ticket += 1

    @rule()
    def admit(self) -> None:
        for ticket in admit_all(self.target):
            assert ticket == min(self.waiting)
            self.running[ticket] = self.waiting.pop(ticket)
        if self.waiting and len(self.running) < self.lanes:
            head = self.waiting[min(self.waiting)]
            assert self._promised() + head.pages > self.num_pages

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted({**self.waiting, **self.running})))
        self.target.remove(ticket)
        self.waiting.pop(ticket, None)
        self.running.pop(ticket, None)

    @precondition(lambda self: self.running)
    @rule(is_refused=st.booleans())
    def run_unit(self, is_refused: bool) -> None:
        ready = {t for t, model in self.running.items() if model.frontier == model.prompt}
        has_both = bool(ready) and len(ready) < len(self.running)
        unit = run_one(self.target)
        if has_both and self.had_both:
            assert type(unit) is not self.last_kind
        self.last_kind, self.had_both = type(unit), has_both
        if isinstance(unit, DecodeUnit):
            assert set(unit.tickets) == ready
            assert len(unit.tickets) == len(ready)
        else:
            self._check_chunk(unit, is_refused)

    def _check_chunk(self, unit: PrefillUnit, is_refused: bool) -> None:
        model = self.running[unit.ticket]
        stop = model.frontier + unit.num_tokens
        assert 1 <= unit.num_tokens <= CHUNK
        assert stop == model.prompt or stop % CHUNK == 0
        assert unit.is_last == (stop == model.prompt)
        for ticket, other in self.running.items():
            if other.frontier < other.prompt:
                other.chunks_of_others = 0 if ticket == unit.ticket else other.chunks_of_others + 1
                assert other.chunks_of_others < self.lanes
        model.frontier = model.frontier if is_refused else stop
        self.target.note_prefilled(unit.ticket, model.frontier)

    @invariant()
    def counts_agree(self) -> None:
        assert self.target.num_waiting == len(self.waiting)
        assert self.target.num_running == len(self.running) <= self.lanes
        assert self._promised() <= self.num_pages
        assert bool(self.running) == any(True for _ in self.target.candidates())

    def _promised(self) -> int:
        return sum(model.pages for model in self.running.values())


TestSchedulerMachine = SchedulerMachine.TestCase
