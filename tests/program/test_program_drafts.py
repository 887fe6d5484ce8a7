"""Units with drafts: what they commit, what is left of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import Draft, SequenceHandle, SequenceSpec
from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.contract.units import Capacity, RowOutput, UnitRow
from ninfer.program.program import ModelProgram
from tests.helpers import program_driver
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.fixed_mask import FixedMask
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import decode, prefill

VOCAB_SIZE = 97
CAPACITY = Capacity(
    max_concurrency=3,
    max_context=256,
    num_pages=8,
    num_slots=7,
    prefill_chunk=100,
    max_draft_tokens=6,
)
COUNTED = SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.5, repetition_penalty=1.1)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor(VOCAB_SIZE, CAPACITY)


@pytest.fixture
def program(executor: FakeExecutor) -> ModelProgram:
    return ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, CAPACITY)


def spec_of(
    num_tokens: int = 10, *, sampling: SamplingParams | None = None, rope_delta: int = 0
) -> SequenceSpec:
    return program_driver.spec_of(
        num_tokens, vocab_size=VOCAB_SIZE, sampling=sampling, rope_delta=rope_delta
    )


def expected_of(spec: SequenceSpec, num_tokens: int) -> list[int]:
    return program_driver.expected_of(spec, num_tokens, vocab_size=VOCAB_SIZE)


async def ready(program: ModelProgram, spec: SequenceSpec) -> SequenceHandle:
    return await program_driver.ready(program, spec, chunk=CAPACITY.prefill_chunk)


async def round_of(
    program: ModelProgram, handle: SequenceHandle, draft: list[int], accepted: int | None = None
) -> list[int]:
    """One committed unit: the tokens it produced."""
    assert program.reserve_units(handle, 1 + len(draft))
    batch = program.launch_decode([handle], drafts=[Draft(tuple(draft))])
    await program.complete(batch)
    assert batch.outputs is not None
    produced = [token.token_id for token in batch.outputs[0].tokens]
    counts = [len(produced) if accepted is None else accepted]
    await program.rewind(batch, counts)
    program.commit(batch, counts)
    program.check()
    return produced


@pytest.mark.parametrize("spec", [spec_of(), spec_of(sampling=COUNTED), spec_of(rope_delta=-5)])
@pytest.mark.parametrize("num_right", range(7))
async def test_right_drafts_and_one_token_more_are_committed(
    program: ModelProgram, spec: SequenceSpec, num_right: int
) -> None:
    text = expected_of(spec, 12)
    handle = await ready(program, spec)
    draft = [
        *text[1 : 1 + num_right],
        *((token + 1) % VOCAB_SIZE for token in text[1 + num_right :]),
    ]
    assert await round_of(program, handle, draft[:6]) == text[1 : 2 + num_right]
    assert program.frontier(handle) == 11 + num_right
    assert await decode(program, [handle]) == [text[2 + num_right]]
    assert await round_of(program, handle, text[3 + num_right : 5 + num_right])


async def test_rows_with_and_without_drafts_share_a_unit(program: ModelProgram) -> None:
    specs = [spec_of(10), spec_of(63), spec_of(64)]
    handles = [await ready(program, spec) for spec in specs]
    texts = [expected_of(spec, 8) for spec in specs]
    drafts = [Draft(tuple(texts[0][1:4])), Draft(), Draft((texts[2][1], 96, 96))]
    for handle, draft in zip(handles, drafts, strict=True):
        assert program.reserve_units(handle, 1 + len(draft.token_ids))
    batch = program.launch_decode(handles, drafts=drafts)
    assert batch.num_inputs == (4, 1, 4)
    await program.complete(batch)
    assert batch.outputs is not None
    counts = [len(output.tokens) for output in batch.outputs]
    program.commit(batch, counts)
    assert counts == [4, 1, 2]
    more = await decode(program, handles)
    assert more == [text[1 + count] for text, count in zip(texts, counts, strict=True)]


@pytest.mark.parametrize("accepted", [1, 2, 3])
async def test_a_row_that_takes_some_of_its_tokens_is_where_steps_had_brought_it(
    program: ModelProgram, accepted: int
) -> None:
    spec = spec_of()
    text = expected_of(spec, 12)
    handle = await ready(program, spec)
    await round_of(program, handle, text[1:4], accepted)
    assert program.frontier(handle) == 10 + accepted
    assert program.num_replay_left(handle) == 0
    assert await decode(program, [handle]) == [text[1 + accepted]]
    assert await round_of(program, handle, text[2 + accepted : 4 + accepted])


async def test_rows_beside_one_that_goes_back_stay_as_they_are(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    specs = [spec_of(10), spec_of(64), spec_of(12)]
    handles = [await ready(program, spec) for spec in specs]
    texts = [expected_of(spec, 8) for spec in specs]
    drafts = [Draft(tuple(texts[0][1:4])), Draft((texts[1][1], 96, 96)), Draft((texts[2][1],))]
    for handle, draft in zip(handles, drafts, strict=True):
        assert program.reserve_units(handle, 1 + len(draft.token_ids))
    batch = program.launch_decode(handles, drafts=drafts)
    await program.complete(batch)
    counts = [2, 2, 0]
    await program.rewind(batch, counts)
    assert [call.kind for call in executor.calls[-2:]] == ["verify", "rewind"]
    program.commit(batch, counts)
    program.check()
    assert [program.frontier(handle) for handle in handles] == [12, 66, 12]
    more = await decode(program, handles[:2])
    assert more == [texts[0][3], texts[1][3]]


async def test_nothing_goes_back_where_all_is_taken(
    program: ModelProgram, executor: FakeExecutor
) -> None:
    handle = await ready(program, spec_of())
    await round_of(program, handle, expected_of(spec_of(), 12)[1:4])
    assert [call.kind for call in executor.calls].count("rewind") == 0


async def test_states_behind_tokens_that_are_not_taken_are_not_committed(
    program: ModelProgram,
) -> None:
    spec = spec_of()
    text = expected_of(spec, 12)
    handle = await ready(program, spec)
    assert program.reserve_units(handle, 4)
    batch = program.launch_decode([handle], drafts=[Draft(tuple(text[1:4]))])
    await program.complete(batch)
    for counts in ([2], [3]):
        with pytest.raises(InvariantError, match="its state has more"):
            program.commit(batch, counts)
        await program.rewind(batch, [1])
    with pytest.raises(InvariantError, match="row 0 accepts 5 of 4 tokens"):
        await program.rewind(batch, [5])
    program.commit(batch, [1])
    assert await decode(program, [handle]) == [text[2]]


async def test_a_row_that_takes_nothing_can_only_be_closed(program: ModelProgram) -> None:
    spec = spec_of()
    handle = await ready(program, spec)
    await round_of(program, handle, expected_of(spec, 4)[1:], 0)
    with pytest.raises(InvariantError, match="can only be closed"):
        program.reserve_units(handle, 1)
    program.close_sequence(handle)


async def test_an_aborted_round_leaves_no_trace(program: ModelProgram) -> None:
    spec = spec_of(sampling=COUNTED)
    text = expected_of(spec, 8)
    handle = await ready(program, spec)
    assert program.reserve_units(handle, 4)
    for draft in (text[1:4], [0, 0, 0]):
        batch = program.launch_decode([handle], drafts=[Draft(tuple(draft))])
        await program.complete(batch)
        program.abort(batch)
        assert program.frontier(handle) == 10
    assert await decode(program, [handle]) == [text[1]]


@pytest.mark.parametrize("keeps_state", [False, True])
async def test_pause_behind_a_round(program: ModelProgram, keeps_state: bool) -> None:
    spec = spec_of(60, sampling=COUNTED)
    text = expected_of(spec, 12)
    handle = await ready(program, spec)
    await round_of(program, handle, [*text[1:6], 0])
    paused = program.pause(handle, keeps_state=keeps_state)
    assert (list(paused.accepted), paused.frontier) == (text[:7], 66)
    assert (paused.checkpoint is not None) == keeps_state


async def test_columns_are_asked_with_what_comes_before_them(
    executor: FakeExecutor, program: ModelProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[UnitRow] = []
    verify = executor.verify

    async def watch(rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        seen.extend(rows)
        return await verify(rows)

    monkeypatch.setattr(executor, "verify", watch)
    spec = replace(
        spec_of(sampling=COUNTED), min_tokens=3, suppressed_ids=(96,), mask=FixedMask((1,))
    )
    handle = program.open_sequence(spec)
    first = await prefill(program, handle, spec, chunk=100)
    masks = (None, FixedMask((4,)), FixedMask((5,), is_active=False))
    assert program.reserve_units(handle, 4)
    batch = program.launch_decode([handle], drafts=[Draft((7, 7, first), masks)])
    await program.complete(batch)
    (row,) = seen
    assert row.sample is not None
    columns = (*row.checks, row.sample)
    assert [sample.position for sample in columns] == [11, 12, 13, 14]
    assert [sample.suppressed_ids for sample in columns] == [(96,), (96,), (), ()]
    assert [sample.mask for sample in columns] == [spec.mask, None, masks[1], None]
    counts = [
        dict(zip(sample.generated_ids.tolist(), sample.generated_counts.tolist(), strict=True))
        for sample in columns
    ]
    assert counts == [{first: 1}, {first: 1, 7: 1}, {first: 1, 7: 2}, {first: 2, 7: 2}]
    assert all(np.all(np.diff(sample.generated_ids) > 0) for sample in columns)


async def test_drafts_that_cannot_be_launched(program: ModelProgram) -> None:
    handle = await ready(program, spec_of())
    assert program.reserve_units(handle, 8)
    with pytest.raises(InvariantError, match="draft of 7 tokens, at most 6"):
        program.launch_decode([handle], drafts=[Draft((1,) * 7)])
    with pytest.raises(InvariantError, match="2 drafts for 1 rows"):
        program.launch_decode([handle], drafts=[Draft((1,)), Draft()])
    other = await ready(program, spec_of(63))
    assert program.reserve_units(other, 1)
    with pytest.raises(InvariantError, match="not reserved"):
        program.launch_decode([other], drafts=[Draft((1, 2))])


async def test_an_executor_that_accepts_what_was_not_drafted(
    executor: FakeExecutor, program: ModelProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await ready(program, spec_of())
    assert program.reserve_units(handle, 3)
    token = GeneratedToken(5)
    for output, said in (
        (RowOutput(token, drafts=(token,)), "which were not drafted"),
        (RowOutput(None, is_dead_end=True, drafts=(GeneratedToken(1),)), "accepts 1 of 2"),
        (RowOutput(token, drafts=(token,) * 3), "accepts 3 of 2"),
    ):

        async def lie(rows: tuple[UnitRow, ...], output: RowOutput = output) -> tuple[RowOutput]:
            return (output,)

        monkeypatch.setattr(executor, "verify", lie)
        batch = program.launch_decode([handle], drafts=[Draft((1, 2))])
        with pytest.raises(InvariantError, match=said):
            await program.complete(batch)
        program.abort(batch)


def test_a_program_is_not_made_for_more_than_its_executor_verifies() -> None:
    capacity = replace(CAPACITY, max_draft_tokens=MAX_DRAFT_TOKENS + 1)
    with pytest.raises(InvariantError, match="drafts of 16 tokens"):
        ModelProgram(
            hybrid_config(vocab_size=VOCAB_SIZE), FakeExecutor(VOCAB_SIZE, capacity), capacity
        )
