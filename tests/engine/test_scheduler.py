from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import Capacity
from ninfer.engine.scheduler import DecodeUnit, PrefillUnit, ReplayUnit, Scheduler, UnitPlan

CHUNK = 8


def scheduler(*, lanes: int = 2) -> Scheduler:
    return Scheduler(Capacity(lanes, 1024, 16, 2 * lanes + 1, CHUNK))


def enqueue(target: Scheduler, *tickets: int, prompt: int = 5) -> None:
    for ticket in tickets:
        target.enqueue(ticket, num_prompt_tokens=prompt)


def start(target: Scheduler, ticket: int, frontier: int = 0, stops: tuple[int, ...] = ()) -> None:
    target.take_lane(ticket)
    target.bind(ticket, frontier, stops)


def start_all(target: Scheduler) -> list[int]:
    started = []
    for ticket in target.admissible():
        start(target, ticket)
        started.append(ticket)
    return started


def run_one(target: Scheduler, limit: int | None = None) -> UnitPlan:
    """Launch the preferred unit."""
    unit = target.candidates(limit)[0]
    target.note_launched(unit)
    return unit


class TestAdmission:
    def test_goes_by_arrival_while_lanes_are_free(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, 3, 5, 9)
        assert start_all(target) == [3, 5]
        assert (target.num_waiting, target.num_running) == (1, 2)
        target.remove(3)
        assert start_all(target) == [9]

    def test_scan_looks_at_the_head_and_as_many_followers_as_lanes(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, *range(6))
        assert list(target.admissible()) == [0, 1, 2]

    def test_scan_ends_with_the_last_lane(self) -> None:
        target = scheduler(lanes=1)
        enqueue(target, 0, 1, 2)
        scan = target.admissible()
        assert next(scan) == 0
        start(target, 1 if next(scan) == 1 else 0)
        assert list(scan) == []

    def test_blocked_head_is_overtaken_by_at_most_as_many_as_lanes(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, *range(9))
        for ticket in (1, 2):
            start(target, ticket)
            target.remove(ticket)
        assert list(target.admissible()) == [0]
        with pytest.raises(InvariantError):
            target.take_lane(3)
        start(target, 0)
        assert list(target.admissible()) == [3, 4, 5]

    def test_paused_request_counts_those_that_overtake_it_too(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, *range(6))
        start(target, 0)
        target.pause(0)
        for ticket in (1, 2):
            start(target, ticket)
            target.remove(ticket)
        assert list(target.admissible()) == []
        start(target, 0)
        assert list(target.admissible()) == [3, 4, 5]

    def test_younger_paused_request_holds_nobody_up(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, *range(4))
        start(target, 1)
        target.pause(1)
        start(target, 2)
        target.remove(2)
        assert list(target.admissible()) == [0]
        start(target, 0)
        assert list(target.admissible()) == [3]

    def test_waiting_ticket_can_be_removed_from_the_middle(self) -> None:
        target = scheduler(lanes=1)
        enqueue(target, *range(4))
        start_all(target)
        target.remove(2)
        target.remove(0)
        assert start_all(target) == [1]
        target.remove(1)
        assert start_all(target) == [3]

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda target: target.take_lane(7),
            lambda target: target.remove(7),
            lambda target: enqueue(target, 1),
            lambda target: target.bind(0, 0),
            lambda target: target.pause(0),
            lambda target: target.protect(0),
        ],
        ids=["unknown", "remove unknown", "ticket twice", "no lane", "no resident", "not paused"],
    )
    def test_misuse_is_an_invariant_error(self, misuse: Callable[[Scheduler], None]) -> None:
        target = scheduler()
        enqueue(target, 0, 1)
        with pytest.raises(InvariantError):
            misuse(target)

    def test_lane_beyond_the_last_is_an_invariant_error(self) -> None:
        target = scheduler(lanes=1)
        enqueue(target, 0, 1)
        target.take_lane(0)
        with pytest.raises(InvariantError):
            target.take_lane(1)


class TestRevision:
    def test_rises_with_everything_that_could_let_somebody_in_or_on(self) -> None:
        target = scheduler()
        steps: list[Callable[[], None]] = [
            lambda: enqueue(target, 0, 1),
            lambda: start(target, 0),
            lambda: start(target, 1),
            lambda: target.pause(1),
            target.note_event,
            lambda: target.remove(0),
        ]
        seen = [target.revision]
        for step in steps:
            step()
            seen.append(target.revision)
        assert seen == sorted(set(seen))

    def test_does_not_rise_with_plain_progress(self) -> None:
        target = scheduler()
        enqueue(target, 0, prompt=20)
        start(target, 0)
        before = target.revision
        for frontier in (8, 16, 20):
            run_one(target)
            target.note_prefilled(0, frontier)
        run_one(target)
        assert target.revision == before


class TestPauses:
    def test_victim_is_the_youngest_younger_resident(self) -> None:
        target = scheduler(lanes=4)
        enqueue(target, *range(4))
        start_all(target)
        assert [target.victim(ticket) for ticket in range(4)] == [3, 3, 3, None]
        target.note_prefilled(3, 5)
        assert target.victim(0) == 3
        target.pause(3)
        assert target.victim(0) == 2

    def test_request_with_a_lane_but_no_sequence_is_no_victim(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, 0, 1)
        start(target, 0)
        target.take_lane(1)
        assert target.victim(0) is None

    def test_paused_request_resumes_where_it_is_bound(self) -> None:
        target = scheduler()
        enqueue(target, 0, prompt=20)
        start(target, 0)
        target.note_prefilled(0, 8)
        target.pause(0)
        assert (target.num_paused, target.oldest_paused, target.residents()) == (1, 0, [])
        start(target, 0, frontier=0)
        assert target.candidates() == [PrefillUnit(0, 8, is_last=False)]
        target.pause(0)
        start(target, 0, frontier=33)
        assert target.candidates() == [DecodeUnit((0,))]

    def test_lane_given_back_leaves_it_paused(self) -> None:
        target = scheduler()
        enqueue(target, 0)
        start(target, 0)
        target.pause(0)
        target.take_lane(0)
        target.give_back(0)
        assert (target.oldest_paused, target.num_running) == (0, 0)


class TestProtection:
    def paused(self) -> Scheduler:
        """1 is paused; 0 and 2 run."""
        target = scheduler(lanes=3)
        enqueue(target, *range(4))
        for ticket in range(3):
            start(target, ticket)
        target.pause(1)
        return target

    def test_begins_when_the_oldest_paused_is_older_than_everyone_with_a_lane(self) -> None:
        target = self.paused()
        assert target.protectable() is None
        target.remove(0)
        assert target.protectable() == 1
        target.remove(2)
        assert target.protectable() == 1

    def test_protected_row_goes_first_and_is_never_a_victim(self) -> None:
        target = self.paused()
        target.remove(0)
        target.protect(1)
        start(target, 1, frontier=5)
        start(target, 3, frontier=5)
        target.note_prefilled(2, 5)
        assert target.candidates() == [DecodeUnit((1, 2, 3))]
        assert [target.victim(ticket) for ticket in (1, 2, 3)] == [3, 3, None]
        with pytest.raises(InvariantError):
            target.pause(1)

    def test_protected_row_may_have_an_older_one_paused(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, 0, 1)
        start(target, 1)
        target.pause(1)
        target.protect(1)
        start(target, 1, frontier=5)
        start(target, 0, frontier=5)
        assert target.candidates() == [DecodeUnit((1, 0))]
        assert (target.victim(1), target.victim(0)) == (0, None)

    def test_protected_prompt_is_not_rotated_away(self) -> None:
        target = scheduler(lanes=2)
        enqueue(target, 0, 1, prompt=40)
        start(target, 0)
        target.pause(0)
        target.protect(0)
        start(target, 1)
        start(target, 0)
        for frontier in (8, 16, 24):
            assert run_one(target) == PrefillUnit(0, 8, is_last=False)
            target.note_prefilled(0, frontier)
        target.end_protection(0)
        assert run_one(target) == PrefillUnit(1, 8, is_last=False)

    def test_at_most_one_at_a_time(self) -> None:
        target = self.paused()
        target.remove(0)
        target.protect(1)
        assert target.protectable() is None
        start(target, 1)
        target.pause(2)
        target.end_protection(2)
        assert target.protected == 1
        target.end_protection(1)
        assert target.protectable() is None
        target.remove(1)
        assert target.protectable() == 2

    @pytest.mark.parametrize("end", ["remove", "give_back"])
    def test_ends_with_its_request_or_lane(self, end: Literal["remove", "give_back"]) -> None:
        target = self.paused()
        target.remove(0)
        target.protect(1)
        target.take_lane(1)
        getattr(target, end)(1)
        assert target.protected is None


class TestUnits:
    def test_idle_scheduler_has_none(self) -> None:
        assert scheduler().candidates() == []

    @pytest.mark.parametrize("prompt", [1, 7, 8, 9, 16, 31])
    def test_chunk_borders_are_multiples_of_the_chunk(self, prompt: int) -> None:
        target = scheduler()
        enqueue(target, 0, prompt=prompt)
        start(target, 0)
        frontier = 0
        while frontier < prompt:
            unit = run_one(target)
            assert isinstance(unit, PrefillUnit)
            assert unit.num_tokens == min(CHUNK, prompt - frontier)
            frontier += unit.num_tokens
            assert unit.is_last == (frontier == prompt)
            target.note_prefilled(0, frontier)
        assert target.candidates() == [DecodeUnit((0,))]

    def test_chunk_after_an_odd_frontier_ends_at_the_next_border(self) -> None:
        target = scheduler()
        enqueue(target, 0, prompt=30)
        start(target, 0, frontier=11)
        assert target.candidates() == [PrefillUnit(0, 5, is_last=False)]

    def test_chunks_end_at_stops(self) -> None:
        target = scheduler()
        enqueue(target, 0, prompt=20)
        start(target, 0, stops=(3, 8, 18))
        sizes = []
        for frontier in (3, 8, 16, 18, 20):
            unit = run_one(target)
            assert isinstance(unit, PrefillUnit)
            sizes.append(unit.num_tokens)
            target.note_prefilled(0, frontier)
        assert sizes == [3, 5, 8, 2, 2]

    def test_limit_holds_only_beside_ready_rows(self) -> None:
        target = Scheduler(Capacity(2, 4096, 99, 5, 1024))
        enqueue(target, 0, prompt=2000)
        start(target, 0)
        assert target.candidates(256) == [PrefillUnit(0, 1024, is_last=False)]
        enqueue(target, 1, prompt=1)
        start(target, 1, frontier=1)
        assert target.candidates(300) == [DecodeUnit((1,)), PrefillUnit(0, 256, is_last=False)]

    def test_refused_chunk_is_offered_again(self) -> None:
        target = scheduler()
        enqueue(target, 0, prompt=12)
        start(target, 0)
        unit = run_one(target)
        target.note_prefilled(0, 0)
        assert target.candidates() == [unit]

    def test_alternates_decode_and_prefill_and_rotates_prefills(self) -> None:
        target = scheduler(lanes=3)
        enqueue(target, 0, prompt=2)
        enqueue(target, 1, 2, prompt=32)
        start_all(target)
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

    def test_forced_inputs_come_before_the_row_decodes(self) -> None:
        target = scheduler(lanes=3)
        for ticket in (0, 1):
            target.enqueue(ticket, num_prompt_tokens=CHUNK)
        start_all(target)
        for ticket in (0, 1):
            run_one(target)
            target.note_prefilled(ticket, CHUNK)
        target.note_forced(1, CHUNK + 4)
        assert target.has_prompts
        assert run_one(target) == ReplayUnit(1, CHUNK)
        target.note_replayed(1, CHUNK)
        assert run_one(target) == DecodeUnit((0,))
        assert run_one(target) == ReplayUnit(1, 4)
        target.note_replayed(1, 4)
        assert not target.has_prompts
        assert run_one(target) == DecodeUnit((0, 1))

    def test_forced_inputs_are_forgotten_with_the_lane(self) -> None:
        target = scheduler(lanes=1)
        target.enqueue(0, num_prompt_tokens=CHUNK)
        start_all(target)
        run_one(target)
        target.note_prefilled(0, CHUNK)
        target.note_forced(0, 5)
        assert target.candidates() == [ReplayUnit(0, 5)]
        target.pause(0)
        target.take_lane(0)
        target.bind(0, CHUNK)
        assert target.candidates() == [DecodeUnit((0,))]

    def test_starved_preference_leaves_the_others_as_candidates(self) -> None:
        target = scheduler(lanes=3)
        enqueue(target, 0, prompt=2)
        enqueue(target, 1, 2, prompt=32)
        start_all(target)
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
        enqueue(target, 0, prompt=12)
        start(target, 0)
        with pytest.raises(InvariantError):
            target.note_prefilled(0, frontier)


@dataclass(slots=True)
class _Model:
    prompt: int
    frontier: int = 0
    chunks_of_others: int = 0
    overtaken_by: set[int] = field(default_factory=set)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, blocked scans, pauses, protections, endings and refused units against
    plain bookkeeping."""

    @initialize(lanes=st.integers(1, 4))
    def begin(self, lanes: int) -> None:
        self.lanes = lanes
        self.target = scheduler(lanes=lanes)
        self.waiting: dict[int, _Model] = {}
        self.running: dict[int, _Model] = {}
        self.paused: dict[int, _Model] = {}
        self.protected: int | None = None
        self.next_ticket = 0
        self.last_kind: type[UnitPlan] | None = None
        self.had_both = False

    @rule(prompt=st.integers(1, 40))
    def arrive(self, prompt: int) -> None:
        enqueue(self.target, self.next_ticket, prompt=prompt)
        self.waiting[self.next_ticket] = _Model(prompt)
        self.next_ticket += 1

    @rule(fits=st.lists(st.booleans(), min_size=5, max_size=5))
    def admit(self, fits: list[bool]) -> None:
        """As a scan does: some of those that may be tried do not fit."""
        queue = sorted(self.waiting)[: self.lanes + 1]
        for ticket, does_fit in zip(self.target.admissible(), fits, strict=False):
            assert ticket in queue
            if not does_fit:
                continue
            model = self.waiting.pop(ticket)
            for other, blocked in (*self.waiting.items(), *self.paused.items()):
                if other < ticket:
                    blocked.overtaken_by.add(ticket)
            start(self.target, ticket)
            self.running[ticket] = model

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pause_for(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        victim = self.target.victim(ticket)
        may_be_older = ticket == self.protected
        allowed = [
            other
            for other in self.running
            if other not in (ticket, self.protected) and (may_be_older or other > ticket)
        ]
        assert victim == max(allowed, default=None)
        if victim is not None:
            self.target.pause(victim)
            self.paused[victim] = self.running.pop(victim)

    @precondition(lambda self: self.paused and len(self.running) < self.lanes)
    @rule(is_replay=st.booleans())
    def resume_oldest(self, is_replay: bool) -> None:
        ticket = min(self.paused)
        assert self.target.oldest_paused == ticket
        is_due = self.protected is None and ticket < min(self.running, default=ticket + 1)
        assert self.target.protectable() == (ticket if is_due else None)
        if is_due:
            self.target.protect(ticket)
            self.protected = ticket
        model = self.paused.pop(ticket)
        model.frontier = 0 if is_replay else model.frontier
        model.chunks_of_others = 0
        start(self.target, ticket, model.frontier)
        self.running[ticket] = model

    @precondition(lambda self: self.protected is not None)
    @rule()
    def end_protection(self) -> None:
        assert self.protected is not None
        self.target.end_protection(self.protected)
        self.protected = None

    @precondition(lambda self: self.waiting or self.running or self.paused)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        everyone = sorted({**self.waiting, **self.running, **self.paused})
        ticket = data.draw(st.sampled_from(everyone))
        self.target.remove(ticket)
        for group in (self.waiting, self.running, self.paused):
            group.pop(ticket, None)
        self.protected = None if ticket == self.protected else self.protected

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
            assert unit.tickets == tuple(sorted(ready, key=lambda t: (t != self.protected, t)))
        else:
            assert isinstance(unit, PrefillUnit)
            self._check_chunk(unit, is_refused)

    def _check_chunk(self, unit: PrefillUnit, is_refused: bool) -> None:
        model = self.running[unit.ticket]
        stop = model.frontier + unit.num_tokens
        assert 1 <= unit.num_tokens <= CHUNK
        assert stop == model.prompt or stop % CHUNK == 0
        assert unit.is_last == (stop == model.prompt)
        is_first_come = self.protected is None or self.protected == unit.ticket
        for ticket, other in self.running.items():
            if other.frontier < other.prompt:
                is_own = ticket == unit.ticket or not is_first_come or self.protected is not None
                other.chunks_of_others = 0 if is_own else other.chunks_of_others + 1
                assert other.chunks_of_others < self.lanes
        model.frontier = model.frontier if is_refused else stop
        self.target.note_prefilled(unit.ticket, model.frontier)

    @invariant()
    def counts_agree(self) -> None:
        assert self.target.num_waiting == len(self.waiting)
        assert self.target.num_paused == len(self.paused)
        assert self.target.num_running == len(self.running) <= self.lanes
        assert self.target.residents() == sorted(self.running)
        assert self.target.protected == self.protected
        assert bool(self.running) == bool(self.target.candidates())
        for model in (*self.waiting.values(), *self.paused.values(), *self.running.values()):
            assert len(model.overtaken_by) <= self.lanes


TestSchedulerMachine = SchedulerMachine.TestCase
