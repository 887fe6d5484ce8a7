"""Units that ask a draft model for proposals, and what of it a sequence keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import InvariantError
from ninfer.contract.program import Draft, SequenceHandle, SequenceSpec, Source
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.contract.units import Capacity, RowOutput, UnitRow
from ninfer.convert.source import open_model
from ninfer.program.program import ModelProgram
from tests.helpers import program_driver
from tests.helpers.fake_executor import WRONG_GUESSES, FakeExecutor
from tests.helpers.model_configs import hybrid_config
from tests.helpers.model_paths import golden_model
from tests.helpers.mtp_driver import WatchedMtp, read_all
from tests.helpers.program_driver import decode, prefill

VOCAB_SIZE = 97
CAPACITY = Capacity(
    max_concurrency=3,
    max_context=256,
    num_pages=8,
    num_slots=7,
    prefill_chunk=100,
    max_draft_tokens=6,
    has_draft_model=True,
)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor(VOCAB_SIZE, CAPACITY)


@pytest.fixture
def program(executor: FakeExecutor) -> ModelProgram:
    return ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, CAPACITY)


def spec_of(num_tokens: int = 10, *, rope_delta: int = 0) -> SequenceSpec:
    return program_driver.spec_of(num_tokens, vocab_size=VOCAB_SIZE, rope_delta=rope_delta)


def expected_of(spec: SequenceSpec, num_tokens: int) -> list[int]:
    return program_driver.expected_of(spec, num_tokens, vocab_size=VOCAB_SIZE)


async def ready(program: ModelProgram, spec: SequenceSpec) -> SequenceHandle:
    return await program_driver.ready(program, spec, chunk=CAPACITY.prefill_chunk)


async def run(
    program: ModelProgram,
    handle: SequenceHandle,
    draft: tuple[int, ...] = (),
    num_proposed: int = 0,
    accepted: int | None = None,
) -> RowOutput:
    """One committed unit, with room for everything."""
    assert program.reserve_units(handle, 1 + len(draft) + num_proposed)
    batch = program.launch_decode([handle], drafts=[Draft(draft)], num_proposed=[num_proposed])
    await program.complete(batch)
    assert batch.outputs is not None
    (output,) = batch.outputs
    counts = [len(output.tokens) if accepted is None else accepted]
    await program.rewind(batch, counts)
    program.commit(batch, counts)
    program.check()
    return output


@pytest.mark.parametrize("rope_delta", [0, -5])
async def test_proposals_are_drafts_of_the_next_unit(
    program: ModelProgram, rope_delta: int
) -> None:
    spec = spec_of(rope_delta=rope_delta)
    text = expected_of(spec, 60)
    handle = await ready(program, spec)
    said, proposal = text[:1], tuple[int, ...]()
    lengths = []
    while len(said) < 50:
        output = await run(program, handle, proposal, 4)
        lengths.append(len(output.tokens))
        said += [token.token_id for token in output.tokens]
        proposal = output.proposal
        assert len(proposal) == 4
    assert said == text[: len(said)]
    # The fake's guesses are right but for every so many ordinals.
    assert max(lengths) == WRONG_GUESSES


async def test_every_step_is_verified_and_none_goes_on(
    executor: FakeExecutor, program: ModelProgram
) -> None:
    spec = spec_of()
    text = expected_of(spec, 4)
    handle = await ready(program, spec)
    assert await decode(program, [handle], goes_on=True) == text[1:2]
    assert program.reserve_units(handle, 1)
    batch = program.launch_decode([handle], goes_on=True)
    await program.complete(batch)
    program.abort(batch)
    assert await decode(program, [handle]) == text[2:3]
    assert [call.kind for call in executor.calls] == ["prefill", "verify", "verify", "verify"]
    assert executor.num_going_on == 0


@pytest.mark.parametrize("num_reserved", [1, 3, 4, 5, 9])
async def test_proposals_go_as_far_as_pages_are_reserved(
    program: ModelProgram, num_reserved: int
) -> None:
    """The frontier is at 61: the guess behind the newest token is fed at 62."""
    handle = await ready(program, spec_of(61))
    assert program.reserve_units(handle, num_reserved)
    batch = program.launch_decode([handle], num_proposed=[6])
    await program.complete(batch)
    assert batch.outputs is not None
    assert len(batch.outputs[0].proposal) == (2 if num_reserved <= 3 else 6)
    program.commit(batch, [1])
    program.check()


async def test_a_page_that_is_shown_for_proposals_is_not_taken_again(
    program: ModelProgram,
) -> None:
    handle = await ready(program, spec_of(61))
    await run(program, handle, (), 6)
    assert program.occupancy().pages_used == 2
    program.close_sequence(handle)
    assert program.occupancy().pages_used == 0


async def test_rows_of_a_unit_propose_each_for_itself(program: ModelProgram) -> None:
    specs = [spec_of(10), spec_of(20), spec_of(30)]
    handles = [await ready(program, spec) for spec in specs]
    alone = [await ready_alone(spec) for spec in specs[:2]]
    for handle in handles:
        assert program.reserve_units(handle, 7)
    batch = program.launch_decode(handles, num_proposed=[5, 2, 0])
    await program.complete(batch)
    assert batch.outputs is not None
    assert [len(output.proposal) for output in batch.outputs] == [5, 2, 0]
    assert [batch.outputs[0].proposal, batch.outputs[1].proposal] == [
        alone[0].proposal,
        alone[1].proposal[:2],
    ]
    program.commit(batch, [1, 1, 1])


async def ready_alone(spec: SequenceSpec) -> RowOutput:
    executor = FakeExecutor(VOCAB_SIZE, CAPACITY)
    program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, CAPACITY)
    return await run(program, await ready(program, spec), (), 5)


async def test_a_row_that_is_behind_its_ledger_proposes_nothing(program: ModelProgram) -> None:
    handle = await ready(program, spec_of())
    program.force(handle, (5, 6))
    assert program.num_replay_left(handle) == 2
    assert program.reserve_units(handle, 6)
    with pytest.raises(InvariantError, match="1 proposed tokens, at most 0"):
        program.launch_decode([handle], num_proposed=[1])
    for _ in range(2):
        assert (await run(program, handle)).tokens == ()
    output = await run(program, handle, (), 3)
    assert len(output.tokens) == 1
    assert len(output.proposal) == 3


async def test_what_cannot_be_asked_for(program: ModelProgram) -> None:
    handle = await ready(program, spec_of())
    assert program.reserve_units(handle, 8)
    for count in (-1, 7):
        with pytest.raises(InvariantError, match=f"{count} proposed tokens, at most 6"):
            program.launch_decode([handle], num_proposed=[count])
    with pytest.raises(InvariantError, match="2 lengths of proposals for 1 rows"):
        program.launch_decode([handle], num_proposed=[1, 1])
    capacity = replace(CAPACITY, has_draft_model=False)
    plain = ModelProgram(
        hybrid_config(vocab_size=VOCAB_SIZE), FakeExecutor(VOCAB_SIZE, capacity), capacity
    )
    handle = await ready(plain, spec_of())
    assert plain.reserve_units(handle, 4)
    with pytest.raises(InvariantError, match="1 proposed tokens, at most 0"):
        plain.launch_decode([handle], num_proposed=[1])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RowOutput(GeneratedToken(5), proposal=(1, 2, 3)), "proposes 3 tokens of 2"),
        (RowOutput(None, is_dead_end=True, proposal=(1,)), "proposes 1 tokens of 2"),
        (RowOutput(GeneratedToken(5), proposal=(1, VOCAB_SIZE)), r"proposes tokens \(1, 97\)"),
        (RowOutput(GeneratedToken(5), proposal=(-1,)), r"proposes tokens \(-1,\)"),
    ],
)
async def test_an_executor_that_proposes_what_it_should_not(
    executor: FakeExecutor,
    program: ModelProgram,
    monkeypatch: pytest.MonkeyPatch,
    answer: RowOutput,
    message: str,
) -> None:
    async def lie(rows: tuple[UnitRow, ...]) -> tuple[RowOutput]:
        return (answer,)

    handle = await ready(program, spec_of())
    assert program.reserve_units(handle, 3)
    monkeypatch.setattr(executor, "verify", lie)
    batch = program.launch_decode([handle], num_proposed=[2])
    with pytest.raises(InvariantError, match=message):
        await program.complete(batch)
    program.abort(batch)


@pytest.mark.parametrize("is_planned", [False, True])
def test_plan_and_executor_agree_about_a_draft_model(is_planned: bool) -> None:
    executor = FakeExecutor(VOCAB_SIZE, replace(CAPACITY, has_draft_model=not is_planned))
    capacity = replace(CAPACITY, has_draft_model=is_planned)
    with pytest.raises(InvariantError, match="draft model is not as planned"):
        ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), executor, capacity)


# With a real module: bits of its keys below a frontier and of the StateImage there.

MTP_CAPACITY = replace(CAPACITY, num_pages=24, num_slots=13, prefill_chunk=64)
SAMPLED = SamplingParams(temperature=0.9, seed=4)
PROMPT = program_driver.spec_of(150, vocab_size=300)


@pytest.fixture
def watched() -> WatchedMtp:
    source = open_model(golden_model("qwen3_5-dense"))
    return WatchedMtp(source.config, read_all(source), MTP_CAPACITY)


@pytest.fixture
def mtp(watched: WatchedMtp) -> ModelProgram:
    return ModelProgram(watched.config, watched, MTP_CAPACITY)


def named(last: int, name: str = "r") -> SequenceSpec:
    """The prompt with another last token."""
    token_ids = PROMPT.prompt.token_ids.copy()
    token_ids[-1] = last
    return SequenceSpec(name, PreparedPrompt(token_ids), SAMPLED)


async def fed(
    program: ModelProgram, spec: SequenceSpec, source: Source | None = None
) -> tuple[SequenceHandle, int]:
    handle = program.open_sequence(spec, source)
    return handle, await prefill(program, handle, spec, chunk=64)


async def talk(program: ModelProgram, handle: SequenceHandle, num_rounds: int) -> list[RowOutput]:
    """Rounds with the module's own drafts."""
    outputs = list[RowOutput]()
    for _ in range(num_rounds):
        proposal = outputs[-1].proposal if outputs else ()
        outputs.append(await run(program, handle, proposal, 3))
    return outputs


async def checkpoint_at(program: ModelProgram, num_tokens: int) -> CheckpointId:
    """Of a prompt that goes on otherwise, behind some whole chunks."""
    spec = named(7, "first")
    handle = program.open_sequence(spec)
    while program.frontier(handle) < num_tokens:
        assert program.reserve_units(handle, 64)
        batch = program.launch_prefill(handle, 64)
        await program.complete(batch)
        program.commit(batch, [0])
    checkpoint = program.capture(handle)
    assert checkpoint is not None
    await prefill(program, handle, spec, chunk=64)
    await talk(program, handle, 3)
    program.close_sequence(handle)
    return checkpoint


async def test_a_fork_with_another_next_token_has_the_bits_of_a_fresh_run(
    mtp: ModelProgram, watched: WatchedMtp
) -> None:
    checkpoint = await checkpoint_at(mtp, 128)
    images, said = [], []
    for source in (None, Source(checkpoint, 128), None):
        watched.images.clear()
        handle, _ = await fed(mtp, named(11), source)
        said.append(await talk(mtp, handle, 5))
        images.append(dict(watched.images))
        mtp.close_sequence(handle)
    assert said[0] == said[1] == said[2]
    assert images[0] == images[1] == images[2]
    assert len(images[0]) == 5
    mtp.close()


@pytest.mark.parametrize("keeps_state", [False, True])
async def test_a_pause_has_the_bits_of_a_fresh_run(
    mtp: ModelProgram, watched: WatchedMtp, keeps_state: bool
) -> None:
    handle, _ = await fed(mtp, named(11))
    outputs = await talk(mtp, handle, 8)
    want = dict(watched.images)
    mtp.close_sequence(handle)
    watched.images.clear()

    handle, _ = await fed(mtp, named(11))
    assert await talk(mtp, handle, 5) == outputs[:5]
    paused = mtp.pause(handle, keeps_state=keeps_state)
    watched.images.clear()
    other, _ = await fed(mtp, named(3, "other"))
    await talk(mtp, other, 2)
    watched.images.clear()
    source = None
    if paused.checkpoint is not None:
        source = Source(paused.checkpoint, paused.frontier, consumes=True)
    handle = mtp.resume(paused, source)
    while mtp.num_replay_left(handle):
        frontier, left = mtp.frontier(handle), mtp.num_replay_left(handle)
        is_prompt = frontier < 150
        count = min(64, 150 - frontier) if is_prompt else min(left, 3)
        assert mtp.reserve_units(handle, count)
        launch = mtp.launch_prefill if is_prompt else mtp.launch_replay
        batch = launch(handle, count)
        await mtp.complete(batch)
        mtp.commit(batch, [0])
    # The proposal of the pause is gone; its tokens are not.
    said = [token for output in outputs for token in output.tokens]
    more = [token for output in await talk(mtp, handle, 3) for token in output.tokens]
    before = sum(len(output.tokens) for output in outputs[:5])
    assert more == said[before : before + len(more)]
    common = want.keys() & watched.images.keys()
    assert len(common) >= 1
    assert all(want[place] == watched.images[place] for place in common)
    mtp.close()


async def test_a_partly_taken_round_has_the_bits_of_serial_steps(
    mtp: ModelProgram, watched: WatchedMtp
) -> None:
    handle, first = await fed(mtp, named(11))
    text = [first]
    for _ in range(8):
        text += [token.token_id for token in (await run(mtp, handle)).tokens]
    want = dict(watched.images)
    mtp.close_sequence(handle)
    watched.images.clear()
    handle, _ = await fed(mtp, named(11))
    await run(mtp, handle, tuple(text[1:5]), 3, accepted=3)
    assert mtp.num_replay_left(handle) == 0
    output = await run(mtp, handle, (), 3)
    assert output.tokens[0].token_id == text[4]
    await run(mtp, handle, tuple(text[5:6]))
    assert watched.images.items() <= want.items()
    assert {150, 153, 154} <= watched.images.keys()
    mtp.close()
