"""Rounds with drafts on the device: the tokens and the bits of plain decode steps; MTP as on the
CPU. What is queued for them, without a device."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.convert.source import open_model
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_mtp import MtpModel
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_window import widths
from ninfer.program.weight_reader import read_weights
from tests.e2e.test_goldens import load_prompts
from tests.helpers import executor_driver as driver
from tests.helpers.cuda_models import SMALL_OPTIONS, cuda_executor
from tests.helpers.draft_rounds import (
    NUM_TOKENS,
    SAMPLED,
    SMALL_VOCAB,
    check_going_back,
    check_rounds_against_steps,
    draft_for,
    image,
    start,
)
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fixed_mask import FixedMask
from tests.helpers.model_paths import DEMO_MODEL, golden_model
from tests.program.executors.test_cuda import MOE, OPTIONS, build, small_config

HYBRID = "qwen3_5-dense"


@pytest.mark.parametrize("spec", ["ngram", "mtp"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("mixers", ["GGGA", "AA", "GG"])
async def test_every_launch_of_a_round_meets_its_contract(
    spec: str, kv_dtype: str, moe: Any, mixers: str
) -> None:
    cuda = FakeCuda()
    config = dataclasses.replace(small_config(mixers, moe=moe), num_mtp_layers=1)
    options = dataclasses.replace(OPTIONS, spec=spec, draft_tokens=4, kv_dtype=kv_dtype)
    executor = build(cuda, config, options).executor
    allocations, pinned = dict(cuda.sizes), len(cuda.pinned)
    play(cuda, executor, accepted=[1, 0, 0])
    targets = [driver.sequence(index) for index in range(3)]
    for target, size in zip(targets, (5, 17, 60), strict=True):
        await executor.prefill(target.row([1] * size, samples=True))
        target.advance([1] * size)
    rows = [
        driver.draft_row(target, 7, [3] * size)
        for target, size in zip(targets, (3, 0, 1), strict=True)
    ]
    rows = [dataclasses.replace(row, num_proposed=3) for row in rows]
    for chosen in (rows, rows[:1], [dataclasses.replace(row, num_proposed=0) for row in rows]):
        asked = tuple(chosen)
        outputs = await executor.verify(asked)
        assert [len(output.tokens) for output in outputs] == [2, 1, 1][: len(chosen)]
        await executor.rewind(asked, [1] * len(asked))
    assert cuda.sizes == allocations, "running allocates nothing"
    assert len(cuda.pinned) == pinned


def play(cuda: FakeCuda, executor: CudaExecutor, accepted: list[int]) -> None:
    """Let the device choose token 3 everywhere and accept so many drafts of each row."""
    rounds = executor.workspace.rounds
    assert rounds is not None

    def replay(graph: list[Any]) -> None:
        match = rounds.match.accepted
        cuda.memory(match.address, 4 * len(accepted)).view(np.int32)[:] = accepted
        launches = [launch for launch in cuda.launches(graph) if launch.family == "sampling"]
        for launch in launches:
            count = launch.grid[1]
            for name, value in (("token_ids", 3), ("is_finite", 1)):
                address = int(launch.arguments[name])
                cuda.memory(address, 4 * count).view(np.int32)[:] = value

    cuda.on_replay = replay


async def test_padding_is_told_from_inputs() -> None:
    cuda = FakeCuda()
    options = dataclasses.replace(OPTIONS, spec="ngram", draft_tokens=4)
    executor = build(cuda, small_config(), options).executor
    play(cuda, executor, accepted=[0, 0, 0])
    targets = [driver.sequence(index) for index in range(2)]
    for target in targets:
        target.tokens, target.slot = [0] * 63, 1 + 2 * target.index
    rows = (
        driver.draft_row(targets[0], 7, [8, 9]),
        dataclasses.replace(
            targets[1].row([5], samples=True), positions=np.full((3, 1), 40, np.int32)
        ),
    )
    await executor.verify(rows)
    window = executor.rounds.window((2, 3))
    assert cuda.read(window.unit.token_ids).tolist() == [7, 8, 9, 5, 5, 5]
    assert cuda.read(window.unit.ordinals).tolist() == [63, 64, 65, 63, -1, -1]
    assert cuda.read(window.unit.rope_positions).tolist() == [[63, 64, 65, 40, 41, 42]] * 3
    assert cuda.read(window.unit.column_rows).tolist() == [0, 0, 0, 1, 1, 1]
    assert cuda.read(window.unit.row_starts).tolist() == [0, 3, 6]
    assert window.unit.row_ends is not None
    assert cuda.read(window.unit.row_ends).tolist() == [3, 4]
    assert cuda.read(window.counts).tolist() == [3, 1]
    assert cuda.read(window.limits).tolist() == [128, 64]
    assert cuda.read(window.unit.read_slots).tolist() == [1, 3]
    assert cuda.read(window.unit.write_slots).tolist() == [2, 4]
    assert cuda.read(window.unit.page_tables)[0, :2].tolist() == targets[0].pages[:2].tolist()


def test_what_is_said_of_rows_lies_in_one_place_for_all_widths() -> None:
    """Graphs of guesses are captured for rows alone and follow rounds of any width."""
    options = dataclasses.replace(OPTIONS, spec="ngram", draft_tokens=15, max_concurrency=8)
    executor = build(FakeCuda(), small_config(), options).executor
    for num_rows in range(1, 9):
        found = set()
        for num_columns in widths(15):
            window = executor.rounds.window((num_rows, num_columns))
            unit = window.unit
            rows = (window.counts, window.limits, window.proposed, unit.read_slots)
            found.add(tuple(part.address for part in (*rows, unit.write_slots, unit.page_tables)))
        assert len(found) == 1


async def test_a_round_is_folded_anew_behind_fewer_inputs() -> None:
    cuda = FakeCuda()
    options = dataclasses.replace(OPTIONS, spec="ngram", draft_tokens=4)
    executor = build(cuda, small_config(), options).executor
    play(cuda, executor, accepted=[2, 0])
    rows = tuple(
        driver.draft_row(driver.sequence(index), 7, [3] * size) for index, size in ((0, 3), (1, 1))
    )
    await executor.verify(rows)
    cuda.queued.clear()
    await executor.rewind(rows, [2, 1])
    (fold,) = cuda.launches()
    assert (fold.family, fold.is_programmatic) == ("gdn_fold", False)
    match = executor.workspace.rounds.match.outputs(2, 4)  # type: ignore[union-attr]
    assert cuda.read(match.row_ends).tolist() == [2, 5]
    assert cuda.read(match.kept_columns).tolist() == [1, 4]
    with pytest.raises(InvariantError, match="not those of the newest round"):
        await executor.rewind(rows[:1], [1])


async def test_a_device_that_accepts_too_much_is_found_out() -> None:
    cuda = FakeCuda()
    options = dataclasses.replace(OPTIONS, spec="ngram", draft_tokens=4)
    executor = build(cuda, small_config(), options).executor
    play(cuda, executor, accepted=[9, 0, 0])
    with pytest.raises(InvariantError, match="the device accepts 9 of 2 drafts"):
        await executor.verify((driver.draft_row(driver.sequence(), 7, [8, 9]),))


def test_widths_end_with_the_longest_draft() -> None:
    assert widths(1) == (1, 2)
    assert widths(3) == (1, 2, 3, 4)
    assert widths(8) == (1, 2, 3, 4, 5, 6, 8, 9)


DATA = Path(__file__).parents[2] / "data"
CASES = ["qwen3_5-dense", "qwen3_5-moe", "qwen3-dense"]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, CudaExecutor]]:
    options = dataclasses.replace(SMALL_OPTIONS, spec="ngram", draft_tokens=MAX_DRAFT_TOKENS)
    with cuda_executor(open_model(golden_model(request.param)), options) as opened:
        yield request.param, opened


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_random_drafts_change_neither_tokens_nor_state(
    loaded: tuple[str, CudaExecutor], params: SamplingParams
) -> None:
    case, executor = loaded
    rng = random.Random(case)
    prompts = [golden.prompt for golden in load_prompts(case).values()][:3]
    texts = []
    for prompt in prompts:
        serial, first = await start(executor, 7, prompt, params)
        texts.append(await driver.generate(executor, serial, first, NUM_TOKENS))
    rounds = [await start(executor, i, prompt, params) for i, prompt in enumerate(prompts)]
    targets = [target for target, _ in rounds]
    said = [[first] for _, first in rounds]
    while min(map(len, said)) < NUM_TOKENS - MAX_DRAFT_TOKENS - 1:
        newest = [tokens[-1] for tokens in said]
        drafts = [
            draft_for(rng, text[len(tokens) :]) for text, tokens in zip(texts, said, strict=True)
        ]
        for tokens, more in zip(
            said, await driver.verify(executor, targets, newest, drafts), strict=True
        ):
            tokens += more
    for index, (tokens, text) in enumerate(zip(said, texts, strict=True)):
        num_said = min(len(tokens), NUM_TOKENS)
        assert tokens[:num_said] == text[:num_said]
        serial, first = await start(executor, 7, prompts[index], params)
        assert await driver.generate(executor, serial, first, len(tokens)) == tokens
        assert image(executor, targets[index]) == image(executor, serial)


@pytest.mark.gpu
async def test_a_failing_choice_behind_a_right_draft_is_left_to_the_next_step(
    loaded: tuple[str, CudaExecutor],
) -> None:
    case, executor = loaded
    prompt = load_prompts(case)["p7"].prompt
    serial, first = await start(executor, 7, prompt, SAMPLED)
    text = await driver.generate(executor, serial, first, NUM_TOKENS)
    target, first = await start(executor, 0, prompt, SAMPLED)
    row = driver.draft_row(target, first, text[1:5])
    dead = dataclasses.replace(row.checks[2], mask=FixedMask(()))
    (output,) = await executor.verify(
        (dataclasses.replace(row, checks=(*row.checks[:2], dead, row.checks[3])),)
    )
    assert [token.token_id for token in output.tokens] == text[1:3]
    target.advance(row.token_ids[:2].tolist())
    serial, first = await start(executor, 7, prompt, SAMPLED)
    await driver.generate(executor, serial, first, 3)
    assert image(executor, target) == image(executor, serial)
    (output,) = await executor.verify((dataclasses.replace(row, checks=(dead, *row.checks[1:])),))
    assert (output.tokens, output.is_dead_end) == ((), True)


@pytest.fixture(scope="module")
def mtp_device() -> Iterator[CudaExecutor]:
    options = dataclasses.replace(SMALL_OPTIONS, spec="mtp", draft_tokens=3)
    with cuda_executor(open_model(DEMO_MODEL), options) as opened:
        yield opened


def mtp_on_cpu() -> CpuExecutor:
    source = open_model(DEMO_MODEL)
    weights = {
        name: np.array(array)
        for name, array in read_weights(source, lambda *_: None, ("text", "mtp"))
    }
    capacity: Capacity = dataclasses.replace(
        driver.default_capacity(), max_draft_tokens=3, has_draft_model=True
    )
    draft = MtpModel(source.config, weights)
    return CpuExecutor(source.config, weights, capacity, num_threads=1, draft_model=draft)


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_proposals_are_those_of_the_cpu(
    mtp_device: CudaExecutor, params: SamplingParams
) -> None:
    """Teacher-forced over a held-out text, behind a prompt in chunks of both regimes."""
    tokens = heldout_tokens()
    cpu = mtp_on_cpu()
    try:
        same, total = [0, 0, 0], 0
        cpu_target, device_target = driver.sequence(1, params), driver.sequence(1, params)
        for executor, target in ((cpu, cpu_target), (mtp_device, device_target)):
            await driver.prefill(executor, target, tokens[:100], (64, 7, 29))
        for ordinal in range(100, 240):
            found = []
            for executor, target in ((cpu, cpu_target), (mtp_device, device_target)):
                row = dataclasses.replace(
                    target.row([tokens[ordinal]], samples=True), num_proposed=3
                )
                (output,) = await executor.verify((row,))
                driver.taken(output)
                found.append((output.token, output.proposal))
                target.advance([tokens[ordinal]])
            if found[0][0] == found[1][0]:
                total += 1
                for place, guesses in enumerate(zip(found[0][1], found[1][1], strict=True)):
                    same[place] += guesses[0] == guesses[1]
        print(f"of {total} proposals {same} tokens are the CPU's, by place")
        assert total > 100
        assert same[0] >= 0.97 * total
        assert sum(same) >= 0.9 * 3 * total
    finally:
        cpu.close()


def heldout_tokens() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = (DATA / "heldout.txt").read_text()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.gpu
async def test_rounds_with_mtp_leave_the_bits_of_steps(mtp_device: CudaExecutor) -> None:
    """Also of the draft model's keys below the frontier, whatever was drafted."""
    rng = random.Random(4)
    prompt = [rng.randrange(SMALL_VOCAB) for _ in range(70)]
    serial, first = await start(mtp_device, 7, prompt, SAMPLED)
    text = [first]
    while len(text) < NUM_TOKENS:
        (more,) = await driver.verify(mtp_device, [serial], text[-1:], [[]])
        text += more
    target, newest = await start(mtp_device, 0, prompt, SAMPLED)
    said, proposed = [newest], 0
    while len(said) < NUM_TOKENS - 4:
        draft = draft_for(rng, text[len(said) :])[:3]
        row = dataclasses.replace(driver.draft_row(target, said[-1], draft), num_proposed=3)
        (output,) = await mtp_device.verify((row,))
        more = [token.token_id for token in output.tokens]
        proposed += len(output.proposal)
        target.advance(row.token_ids[: len(more)].tolist())
        said += more
    assert said == text[: len(said)]
    assert proposed > 20
    serial, newest = await start(mtp_device, 7, prompt, SAMPLED)
    for token in said[:-1]:
        await driver.verify(mtp_device, [serial], [token], [[]])
    assert serial.frontier == target.frontier
    assert image(mtp_device, target) == image(mtp_device, serial)


@pytest.mark.gpu
async def test_rounds_go_back_to_the_bits_of_fewer_steps(loaded: tuple[str, CudaExecutor]) -> None:
    await check_going_back(loaded[1])


@pytest.mark.gpu
async def test_rounds_with_mtp_go_back_to_the_bits_of_fewer_steps(mtp_device: CudaExecutor) -> None:
    await check_going_back(mtp_device)


@pytest.mark.gpu
async def test_rounds_with_mtp_leave_the_bits_and_guesses_of_steps_in_any_batch() -> None:
    options = dataclasses.replace(SMALL_OPTIONS, spec="mtp", draft_tokens=MAX_DRAFT_TOKENS)
    with cuda_executor(open_model(DEMO_MODEL), options) as executor:
        await check_rounds_against_steps(executor, MAX_DRAFT_TOKENS)
