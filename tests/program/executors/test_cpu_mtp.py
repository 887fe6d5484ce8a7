"""The MTP module on the CPU executor: its numbers, what it keeps, what it proposes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.arrays import IntArray
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, Move, RowOutput
from ninfer.convert.source import open_model
from ninfer.ops import linear, sampling
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_mtp import MtpModel
from ninfer.program.executors.draft_shape import DraftShape, KvShape, mtp_shape
from tests.e2e.test_goldens import GOLDENS, load_prompts
from tests.helpers import executor_driver as driver
from tests.helpers import mtp_driver
from tests.helpers.checkpoints import CheckpointSpec, write_checkpoint
from tests.helpers.executor_driver import DrivenSequence
from tests.helpers.fixed_mask import FixedMask
from tests.helpers.mtp_driver import ModuleParts, draft_image, ids_of, run_round
from tests.helpers.tolerance import GOLDEN, assert_close

CASES = ("qwen3_5-dense", "qwen3_5-moe")
NUM_TOKENS = 24
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, seed=5)
SMALL_VOCAB = 300


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, CpuExecutor]]:
    executor = mtp_driver.build_executor(open_model(GOLDENS / request.param / "model"))
    yield request.param, executor
    executor.close()


@pytest.fixture(scope="module")
def dense() -> Iterator[CpuExecutor]:
    executor = mtp_driver.build_executor(open_model(GOLDENS / CASES[0] / "model"))
    yield executor
    executor.close()


def parts_of(case: str, positions: IntArray | None = None, delta: int = 0) -> ModuleParts:
    target = driver.sequence(0, positions=positions, rope_delta=delta)
    source = open_model(GOLDENS / case / "model")
    return ModuleParts(source.config, mtp_driver.read_all(source), target)


def prompt_of(case: str, index: int = 0) -> list[int]:
    return list(load_prompts(case).values())[index].prompt


async def start(
    executor: CpuExecutor,
    index: int,
    prompt: Sequence[int],
    params: SamplingParams = SAMPLED,
    chunks: Sequence[int] = (64,),
) -> tuple[DrivenSequence, int]:
    target = driver.sequence(index, params)
    output = await driver.prefill(executor, target, prompt, chunks)
    return target, driver.taken(output).token_id


async def text_of(
    executor: CpuExecutor, prompt: Sequence[int], params: SamplingParams = SAMPLED
) -> list[int]:
    """What plain steps say, and the image of a sequence that said it is in lane 7."""
    target, newest = await start(executor, 7, prompt, params)
    said = [newest]
    while len(said) < NUM_TOKENS:
        (output,) = await run_round(executor, [target], said[-1:], [()], 0)
        said += ids_of(output)
    return said


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["p7", "p65"])
def test_the_module_agrees_with_an_independent_implementation(case: str, name: str) -> None:
    """There the pairs lie a place earlier: (x_(p+1), h_p) at p, the last x being the answer's."""
    parts, golden = parts_of(case), load_prompts(case)[name]
    hidden = parts.hidden(golden.prompt)
    outputs = parts.module.run(parts.batch([*golden.prompt[1:], golden.greedy[0]]), hidden)
    logits = parts.model.head(outputs, linear.reference)
    for got, want in ((outputs, "mtp_hidden"), (logits, "mtp_logits")):
        wanted = golden.arrays[want]
        assert_close(got[-len(wanted) :], wanted, GOLDEN)


@pytest.mark.parametrize("case", CASES)
def test_the_target_gives_what_is_behind_its_final_norm(case: str) -> None:
    """The demo model's final norm is too even to tell."""
    parts, golden = parts_of(case), load_prompts(case)["p7"]
    batch = parts.batch([*golden.prompt[1:], golden.greedy[0]])
    outputs = parts.module.run(batch, parts.stream(golden.prompt))
    assert np.abs(outputs - golden.arrays["mtp_hidden"]).max() > 100 * GOLDEN.absolute


@pytest.mark.parametrize("case", CASES)
def test_norms_have_the_offset_of_the_model(case: str) -> None:
    """Weights with the offset in them, and none to be added, are the same module."""
    source, golden = open_model(GOLDENS / case / "model"), load_prompts(case)["p7"]
    weights = mtp_driver.read_all(source)
    plain = {
        name: array + 1.0 if name.endswith("norm") and ".gdn." not in name else array
        for name, array in weights.items()
    }
    for name in ("mtp.norm_embedding", "mtp.norm_hidden"):
        plain[name] = weights[name] + 1.0
    config = dataclasses.replace(source.config, norm_offset=0.0)
    assert source.config.norm_offset == 1.0
    found = []
    for parts in (ModuleParts(source.config, weights), ModuleParts(config, plain)):
        hidden = parts.hidden(golden.prompt)
        found.append(parts.module.run(parts.batch(golden.prompt), hidden))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("delta", [0, -4])
async def test_a_proposal_is_the_chain_of_the_module_over_all_pairs(
    loaded: tuple[str, CpuExecutor], delta: int
) -> None:
    """Each step of it computed from nothing: the pairs of the text and those that were guessed."""
    case, executor = loaded
    prompt = prompt_of(case)
    positions = np.tile(np.arange(len(prompt), dtype=np.int32), (3, 1))
    target = driver.sequence(0, SAMPLED, positions=positions, rope_delta=delta)
    output = await driver.prefill(executor, target, prompt, (64,))
    (output,) = await run_round(
        executor, [target], [driver.taken(output).token_id], [()], num_proposed=5
    )
    token_ids = [*target.tokens, driver.taken(output).token_id]
    parts = parts_of(case, positions, delta)
    hidden = np.pad(parts.hidden(target.tokens), ((1, 0), (0, 0)))
    for guess in output.proposal:
        outputs = parts.module.run(parts.batch(token_ids), hidden)
        logits = parts.model.head(outputs[-1:], linear.reference)[0]
        drawn = sampling.reference(logits, driver.sample_row(len(token_ids), SAMPLED))
        assert drawn is not None
        assert guess == drawn.token_id
        token_ids.append(guess)
        hidden = np.concatenate((hidden, outputs[-1:]))
    assert len(output.proposal) == 5


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_neither_drafts_nor_proposals_change_tokens_or_what_is_kept(
    loaded: tuple[str, CpuExecutor], params: SamplingParams
) -> None:
    """Rows with right, partly right and wrong drafts, with the module's own, and without any."""
    case, executor = loaded
    rng = random.Random(case)
    prompts = [prompt_of(case, index) for index in range(3)]
    plain = driver.build_executor(open_model(GOLDENS / case / "model"))
    texts = []
    for prompt in prompts:
        target, first = await start(plain, 7, prompt, params)
        texts.append(await driver.generate(plain, target, first, NUM_TOKENS + 10))
    plain.close()
    rounds = [await start(executor, i, prompt, params) for i, prompt in enumerate(prompts)]
    targets, said = [target for target, _ in rounds], [[first] for _, first in rounds]
    proposals: list[tuple[int, ...]] = [()] * 3
    while min(map(len, said)) < NUM_TOKENS:
        drafts = [
            rng.choice([list(proposal), text[len(tokens) :][: rng.randint(0, 4)], [5, 6], []])
            for proposal, text, tokens in zip(proposals, texts, said, strict=True)
        ]
        outputs = await run_round(
            executor, targets, [tokens[-1] for tokens in said], drafts, rng.randint(0, 5)
        )
        proposals = [output.proposal for output in outputs]
        for tokens, output in zip(said, outputs, strict=True):
            tokens += ids_of(output)
    for index, (tokens, text) in enumerate(zip(said, texts, strict=True)):
        assert tokens[: len(text)] == text[: len(tokens)]
        serial, first = await start(executor, 7, prompts[index], params)
        await mtp_driver.generate(executor, serial, first, len(tokens) - 1)
        assert draft_image(executor, targets[index]) == draft_image(executor, serial)


async def test_right_drafts_of_the_modules_own_are_found_by_the_next_round(
    loaded: tuple[str, CpuExecutor],
) -> None:
    """A proposal is a guess of what comes, drawn with the row's noise: what it is of the text is
    accepted to the token."""
    case, executor = loaded
    text = await text_of(executor, prompt_of(case))
    target, newest = await start(executor, 0, prompt_of(case))
    said, proposal = [newest], tuple[int, ...]()
    while len(said) < NUM_TOKENS - 6:
        coming = text[len(said) :]
        (output,) = await run_round(executor, [target], said[-1:], [proposal], 4)
        right = 0
        while right < len(proposal) and proposal[right] == coming[right]:
            right += 1
        assert ids_of(output) == coming[: right + 1]
        said += ids_of(output)
        proposal = output.proposal
        assert len(proposal) == 4


async def test_a_proposal_does_not_depend_on_the_batch(dense: CpuExecutor) -> None:
    prompts = [prompt_of(CASES[0], index) for index in range(3)]
    alone = []
    for prompt in prompts:
        target, first = await start(dense, 7, prompt)
        alone += await run_round(dense, [target], [first], [()], 5)
    rounds = [await start(dense, index, prompt) for index, prompt in enumerate(prompts)]
    together = await run_round(
        dense, [target for target, _ in rounds], [first for _, first in rounds], [()] * 3, 5
    )
    assert together == alone
    assert all(len(output.proposal) == 5 for output in alone)


async def test_longer_proposals_begin_like_shorter_ones(dense: CpuExecutor) -> None:
    prompt = prompt_of(CASES[0])
    found = []
    for num_proposed in range(6):
        target, first = await start(dense, num_proposed, prompt)
        (output,) = await run_round(dense, [target], [first], [()], num_proposed)
        found.append(output.proposal)
    assert found == [found[5][:length] for length in range(6)]


@pytest.mark.parametrize("chunks", [(1000,), (64,), (1,), (7,), (5, 64, 1)])
async def test_chunks_of_a_prompt_do_not_change_proposals(
    loaded: tuple[str, CpuExecutor], chunks: tuple[int, ...]
) -> None:
    case, executor = loaded
    prompt = load_prompts(case)["p65"].prompt
    found = []
    for index, sizes in enumerate([chunks, (len(prompt),)]):
        target, first = await start(executor, index, prompt, SamplingParams(), sizes)
        (output,) = await run_round(executor, [target], [first], [()], 5)
        found.append(output)
    assert found[0].proposal == found[1].proposal
    hidden = executor.memory.hidden
    ends = [driver.sequence(index).pages[:2] for index in (0, 1)]
    keys = executor.memory.draft_k_pages[0]
    flat = [keys[pages].reshape(-1, *keys.shape[2:])[: len(prompt) + 1] for pages in ends]
    assert_close(flat[0], flat[1], GOLDEN)
    assert np.abs(hidden[ROOT_SLOT]).max() == 0.0


async def test_replayed_inputs_leave_the_bits_of_decode_steps(
    loaded: tuple[str, CpuExecutor],
) -> None:
    case, executor = loaded
    prompt = prompt_of(case, 1)
    text = await text_of(executor, prompt)
    serial, first = await start(executor, 0, prompt)
    await mtp_driver.generate(executor, serial, first, 16)
    target, _ = await start(executor, 1, prompt)
    for size in (5, 11):
        done = target.frontier - len(prompt)
        part = text[done : done + size]
        row = dataclasses.replace(target.row(part, samples=False), is_replayed=True)
        await executor.prefill(row)
        target.advance(part)
    assert draft_image(executor, target) == draft_image(executor, serial)
    left = await run_round(executor, [serial], [text[16]], [()])
    assert await run_round(executor, [target], [text[16]], [()]) == left


async def test_scored_inputs_are_absorbed(dense: CpuExecutor) -> None:
    prompt = load_prompts(CASES[0])["p65"].prompt
    read, scored = driver.sequence(0, SAMPLED), driver.sequence(1, SAMPLED)
    await driver.prefill(dense, read, prompt, (64,))
    await driver.score(dense, scored, prompt, (64,))
    assert draft_image(dense, read) == draft_image(dense, scored)


async def test_what_is_behind_the_frontier_is_never_read(dense: CpuExecutor) -> None:
    """The provisional slot and the module's keys behind the frontier hold NaN before each round."""
    prompt = prompt_of(CASES[0])
    memory = dense.memory
    found = []
    for index, is_poisoned in ((0, False), (1, True)):
        target, newest = await start(dense, index, prompt)
        outputs: list[RowOutput] = []
        for _ in range(6):
            if is_poisoned:
                memory.hidden[target.row([0], samples=False).write_slot] = np.nan
                for ordinal in range(target.frontier, target.frontier + 12):
                    page = target.pages[ordinal // PAGE_TOKENS]
                    memory.draft_k_pages[0][page, ordinal % PAGE_TOKENS] = np.nan
                    memory.draft_v_pages[0][page, ordinal % PAGE_TOKENS] = np.nan
            draft = [] if not outputs else outputs[-1].proposal
            outputs += await run_round(dense, [target], [newest], [draft], 4)
            newest = driver.taken(outputs[-1]).token_id
        found.append(outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize(("bent", "delta"), [(False, 0), (True, -9)])
async def test_the_first_step_of_a_chain_is_the_pair_that_is_absorbed_next(
    dense: CpuExecutor, bent: bool, delta: int
) -> None:
    """Ordinals and rotary positions of a chain, behind right and wrong drafts."""
    prompt = load_prompts(CASES[0])["p65"].prompt
    positions = np.tile(np.arange(len(prompt), dtype=np.int32), (3, 1)) if bent else None
    keys = dense.memory.draft_k_pages[0]

    async def fed(index: int) -> tuple[DrivenSequence, int]:
        target = driver.sequence(index, SAMPLED, positions=positions, rope_delta=delta)
        output = await driver.prefill(dense, target, prompt, (64,))
        return target, driver.taken(output).token_id

    serial, first = await fed(1)
    text = [first]
    for _ in range(5):
        text += ids_of((await run_round(dense, [serial], text[-1:], [()], 0))[0])
    for num_right in range(4):
        target, _ = await fed(0)
        await run_round(dense, [target], text[:1], [()], 0)
        draft = [*text[2 : 2 + num_right], *[0] * (3 - num_right)]
        (output,) = await run_round(dense, [target], text[1:2], [draft], 1)
        assert len(output.drafts) == num_right
        page, place = divmod(target.frontier, PAGE_TOKENS)
        chained = keys[target.pages[page], place].copy()
        await run_round(dense, [target], [driver.taken(output).token_id], [()], 0)
        assert_close(chained, keys[target.pages[page], place], GOLDEN)


async def test_a_chain_ends_where_the_page_table_does(dense: CpuExecutor) -> None:
    prompt = (load_prompts(CASES[0])["p65"].prompt * 2)[: PAGE_TOKENS - 3]
    target, first = await start(dense, 0, prompt)
    row = mtp_driver.asking_row(target, first, (), 5)
    short = dataclasses.replace(row, page_table=row.page_table[:1])
    (full,), (cut,) = await dense.verify((row,)), await dense.verify((short,))
    assert len(full.proposal) == 5
    # Its newest token lies at ordinal 62: a step there and one at 63.
    assert cut.proposal == full.proposal[:2]
    assert cut.token == full.token
    target.advance([first])
    (output,) = await run_round(dense, [target], [driver.taken(full).token_id], [()], 0)
    row = mtp_driver.asking_row(target, driver.taken(output).token_id, (), 5)
    short = dataclasses.replace(row, page_table=row.page_table[:1])
    assert (await dense.verify((short,)))[0].proposal == ()


async def test_rows_that_choose_nothing_propose_nothing(dense: CpuExecutor) -> None:
    target, first = await start(dense, 0, prompt_of(CASES[0]))
    row = mtp_driver.asking_row(target, first, (), 3)
    assert row.sample is not None
    dead = dataclasses.replace(row, sample=driver.with_mask(row.sample, FixedMask(())))
    fed = dataclasses.replace(row, sample=None, num_proposed=0)
    for asked, is_dead_end in ((dead, True), (fed, False)):
        (output,) = await dense.verify((asked,))
        assert (output.token, output.proposal) == (None, ())
        assert output.is_dead_end == is_dead_end


async def test_a_proposal_knows_neither_counts_nor_bias_nor_masks(dense: CpuExecutor) -> None:
    """Only the choice does; and no logprobs are made of guesses."""
    prompt = prompt_of(CASES[0])
    target, first = await start(dense, 0, prompt)
    row = mtp_driver.asking_row(target, first, (), 4)
    (plain,) = await dense.verify((row,))
    chosen = driver.taken(plain).token_id
    params = dataclasses.replace(
        SAMPLED,
        logit_bias=tuple((token_id, -50.0) for token_id in plain.proposal),
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        top_logprobs=3,
    )
    sample = driver.sample_row(
        len(prompt) + 1, params, generated=plain.proposal * 3, prompt=plain.proposal
    )
    masked = driver.with_mask(sample, FixedMask((chosen,)))
    (output,) = await dense.verify((dataclasses.replace(row, sample=masked),))
    assert driver.taken(output).token_id == chosen
    assert output.proposal == plain.proposal


async def test_weights_that_are_not_numbers_end_a_proposal(tmp_path: Path) -> None:
    source = open_model(GOLDENS / CASES[0] / "model")
    weights = mtp_driver.read_all(source)
    weights["mtp.norm"] = np.full_like(weights["mtp.norm"], np.nan)
    executor = mtp_driver.build_executor(source, weights)
    target, first = await start(executor, 0, prompt_of(CASES[0]))
    (output,) = await run_round(executor, [target], [first], [()], 4)
    executor.close()
    assert (len(output.tokens), output.proposal) == (1, ())


async def test_copies_and_moves_carry_what_the_module_keeps(dense: CpuExecutor) -> None:
    """A page copied by a unit, and pages and StateImage over the host."""
    prompt = load_prompts(CASES[0])["p65"].prompt
    text = await text_of(dense, prompt)
    target, first = await start(dense, 0, prompt)
    left = await run_round(dense, [target], [first], [()], 4)
    target, _ = await start(dense, 1, prompt)
    tail = int(target.pages[1])
    other = driver.sequence(2, SAMPLED)
    other.pages = np.array([target.pages[0], other.pages[0], other.pages[1]], np.int32)
    other.tokens, other.slot = list(target.tokens), target.slot
    row = mtp_driver.asking_row(other, first, (), 4)
    row = dataclasses.replace(row, copies=((tail, int(other.pages[1])),))
    assert await dense.verify((row,)) == tuple(left)
    other.slot = row.write_slot
    other.tokens.append(first)

    kept = draft_image(dense, other)
    blocks = -(-dense.slot_bytes // dense.page_bytes)
    state_blocks = tuple(range(10, 10 + blocks))
    pages = tuple((int(page), index) for index, page in enumerate(other.pages[:2]))
    await dense.save(Move(pages=pages, slot=other.slot, state_blocks=state_blocks))
    moved = driver.sequence(3, SAMPLED)
    moved.tokens, moved.slot = list(other.tokens), moved.row([0], samples=False).write_slot
    pages = tuple((int(page), index) for index, page in enumerate(moved.pages[:2]))
    await dense.load(Move(pages=pages, slot=moved.slot, state_blocks=state_blocks))
    assert draft_image(dense, moved) == kept
    again = await run_round(dense, [moved], [text[1]], [()], 4)
    assert again == await run_round(dense, [other], [text[1]], [()], 4)


async def test_plain_decode_units_are_refused(dense: CpuExecutor) -> None:
    """The module would not have seen their tokens."""
    target, first = await start(dense, 0, prompt_of(CASES[0]))
    with pytest.raises(DeviceError, match="a draft model follows verify units"):
        await dense.decode((target.row([first], samples=True),))
    assert dense.has_draft_model


async def test_a_model_of_attention_alone_has_a_state_for_its_module(tmp_path: Path) -> None:
    spec = CheckpointSpec(
        num_mtp_layers=1, num_layers=2, layer_types=("full_attention",) * 2, vocab_size=SMALL_VOCAB
    )
    source = open_model(write_checkpoint(tmp_path / "model", spec))
    executor = mtp_driver.build_executor(source)
    assert executor.slot_bytes == 4 * spec.hidden_size
    prompt = [(7 * index) % SMALL_VOCAB for index in range(40)]
    text = await text_of(executor, prompt)
    target, first = await start(executor, 0, prompt)
    (output,) = await run_round(executor, [target], [first], [text[1:3]], 3)
    assert ids_of(output) == text[1:4]
    assert len(output.proposal) == 3
    executor.close()


def test_shapes_and_weights_are_checked() -> None:
    source = open_model(GOLDENS / CASES[0] / "model")
    att = source.config.attention
    assert mtp_shape(source.config) == DraftShape(
        (KvShape(att.num_kv_heads, att.head_dim),), source.config.hidden_size
    )
    for count in (0, 2):
        with pytest.raises(InvariantError, match=f"module of {count} layers"):
            mtp_shape(dataclasses.replace(source.config, num_mtp_layers=count))
    weights = mtp_driver.read_all(source)
    del weights["mtp.fc"]
    with pytest.raises(InvariantError, match=r"weight mtp\.fc is missing"):
        MtpModel(source.config, weights)
