"""What rounds cost: measured in a bounded time, in nobody's way, read off as a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.units import Capacity, RowOutput, UnitRow
from ninfer.program.draft_costs import MeasuredCosts, costs_of, measure
from ninfer.program.program import ModelProgram
from tests.helpers.fake_executor import FakeExecutor, Fault
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import decode, expected_of, prefill, spec_of

VOCAB_SIZE = 97


def capacity(lanes: int = 4, draft_tokens: int = 7, *, has_draft_model: bool = False) -> Capacity:
    return Capacity(lanes, 128, 2 * lanes, 2 * lanes + 1, 64, 0, draft_tokens, has_draft_model)


class TimedExecutor(FakeExecutor):
    """A step takes `time_of(rows, inputs, most proposed)` seconds of a clock of its own."""

    def __init__(self, limits: Capacity, time_of: Callable[[int, int, int], float]) -> None:
        super().__init__(VOCAB_SIZE, limits)
        self._time_of = time_of
        self.now_s = 0.0
        self.inputs: list[list[int]] = []

    @property
    def clocks(self) -> dict[str, Callable[[], float]]:
        return dict.fromkeys(("clock", "step_clock"), lambda: self.now_s)

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        self._pass(rows)
        return await super().decode(rows, goes_on=goes_on)

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        self._pass(rows)
        return await super().verify(rows)

    def _pass(self, rows: tuple[UnitRow, ...]) -> None:
        num_columns = sum(row.token_ids.size for row in rows)
        self.inputs.append([token for row in rows for token in row.token_ids.tolist()])
        self.now_s += self._time_of(len(rows), num_columns, max(row.num_proposed for row in rows))


def tiles(num_rows: int, num_columns: int, num_proposed: int) -> float:
    """Eight inputs at a time, and a little for each."""
    return 0.004 * -(-num_columns // 8) + 0.0001 * num_columns + 0.002 * num_proposed


async def measured(
    limits: Capacity, time_of: Callable[[int, int, int], float], longest_s: float = 10.0
) -> tuple[MeasuredCosts, TimedExecutor]:
    executor = TimedExecutor(limits, time_of)
    costs = await measure(executor, limits, VOCAB_SIZE, longest_s=longest_s, **executor.clocks)
    return costs, executor


async def test_inputs_differ_as_those_of_a_text_do() -> None:
    """A step of one token over and over would read few experts of a mixture."""
    _, executor = await measured(capacity(), tiles)
    most = max(executor.inputs, key=len)
    assert len(most) == 32
    assert len(set(most)) > 16
    assert 0 <= min(map(min, executor.inputs)) <= max(map(max, executor.inputs)) < VOCAB_SIZE


async def test_steps_are_measured_and_others_read_off_the_next_larger() -> None:
    costs, _ = await measured(capacity(), tiles)
    for num_rows, num_columns in ((1, 1), (1, 2), (1, 8), (2, 2), (2, 16), (4, 4), (4, 32)):
        assert costs.step(num_rows, num_columns, 1) == pytest.approx(
            tiles(num_rows, num_columns, 0)
        )
    assert costs.step(1, 3, 1) == pytest.approx(tiles(1, 3, 0))
    assert costs.step(3, 3, 1) == costs.step(4, 4, 1)
    assert costs.step(4, 9, 1) == pytest.approx(tiles(4, 12, 0))
    assert costs.step(4, 64, 1) == pytest.approx(2 * tiles(4, 32, 0))
    assert costs.step(9, 9, 1) == costs.step(4, 9, 1)
    assert costs.proposals(4, 3) == 0.0


async def test_what_had_no_time_is_read_off_fewer_rows() -> None:
    """A step of a row and its longest draft was measured, of four rows none."""
    costs, _ = await measured(capacity(), lambda rows, columns, _: 0.1 * -(-columns // 8), 0.25)
    assert costs.step(4, 4, 1) == pytest.approx(0.1)
    assert costs.step(4, 8, 1) == pytest.approx(0.1)
    assert 0.1 < costs.step(4, 16, 1) < 0.25


async def test_the_border_of_a_tile_shows() -> None:
    costs, _ = await measured(capacity(draft_tokens=8), tiles)
    assert costs.step(1, 8, 1) < 1.5 * costs.step(1, 1, 1)
    assert costs.step(1, 9, 1) > 1.5 * costs.step(1, 8, 1)


async def test_padded_rows_count_as_long_as_the_longest() -> None:
    limits = capacity()
    executor = TimedExecutor(limits, tiles)
    executor.pads_rows = True
    costs = await measure(executor, limits, VOCAB_SIZE, longest_s=10.0, **executor.clocks)
    assert costs.step(4, 11, 8) == costs.step(4, 32, 8) == pytest.approx(tiles(4, 32, 0))
    assert costs.step(4, 4, 1) == pytest.approx(tiles(4, 4, 0))


async def test_proposals_of_a_block_cost_the_same_however_many() -> None:
    def block(num_rows: int, num_columns: int, num_proposed: int) -> float:
        return 0.01 + (0.004 if num_proposed else 0.0)

    costs, _ = await measured(capacity(has_draft_model=True), block)
    assert [costs.proposals(1, count) for count in range(8)] == pytest.approx([0.0, *[0.004] * 7])


async def test_proposals_are_measured_where_there_is_a_draft_model() -> None:
    costs, executor = await measured(capacity(has_draft_model=True), tiles)
    assert {call.kind for call in executor.calls} == {"verify"}
    for num_rows in (1, 2, 4):
        assert costs.proposals(num_rows, 3) == pytest.approx(0.006)


@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.2, 5.0])
async def test_measuring_takes_no_longer_than_it_may(lanes: int, step_s: float) -> None:
    """Behind the first plain steps, of which at least one is needed."""
    costs, executor = await measured(
        capacity(lanes), lambda rows, columns, proposed: step_s * -(-columns // 8), 0.3
    )
    assert executor.now_s <= 2 * step_s + 0.3 + 1e-9
    for num_rows in range(1, lanes + 1):
        steps = [costs.step(num_rows, num_rows + extra, 1) for extra in range(20)]
        assert steps == sorted(steps)
        assert steps[0] > 0.0


async def test_a_clock_that_jumps_gives_no_step_that_is_faster_with_more() -> None:
    costs, _ = await measured(
        capacity(has_draft_model=True), lambda rows, columns, proposed: 0.01 / (1 + columns)
    )
    steps = [costs.step(1, columns, 1) for columns in range(1, 20)]
    assert steps == sorted(steps)
    assert costs.proposals(1, 4) >= 0.0


def test_a_step_that_was_held_up_is_no_slower_than_a_larger_one() -> None:
    costs = costs_of({1: {1: 5.0, 2: 9.0, 4: 4.0, 8: 6.0}}, {1: {1: 3.0, 4: 2.0}})
    assert [costs.step(1, columns, 1) for columns in (1, 2, 4, 8)] == [4.0, 4.0, 4.0, 6.0]
    assert costs.proposals(1, 1) == costs.proposals(1, 4) == 2.0


@given(
    st.dictionaries(
        st.sampled_from((1, 2, 4)),
        st.dictionaries(st.integers(1, 40), st.floats(0.001, 1.0), min_size=1),
        min_size=1,
    )
)
def test_a_table_answers_everything(steps: dict[int, dict[int, float]]) -> None:
    costs = costs_of(steps, {})
    for num_rows in range(1, 6):
        times = [costs.step(num_rows, num_columns, 1) for num_columns in range(1, 60)]
        assert times[0] > 0.0
        assert all(before <= after for before, after in pairwise(times))


async def test_nothing_is_left_of_it() -> None:
    limits = capacity(lanes=2)
    executor = FakeExecutor(VOCAB_SIZE, limits)
    program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, limits)
    costs = await program.measure_drafts()
    assert costs.step(1, 1, 1) > 0.0
    program.check()
    assert program.occupancy().pages_used == program.occupancy().slots_used == 0
    spec = spec_of(10, vocab_size=VOCAB_SIZE)
    handle = program.open_sequence(spec)
    first = await prefill(program, handle, spec, chunk=64)
    with pytest.raises(InvariantError, match="before the first sequence"):
        await program.measure_drafts()
    more = [token for _ in range(5) for token in await decode(program, [handle])]
    assert [first, *more] == expected_of(spec, 6, vocab_size=VOCAB_SIZE)


async def test_without_drafts_there_is_nothing_to_measure() -> None:
    limits = capacity(draft_tokens=0)
    executor = FakeExecutor(VOCAB_SIZE, limits)
    program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, limits)
    with pytest.raises(InvariantError, match="if at all"):
        await program.measure_drafts()
    assert executor.calls == []


async def test_a_device_that_fails_says_so() -> None:
    limits = capacity()
    executor = FakeExecutor(VOCAB_SIZE, limits)
    executor.faults[2] = Fault("device_error")
    program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, limits)
    with pytest.raises(DeviceError):
        await program.measure_drafts()
    program.close()


async def test_who_waits_may_leave() -> None:
    limits = capacity()
    executor = FakeExecutor(VOCAB_SIZE, limits)
    executor.gate = asyncio.Event()
    program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, limits)
    task = asyncio.create_task(program.measure_drafts())
    await asyncio.sleep(0)
    task.cancel()
    executor.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    program.close()
    assert executor.is_closed
