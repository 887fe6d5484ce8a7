"""Steps that the CUDA executor starts before they are asked for: when, and whose results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from ninfer.contract.errors import DeviceError
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Move, RowOutput, UnitRow
from ninfer.ops import device_sampling
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_driver import NUM_MARKS
from tests.helpers import executor_driver as driver
from tests.helpers.fake_cuda import FakeCuda
from tests.program.executors.test_cuda import answer, build

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, top_logprobs=2)


class Conversation:
    """Sequences whose prompts are done, decoding together."""

    def __init__(self, count: int = 3, *, frontier: int = 5) -> None:
        self.cuda = FakeCuda()
        self.executor: CudaExecutor = build(self.cuda).executor
        self.targets = [driver.sequence(index, SAMPLED) for index in range(count)]
        for target in self.targets:
            target.tokens = [0] * frontier
            target.slot = 1 + 2 * target.index
        self.newest = [50 + index for index in range(count)]
        self.num_replayed = 0
        self.choose(range(7, 7 + count))

    def choose(self, token_ids: Sequence[int]) -> None:
        """What every later replay chooses."""
        answer(self.cuda, list(token_ids))
        play = self.cuda.on_replay
        assert play is not None

        def count(graph: list[object]) -> None:
            self.num_replayed += any(
                launch.family == "embedding" for launch in self.cuda.launches(graph)
            )
            play(graph)

        self.cuda.on_replay = count

    def rows(self, indices: Sequence[int] | None = None) -> tuple[UnitRow, ...]:
        chosen = range(len(self.targets)) if indices is None else indices
        return tuple(self.targets[i].row([self.newest[i]], samples=True) for i in chosen)

    async def step(
        self, indices: Sequence[int] | None = None, *, goes_on: bool = True
    ) -> list[int]:
        """Decode, take every token; the tokens."""
        rows = self.rows(indices)
        outputs = await self.executor.decode(rows, goes_on=goes_on)
        chosen = range(len(self.targets)) if indices is None else indices
        for index, output in zip(chosen, outputs, strict=True):
            self.targets[index].advance([self.newest[index]])
            self.newest[index] = driver.taken(output).token_id
        return [driver.taken(output).token_id for output in outputs]


async def test_the_next_step_is_queued_with_the_tokens_of_this_one() -> None:
    talk = Conversation()
    await talk.step()
    assert talk.num_replayed == 2
    unit = talk.executor.workspace.decode_inputs.tensors(3, 3)
    read = talk.cuda.read
    assert read(unit.token_ids).tolist() == [7, 8, 9]
    assert read(unit.ordinals).tolist() == [6, 6, 6]
    assert read(unit.rope_positions).tolist() == [[6, 6, 6]] * 3
    assert read(unit.read_slots).tolist() == [2, 4, 6]
    assert read(unit.write_slots).tolist() == [1, 3, 5]


async def test_a_step_that_was_expected_runs_once_and_gives_its_results() -> None:
    talk = Conversation()
    await talk.step()
    for expected, num_replayed in ((3, 3), (6, 4), (9, 5)):
        talk.choose(range(10 + expected, 13 + expected))
        tokens = await talk.step()
        assert tokens == ([7, 8, 9] if expected == 3 else list(range(7 + expected, 10 + expected)))
        assert talk.num_replayed == num_replayed


def inputs_of(talk: Conversation, rows: Sequence[UnitRow]) -> list[list[int]]:
    """What the device last got for a step of `rows`, and where each token's draw stands."""
    unit = talk.executor.workspace.decode_inputs.tensors(len(rows), len(rows))
    arrays = (
        unit.token_ids, unit.ordinals, unit.column_rows, unit.rope_positions, unit.row_starts,
        unit.read_slots, unit.write_slots,
    )  # fmt: skip
    sampling = talk.cuda.launches(talk.executor.graphs.of(len(rows)))[-1]
    size = len(rows) * device_sampling.ROW.itemsize
    described = talk.cuda.memory(int(sampling.arguments["rows"]), size).view(device_sampling.ROW)
    return [
        *(talk.cuda.read(array).reshape(-1).tolist() for array in arrays),
        described["position"].tolist(),
        described["seed"].tolist(),
    ]


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("between", ["nothing", "a prompt", "a sampled prompt", "fewer rows"])
async def test_inputs_moved_on_are_those_written_anew(has_positions: bool, between: str) -> None:
    ahead, anew = Conversation(), Conversation()
    indices = [2, 1] if between == "fewer rows" else [0, 1, 2]
    for talk in (ahead, anew):
        if has_positions:
            talk.targets[1].positions = np.full((3, 5), 2, np.int32)
            talk.targets[1].rope_delta = -2
        goes_on = talk is ahead
        await talk.step(goes_on=goes_on)
        await talk.step(goes_on=goes_on)
        if between.endswith("prompt"):
            row = driver.sequence(7).row([1] * 20, samples=between.startswith("a sampled"))
            await talk.executor.prefill(row)
        talk.choose([7 + index for index in indices])
        await talk.step(indices, goes_on=goes_on)
        if talk is anew:
            await talk.step(indices, goes_on=False)
    rows = anew.rows(indices)
    assert ahead.num_replayed == anew.num_replayed == 4
    assert inputs_of(ahead, rows) == inputs_of(anew, rows)


async def test_some_of_the_rows_in_any_order_are_served_too() -> None:
    talk = Conversation()
    await talk.step()
    talk.choose([30, 31])
    assert await talk.step([2, 0]) == [9, 7]
    assert talk.num_replayed == 3
    assert await talk.step([0, 2], goes_on=False) == [31, 30]
    assert talk.num_replayed == 3


async def test_a_step_that_may_not_go_on_starts_nothing() -> None:
    talk = Conversation()
    await talk.step(goes_on=False)
    assert talk.num_replayed == 1


def changed(row: UnitRow, what: str) -> UnitRow:
    sample = row.sample
    assert sample is not None
    match what:
        case "token":
            return dataclasses.replace(row, token_ids=row.token_ids + 1)
        case "slot":
            return dataclasses.replace(row, write_slot=7)
        case "state":
            return dataclasses.replace(row, read_slot=7)
        case "pages":
            return dataclasses.replace(row, page_table=row.page_table + 3)
        case "positions":
            return dataclasses.replace(row, positions=np.full((3, 1), 2, np.int32))
        case "start":
            return dataclasses.replace(row, start=row.start + 1)
        case "seed":
            params = dataclasses.replace(sample.params, seed=4)
            return driver.with_sample(row, dataclasses.replace(sample, params=params))
        case "suppressed":
            return driver.with_sample(row, dataclasses.replace(sample, suppressed_ids=(3,)))
        case "position":
            return driver.with_sample(row, dataclasses.replace(sample, position=99))
        case _:
            return dataclasses.replace(row, sample=None)


@pytest.mark.parametrize(
    "what",
    [
        "token", "slot", "state", "pages", "positions", "start", "seed", "suppressed", "position",
        "no sample",
    ],
)  # fmt: skip
async def test_anything_else_is_computed_after_the_step_ahead_has_ended(what: str) -> None:
    talk = Conversation()
    await talk.step()
    talk.cuda.polls = 3
    row = changed(talk.rows()[1], what)
    talk.choose([40])
    output = (await talk.executor.decode((row,)))[0]
    assert talk.num_replayed == 3
    if what == "no sample":
        assert output == RowOutput(None)
    else:
        assert driver.taken(output).token_id == 40
    ordinals = talk.executor.workspace.decode_inputs.tensors(1, 1).ordinals
    assert talk.cuda.read(ordinals).tolist() == [row.start]


async def test_a_prompt_in_between_leaves_the_results_of_rows_it_does_not_touch() -> None:
    talk = Conversation(2)
    await talk.step()
    newcomer = driver.sequence(2)
    await talk.executor.prefill(newcomer.row([1] * 20, samples=False))
    assert await talk.step(goes_on=False) == [7, 8]
    assert talk.num_replayed == 2


@pytest.mark.parametrize("is_scored", [False, True])
async def test_a_prompt_that_takes_the_slot_of_a_row_spoils_its_results(is_scored: bool) -> None:
    talk = Conversation(2)
    await talk.step()
    newcomer = dataclasses.replace(
        driver.sequence(2).row([1] * 20, samples=False), write_slot=talk.rows()[1].write_slot
    )
    call = talk.executor.score if is_scored else talk.executor.prefill
    await call(newcomer)
    talk.choose([20, 21])
    assert await talk.step(goes_on=False) == [20, 21]
    assert talk.num_replayed == 3


async def test_a_restored_state_in_the_slot_of_a_row_spoils_its_results() -> None:
    talk = Conversation(2)
    await talk.step()
    num_blocks = -(-talk.executor.slot_bytes // talk.executor.page_bytes)
    await talk.executor.load(Move((), talk.rows()[1].write_slot, tuple(range(num_blocks))))
    assert talk.cuda.num_ordered_copies == 1, "the step ahead may still write there"
    talk.choose([20, 21])
    assert await talk.step(goes_on=False) == [20, 21]
    assert talk.num_replayed == 3


async def test_a_sequence_bound_anew_is_not_served_by_what_it_was_before() -> None:
    talk = Conversation(2)
    await talk.step()
    rows = tuple(
        dataclasses.replace(row, residence=(9, 2 + i)) for i, row in enumerate(talk.rows())
    )
    talk.choose([20, 21])
    outputs = await talk.executor.decode(rows)
    assert [driver.taken(output).token_id for output in outputs] == [20, 21]
    assert talk.num_replayed == 3


async def test_a_page_shown_in_time_is_on_the_device_before_its_step() -> None:
    talk = Conversation(2, frontier=60)
    talk.targets[1].tokens += [0]
    for num_steps in range(1, 10):
        rows = tuple(
            dataclasses.replace(row, page_table=target.pages[: -(-(row.start + 2) // 64)])
            for row, target in zip(talk.rows(), talk.targets, strict=True)
        )
        await talk.executor.decode(rows, goes_on=True)
        assert talk.num_replayed == num_steps + 1, "every step runs once, one of them ahead"
        unit = talk.executor.workspace.decode_inputs.tensors(2, 2)
        starts = talk.cuda.read(unit.ordinals).tolist()
        assert starts == [row.start + 1 for row in rows]
        tables = talk.cuda.read(unit.page_tables)
        for index, (start, target) in enumerate(zip(starts, talk.targets, strict=True)):
            count = start // 64 + 1
            assert tables[index, :count].tolist() == target.pages[:count].tolist()
            target.advance([talk.newest[index]])
            talk.newest[index] = 7 + index


@pytest.mark.parametrize("frontier", [62, 63, 64])
async def test_a_step_into_a_page_that_is_not_there_waits(frontier: int) -> None:
    talk = Conversation(1, frontier=frontier)
    await talk.step()
    assert talk.num_replayed == (1 if frontier == 63 else 2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias=((3, 1.0),)),
    ],
)
async def test_rows_whose_choice_depends_on_more_than_their_place_go_on_to_their_logits(
    params: SamplingParams,
) -> None:
    """What the next choice is to know follows from this token; the layers do not wait for it."""
    talk = Conversation(2)
    talk.targets[1].params = params
    for num_steps in range(1, 5):
        before = len(talk.cuda.launches())
        await talk.step()
        assert talk.num_replayed == num_steps + 1
        families = [launch.family for launch in talk.cuda.launches()[before:]]
        assert families.count("sampling") == 1, "one choice a step"
        own = families[families.index("sampling") + 1 :]
        assert "embedding" in own, "the layers of the next step are queued behind the choice"


async def test_a_step_behind_a_row_without_finite_logits_is_waited_for_and_forgotten() -> None:
    """It was queued before anybody knew."""
    talk = Conversation(1)
    answer(talk.cuda, [5], is_finite=False)
    (output,) = await talk.executor.decode(talk.rows(), goes_on=True)
    assert (output.token, output.is_finite) == (None, False)
    assert all(talk.cuda.has_passed(place) for place in range(NUM_MARKS))
    talk.choose([8])
    fresh = driver.sequence(1, SAMPLED)
    fresh.tokens, fresh.slot = [0] * 5, 4
    (output,) = await talk.executor.decode((fresh.row([60], samples=True),))
    assert driver.taken(output).token_id == 8
    assert talk.num_replayed == 1


async def test_the_step_behind_is_queued_before_this_one_has_run() -> None:
    talk = Conversation()
    await talk.step()
    replayed, queued = talk.num_replayed, []
    passes = talk.cuda.has_passed

    def has_passed(place: int = 0) -> bool:
        queued.append(talk.num_replayed)
        return passes(place)

    talk.cuda.has_passed = has_passed  # type: ignore[method-assign]
    await talk.step()
    assert queued[0] == replayed + 1


async def test_a_device_lost_in_a_step_ahead_fails_the_next_call() -> None:
    talk = Conversation()
    await talk.step()
    talk.cuda.fails_at = talk.cuda.num_queued
    with pytest.raises(DeviceError, match="illegal memory access"):
        await talk.step()
    with pytest.raises(DeviceError, match="after a failure"):
        await talk.step()
