"""ModelProgram over FakeExecutor: tokens equal the pure function, settlements are exact."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import Occupancy, PendingBatch, SequenceHandle, SequenceSpec
from ninfer.contract.sampling import (
    GeneratedToken,
    PromptScores,
    PromptScoring,
    SamplingParams,
)
from ninfer.contract.units import Capacity, RowOutput, UnitRow
from ninfer.ops import prompt_logprobs
from ninfer.program.program import ModelProgram
from tests.helpers import program_driver
from tests.helpers.fake_executor import FakeExecutor, Fault, expected_logits
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import decode, prefill, tokens_of

VOCAB_SIZE = 97
CAPACITY = Capacity(max_concurrency=3, max_context=256, num_pages=8, num_slots=7, prefill_chunk=100)
IDLE = Occupancy(lanes_used=0, pages_used=0, pages_total=8, slots_used=0, slots_total=6)
PENALTIES = SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, repetition_penalty=1.1)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor(VOCAB_SIZE, CAPACITY)


@pytest.fixture
def program(executor: FakeExecutor) -> ModelProgram:
    return program_over(executor)


def program_over(executor: FakeExecutor, capacity: Capacity = CAPACITY) -> ModelProgram:
    return ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, capacity)


def spec_of(num_tokens: int, name: str = "request") -> SequenceSpec:
    return program_driver.spec_of(num_tokens, name, vocab_size=VOCAB_SIZE)


def expected_of(spec: SequenceSpec, num_tokens: int) -> list[int]:
    return program_driver.expected_of(spec, num_tokens, vocab_size=VOCAB_SIZE)


async def ready(program: ModelProgram, spec: SequenceSpec) -> SequenceHandle:
    """A sequence with its prompt fed and its next step reserved."""
    handle = await program_driver.ready(program, spec, chunk=CAPACITY.prefill_chunk)
    assert program.reserve_units(handle, 1)
    return handle


async def settle(program: ModelProgram, batch: PendingBatch, how: str) -> None:
    if how == "commit":
        program.commit(batch, [1])
    elif how == "abort":
        program.abort(batch)
    else:
        await program.complete(batch)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("chunk", [1, 64, 100])
async def test_tokens_do_not_depend_on_chunks(
    program: ModelProgram, num_tokens: int, chunk: int
) -> None:
    spec = spec_of(num_tokens)
    handle = program.open_sequence(spec)
    tokens = [await prefill(program, handle, spec, chunk=chunk)]
    for _ in range(4):
        tokens += await decode(program, [handle])
    assert tokens == expected_of(spec, 5)
    assert program.frontier(handle) == num_tokens + 4
    program.close_sequence(handle)
    assert program.occupancy() == IDLE


async def test_interleaved_rows_keep_their_own_tokens(program: ModelProgram) -> None:
    """Three sequences grow in turns, so that pages of each lie between those of the others."""
    specs = [spec_of(60 + index, f"row {index}") for index in range(3)]
    handles = [program.open_sequence(spec) for spec in specs]
    tokens = [
        [await prefill(program, handle, spec, chunk=17)]
        for handle, spec in zip(handles, specs, strict=True)
    ]
    for _ in range(66):
        for row, token in zip(tokens, await decode(program, handles), strict=True):
            row.append(token)
    assert tokens == [expected_of(spec, 67) for spec in specs]
    assert program.occupancy() == Occupancy(3, 6, 8, 3, 6)


async def test_membership_and_order_of_a_batch_do_not_matter(program: ModelProgram) -> None:
    specs = [spec_of(10, "a"), spec_of(20, "b")]
    handles = [program.open_sequence(spec) for spec in specs]
    a = [await prefill(program, handles[0], specs[0], chunk=100)]
    a += await decode(program, handles[:1])
    b = [await prefill(program, handles[1], specs[1], chunk=100)]
    for batch in (handles, handles[::-1], handles[1:], handles):
        tokens = dict(zip(batch, await decode(program, batch), strict=True))
        a += [tokens[handle] for handle in handles[:1] if handle in tokens]
        b.append(tokens[handles[1]])
    assert a == expected_of(specs[0], 5)
    assert b == expected_of(specs[1], 5)


@pytest.mark.parametrize(
    "sampling",
    [
        PENALTIES,
        SamplingParams(temperature=1.0, seed=-3),
        SamplingParams(frequency_penalty=0.1, top_logprobs=2),
    ],
)
async def test_sampling_inputs_reach_the_executor(
    program: ModelProgram, sampling: SamplingParams
) -> None:
    spec = program_driver.spec_of(
        30, vocab_size=3, sampling=sampling, min_tokens=5, suppressed_ids=tuple(range(60))
    )
    handle = program.open_sequence(spec)
    tokens = [await prefill(program, handle, spec, chunk=16)]
    for _ in range(40):
        tokens += await decode(program, [handle])
    assert tokens == expected_of(spec, 41)
    assert min(tokens[:5]) >= 60
    assert min(tokens[5:]) < 60


async def test_rotary_positions_and_delta_are_fed(program: ModelProgram) -> None:
    spec = program_driver.spec_of(70, vocab_size=VOCAB_SIZE, positions=True, rope_delta=-35)
    plain = dataclasses.replace(spec, prompt=dataclasses.replace(spec.prompt, positions=None))
    handle = program.open_sequence(spec)
    tokens = [await prefill(program, handle, spec, chunk=33)]
    for _ in range(3):
        tokens += await decode(program, [handle])
    assert tokens == expected_of(spec, 4)
    assert tokens != expected_of(plain, 4)


async def test_abort_changes_nothing_and_the_unit_runs_again(program: ModelProgram) -> None:
    spec = spec_of(64)
    handle = await ready(program, spec)
    before = program.occupancy()
    results = []
    for _ in range(3):
        batch = program.launch_decode([handle])
        await program.complete(batch)
        results.append(batch.outputs)
        program.abort(batch)
        program.check()
        assert program.occupancy() == before
        assert program.frontier(handle) == 64
    assert results[0] == results[1] == results[2]
    assert await decode(program, [handle]) == expected_of(spec, 2)[1:]


async def test_a_device_error_leaves_the_rows_as_they_were(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    spec = spec_of(100)
    handle = program.open_sequence(spec)
    program.reserve_units(handle, 70)
    executor.faults[0] = Fault("device_error")
    batch = program.launch_prefill(handle, 70)
    for _ in range(2):
        with pytest.raises(DeviceError, match="injected"):
            await program.complete(batch)
    with pytest.raises(InvariantError, match="before it was completed"):
        program.commit(batch, [0])
    program.abort(batch)
    assert program.frontier(handle) == 0
    assert await prefill(program, handle, spec, chunk=70) == expected_of(spec, 1)[0]


async def test_a_non_finite_row_ends_and_its_mates_go_on(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    specs = [spec_of(5, "bad"), spec_of(6, "good")]
    bad, good = [await ready(program, spec) for spec in specs]
    executor.faults[len(executor.calls)] = Fault("non_finite", rows=(0,))
    batch = program.launch_decode([bad, good])
    await program.complete(batch)
    assert batch.outputs is not None
    assert [output.is_finite for output in batch.outputs] == [False, True]
    with pytest.raises(InvariantError, match="row 0 accepts 1 of 0"):
        program.commit(batch, [1, 1])
    program.commit(batch, [0, 1])
    program.check()
    assert (program.frontier(bad), program.frontier(good)) == (5, 7)
    with pytest.raises(InvariantError, match="can only be closed"):
        program.reserve_units(bad, 1)
    program.close_sequence(bad)
    assert await decode(program, [good]) == expected_of(specs[1], 3)[2:]


async def test_a_refused_token_leaves_state_and_frontier(program: ModelProgram) -> None:
    handle, other = await ready(program, spec_of(64)), await ready(program, spec_of(3, "other"))
    batch = program.launch_decode([handle, other])
    await program.complete(batch)
    program.commit(batch, [0, 1])
    program.check()
    assert (program.frontier(handle), program.frontier(other)) == (64, 4)
    with pytest.raises(InvariantError, match="can only be closed"):
        program.launch_decode([handle])


async def test_pending_rows_are_frozen_and_others_are_not(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    handle, other = await ready(program, spec_of(10)), program.open_sequence(spec_of(9, "other"))
    executor.gate = asyncio.Event()
    batch = program.launch_decode([handle])
    for _ in range(2):
        with pytest.raises(InvariantError, match="a unit of it is pending"):
            program.reserve_units(handle, 1)
        with pytest.raises(InvariantError, match="a unit of it is pending"):
            program.close_sequence(handle)
        assert program.reserve_units(other, 9)
        with pytest.raises(InvariantError, match="another unit is pending"):
            program.launch_prefill(other, 9)
        executor.gate.set()
        await program.complete(batch)
    program.close_sequence(other)
    program.commit(batch, [1])
    program.close_sequence(handle)
    assert program.occupancy() == IDLE


async def test_a_running_unit_can_be_neither_settled_nor_closed_under(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    handle = await ready(program, spec_of(10))
    executor.gate = asyncio.Event()
    batch = program.launch_decode([handle])
    await asyncio.sleep(0)
    with pytest.raises(InvariantError, match="before it was completed"):
        program.commit(batch, [1])
    with pytest.raises(InvariantError, match="while it runs"):
        program.abort(batch)
    with pytest.raises(InvariantError, match="while a unit runs"):
        program.close()
    executor.gate.set()
    await program.complete(batch)
    program.commit(batch, [1])


async def test_a_completed_unit_that_may_go_on_is_only_committed(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    spec = spec_of(10)
    handle = await ready(program, spec)
    for _ in range(3):
        assert program.reserve_units(handle, 1)
        batch = program.launch_decode([handle], goes_on=True)
        await program.complete(batch)
        with pytest.raises(InvariantError, match="launched to go on"):
            program.abort(batch)
        program.commit(batch, [1])
    assert executor.num_going_on == 3
    assert program.reserve_units(handle, 1)
    executor.faults[len(executor.calls)] = Fault("device_error")
    batch = program.launch_decode([handle], goes_on=True)
    with pytest.raises(DeviceError):
        await program.complete(batch)
    program.abort(batch)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_unit_that_may_go_on_has_the_page_behind_it(
    program: ModelProgram, goes_on: bool
) -> None:
    handle = await ready(program, spec_of(62))
    pages = []
    for _ in range(3):
        assert program.reserve_units(handle, 1)
        batch = program.launch_decode([handle], goes_on=goes_on)
        await program.complete(batch)
        program.commit(batch, [1])
        program.check()
        pages.append(program.occupancy().pages_used)
    assert pages == ([1, 2, 2] if goes_on else [1, 1, 2])


async def test_a_unit_that_may_go_on_does_without_a_page_that_is_not_there(
    program: ModelProgram,
) -> None:
    handle = await ready(program, spec_of(63))
    for _ in range(2):
        other = program.open_sequence(spec_of(64))
        free = program.occupancy().pages_total - program.occupancy().pages_used
        assert program.reserve_units(other, min(64 * free, 256))
    assert program.occupancy().pages_used == program.occupancy().pages_total
    assert program.reserve_units(handle, 1)
    batch = program.launch_decode([handle], goes_on=True)
    await program.complete(batch)
    program.commit(batch, [1])
    assert program.frontier(handle) == 64
    assert not program.reserve_units(handle, 1)


@pytest.mark.parametrize("first", ["commit", "abort"])
@pytest.mark.parametrize("second", ["commit", "abort", "complete"])
async def test_a_batch_is_settled_once(program: ModelProgram, first: str, second: str) -> None:
    handle = await ready(program, spec_of(10))
    batch = program.launch_decode([handle])
    await program.complete(batch)
    await settle(program, batch, first)
    assert batch.is_settled
    with pytest.raises(InvariantError, match="settled before"):
        await settle(program, batch, second)


async def test_a_batch_of_another_program_is_refused(program: ModelProgram) -> None:
    other = program_over(FakeExecutor(VOCAB_SIZE, CAPACITY))
    handles = [await ready(each, spec_of(10)) for each in (program, other)]
    batch, foreign = program.launch_decode(handles[:1]), other.launch_decode(handles[1:])
    with pytest.raises(InvariantError, match="not the pending unit"):
        await program.complete(foreign)
    await program.complete(batch)
    await other.complete(foreign)


@pytest.mark.parametrize("accepted", [[], [1], [1, 1, 1], [2, 1], [-1, 1]])
async def test_bad_accepted_counts_change_nothing(
    program: ModelProgram, accepted: list[int]
) -> None:
    handles = [await ready(program, spec_of(10, name)) for name in ("a", "b")]
    batch = program.launch_decode(handles)
    await program.complete(batch)
    with pytest.raises(InvariantError, match="accept"):
        program.commit(batch, accepted)
    assert not batch.is_settled
    assert [program.frontier(handle) for handle in handles] == [10, 10]
    program.commit(batch, [1, 1])


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_cancelled_wait_ends_after_the_unit(
    program: ModelProgram, executor: FakeExecutor, num_cancels: int
) -> None:
    spec = spec_of(10)
    handle = await ready(program, spec)
    executor.gate = asyncio.Event()
    batch = program.launch_decode([handle])
    waiter = asyncio.create_task(program.complete(batch))
    for _ in range(num_cancels):
        await asyncio.sleep(0.002)
        waiter.cancel()
    await asyncio.sleep(0.002)
    assert not waiter.done()
    assert executor.is_running
    executor.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not executor.is_running
    program.abort(batch)
    assert await decode(program, [handle]) == expected_of(spec, 2)[1:]


async def test_a_cancelled_wait_can_be_taken_up_again(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    spec = spec_of(10)
    handle = await ready(program, spec)
    executor.delay_s = 0.01
    batch = program.launch_decode([handle])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await program.complete(batch)
    await program.complete(batch)
    assert tokens_of(batch) == expected_of(spec, 2)[1:]
    program.commit(batch, [1])


async def test_a_failure_nobody_waited_for_is_given_up_quietly(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    handle = await ready(program, spec_of(10))
    executor.faults[len(executor.calls)] = Fault("device_error")
    batch = program.launch_decode([handle])
    await asyncio.sleep(0.01)
    program.abort(batch)
    assert program.reserve_units(handle, 1)


async def test_reserve_is_all_or_nothing(program: ModelProgram) -> None:
    first, second = program.open_sequence(spec_of(250)), program.open_sequence(spec_of(250, "b"))
    third = program.open_sequence(spec_of(1, "c"))
    assert program.reserve_units(first, 250)
    assert program.reserve_units(second, 130)
    before = program.occupancy()
    assert not program.reserve_units(third, 120)
    assert program.occupancy() == before == Occupancy(3, 7, 8, 2, 6)
    assert program.reserve_units(third, 64)
    assert program.occupancy() == Occupancy(3, 8, 8, 3, 6)
    program.check()


async def test_reserve_is_idempotent(program: ModelProgram) -> None:
    handle = program.open_sequence(spec_of(100))
    for num_tokens in (100, 100, 3, 65):
        assert program.reserve_units(handle, num_tokens)
        assert program.occupancy() == Occupancy(1, 2, 8, 1, 6)


async def test_reserve_is_false_without_a_slot() -> None:
    capacity = dataclasses.replace(CAPACITY, num_slots=3)
    program = program_over(FakeExecutor(VOCAB_SIZE, capacity), capacity)
    handles = [program.open_sequence(spec_of(5, name)) for name in ("a", "b", "c")]
    assert program.reserve_units(handles[0], 5)
    assert program.reserve_units(handles[1], 5)
    before = program.occupancy()
    assert not program.reserve_units(handles[2], 5)
    assert program.occupancy() == before
    program.close_sequence(handles[0])
    assert program.reserve_units(handles[2], 5)


async def test_a_sequence_fills_its_context_and_no_more(program: ModelProgram) -> None:
    spec = spec_of(254)
    handle = program.open_sequence(spec)
    tokens = [await prefill(program, handle, spec, chunk=100)]
    tokens += await decode(program, [handle])
    tokens += await decode(program, [handle])
    assert tokens == expected_of(spec, 3)
    assert program.frontier(handle) == 256
    for launch in (program.reserve_units, program.launch_prefill):
        with pytest.raises(InvariantError, match="1 inputs after 256 in a context of 256"):
            launch(handle, 1)
    with pytest.raises(InvariantError, match="1 inputs after 256 in a context of 256"):
        program.launch_decode([handle])


@pytest.mark.parametrize("num_tokens", [0, 257])
async def test_a_prompt_that_cannot_be_held_is_refused(
    program: ModelProgram, num_tokens: int
) -> None:
    with pytest.raises(InvariantError, match=f"a prompt of {num_tokens} tokens"):
        program.open_sequence(spec_of(num_tokens))
    assert program.occupancy() == IDLE


async def test_launches_outside_the_contract_are_refused(program: ModelProgram) -> None:
    handle = program.open_sequence(spec_of(150))
    with pytest.raises(InvariantError, match="not reserved"):
        program.launch_prefill(handle, 10)
    assert program.reserve_units(handle, 200)
    with pytest.raises(InvariantError, match="101 prompt inputs, at most 100"):
        program.launch_prefill(handle, 101)
    with pytest.raises(InvariantError, match="0 inputs"):
        program.launch_prefill(handle, 0)
    with pytest.raises(InvariantError, match="no token to decode from"):
        program.launch_decode([handle])
    with pytest.raises(InvariantError, match="0 rows"):
        program.launch_decode([])
    await prefill(program, handle, spec_of(150), chunk=100)
    with pytest.raises(InvariantError, match="not reserved"):
        program.launch_decode([handle])
    assert program.reserve_units(handle, 1)
    with pytest.raises(InvariantError, match="twice"):
        program.launch_decode([handle, handle])
    with pytest.raises(InvariantError, match="at most 0"):
        program.launch_prefill(handle, 1)
    program.check()


async def test_a_refused_row_leaves_its_batch_mates_launchable(program: ModelProgram) -> None:
    spec = spec_of(10)
    handle, unready = await ready(program, spec), program.open_sequence(spec_of(5, "unready"))
    assert program.reserve_units(unready, 5)
    with pytest.raises(InvariantError, match="unready"):
        program.launch_decode([handle, unready])
    assert await decode(program, [handle]) == expected_of(spec, 2)[1:]


async def test_stale_handles_are_refused(program: ModelProgram) -> None:
    handle = program.open_sequence(spec_of(5))
    program.close_sequence(handle)
    program.open_sequence(spec_of(5))
    for use in (program.close_sequence, program.frontier):
        with pytest.raises(InvariantError, match="stale handle"):
            use(handle)
    with pytest.raises(InvariantError, match="stale handle"):
        program.reserve_units(handle, 1)


async def test_no_lane_is_an_invariant_error(program: ModelProgram) -> None:
    for index in range(3):
        program.open_sequence(spec_of(5, f"row {index}"))
    with pytest.raises(InvariantError, match="no lane is free"):
        program.open_sequence(spec_of(5, "late"))
    program.check()


@pytest.mark.parametrize("chunk", [1, 64, 100])
async def test_scores_are_the_logits_of_every_input(program: ModelProgram, chunk: int) -> None:
    spec = spec_of(130)
    handle = program.open_sequence(spec)
    parts = []
    while (rest := 130 - program.frontier(handle)) > 0:
        assert program.reserve_units(handle, min(chunk, rest))
        parts.append(await program.score(handle, min(chunk, rest)))
        program.check()
    np.testing.assert_array_equal(
        np.concatenate(parts), expected_logits(spec.prompt, VOCAB_SIZE), strict=True
    )
    assert program.reserve_units(handle, 1)
    with pytest.raises(InvariantError, match="no token to decode from"):
        program.launch_decode([handle])


@pytest.mark.parametrize("chunk", [1, 64, 100])
@pytest.mark.parametrize("first", [1, 63, 65, 129])
async def test_units_of_a_scored_prompt_have_the_scores_behind_their_inputs(
    program: ModelProgram, chunk: int, first: int
) -> None:
    spec = replace(spec_of(130), scoring=PromptScoring(first, 2))
    handle = program.open_sequence(spec)
    parts: list[PromptScores] = []
    while (rest := 130 - program.frontier(handle)) > 0:
        assert program.reserve_units(handle, min(chunk, rest))
        batch = program.launch_prefill(handle, min(chunk, rest))
        await program.complete(batch)
        assert batch.outputs is not None
        (output,) = batch.outputs
        program.commit(batch, [0 if output.token is None else 1])
        parts += [] if output.scores is None else [output.scores]
    scores = prompt_logprobs.joined(parts)
    expected = prompt_logprobs.reference(
        expected_logits(spec.prompt, VOCAB_SIZE)[first - 1 : -1],
        spec.prompt.token_ids[first:],
        first=first,
        num_top=2,
    )
    assert expected is not None
    assert (scores.first, scores.stop) == (first, 130)
    np.testing.assert_array_equal(scores.logprobs, expected.logprobs, strict=True)
    np.testing.assert_array_equal(scores.top_ids, expected.top_ids, strict=True)


class ScorelessExecutor(FakeExecutor):
    async def prefill(self, row: UnitRow) -> RowOutput:
        return replace(await super().prefill(row), scores=None)


async def test_missing_scores_are_an_invariant_error() -> None:
    program = program_over(ScorelessExecutor(VOCAB_SIZE, CAPACITY))
    handle = program.open_sequence(replace(spec_of(5), scoring=PromptScoring(1, 0)))
    assert program.reserve_units(handle, 5)
    with pytest.raises(InvariantError, match="scored more or less"):
        await program.complete(program.launch_prefill(handle, 5))


async def test_a_failed_or_cancelled_score_commits_nothing(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    spec = spec_of(40)
    handle = program.open_sequence(spec)
    assert program.reserve_units(handle, 40)
    executor.faults[0] = Fault("device_error")
    with pytest.raises(DeviceError):
        await program.score(handle, 40)
    executor.gate = asyncio.Event()
    task = asyncio.create_task(program.score(handle, 40))
    await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.sleep(0.002)
    with pytest.raises(InvariantError, match="is pending"):
        program.close_sequence(handle)
    executor.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert program.frontier(handle) == 0
    np.testing.assert_array_equal(
        await program.score(handle, 40), expected_logits(spec.prompt, VOCAB_SIZE), strict=True
    )


async def test_close_ends_every_sequence(program: ModelProgram, executor: FakeExecutor) -> None:
    handle = await ready(program, spec_of(10))
    program.open_sequence(spec_of(5, "other"))
    batch = program.launch_decode([handle])
    await program.complete(batch)
    program.close()
    program.close()
    assert executor.is_closed
    assert program.occupancy() == IDLE
    program.check()
    with pytest.raises(InvariantError, match="closed"):
        program.open_sequence(spec_of(5))
    with pytest.raises(InvariantError, match="settled before"):
        program.commit(batch, [1])


class WrongExecutor(FakeExecutor):
    """Answers every decode with `answer`."""

    answer: tuple[RowOutput, ...] = ()

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((), "answered 0 of 1 rows"),
        ((RowOutput(None),), "more or less than asked"),
        ((RowOutput(GeneratedToken(1), is_finite=False),), "more or less than asked"),
        ((RowOutput(GeneratedToken(VOCAB_SIZE)),), f"chose token {VOCAB_SIZE}"),
        ((RowOutput(GeneratedToken(-1)),), "chose token -1"),
    ],
)
async def test_answers_that_do_not_fit_the_unit_are_refused(
    answer: tuple[RowOutput, ...], message: str
) -> None:
    executor = WrongExecutor(VOCAB_SIZE, CAPACITY)
    executor.answer = answer
    program = program_over(executor)
    handle = await ready(program, spec_of(10))
    batch = program.launch_decode([handle])
    with pytest.raises(InvariantError, match=message):
        await program.complete(batch)
    assert batch.outputs is None
    program.abort(batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_context", 0),
        ("num_pages", 3),
        ("num_slots", 2),
        ("prefill_chunk", 0),
        ("max_concurrency", 0),
    ],
)
def test_a_capacity_that_cannot_run_one_sequence_is_refused(field: str, value: int) -> None:
    changes: dict[str, Any] = {field: value}
    capacity = dataclasses.replace(CAPACITY, **changes)
    with pytest.raises(InvariantError):
        program_over(FakeExecutor(VOCAB_SIZE, CAPACITY), capacity)


def test_pages_needed_rounds_up(program: ModelProgram) -> None:
    assert [program.pages_needed(n) for n in (0, 1, 64, 65, 256)] == [0, 1, 1, 2, 4]
