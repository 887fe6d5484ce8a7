"""Rounds with drafts on the CPU executor: the tokens and the bits of plain decode steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS
from ninfer.convert.source import open_model
from ninfer.program.executors.cpu import CpuExecutor
from tests.e2e.test_goldens import CASES, GOLDENS, load_prompts
from tests.helpers import executor_driver as driver
from tests.helpers.executor_driver import DrivenSequence
from tests.helpers.fixed_mask import FixedMask

NUM_TOKENS = 28
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, seed=5)
HYBRID = "qwen3_5-dense"
SMALL_VOCAB = 300
"""Every model here has these ids."""
VOCAB_SIZE = open_model(GOLDENS / HYBRID / "model").config.vocab_size


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, CpuExecutor]]:
    executor = driver.build_executor(open_model(GOLDENS / request.param / "model"))
    yield request.param, executor
    executor.close()


@pytest.fixture(scope="module")
def hybrid() -> Iterator[CpuExecutor]:
    executor = driver.build_executor(open_model(GOLDENS / HYBRID / "model"))
    yield executor
    executor.close()


async def start(
    executor: CpuExecutor, index: int, prompt: Sequence[int], params: SamplingParams
) -> tuple[DrivenSequence, int]:
    target = driver.sequence(index, params)
    output = await driver.prefill(executor, target, prompt, (64,))
    return target, driver.taken(output).token_id


async def plain(
    executor: CpuExecutor, index: int, prompt: Sequence[int], params: SamplingParams
) -> list[int]:
    target, first = await start(executor, index, prompt, params)
    return await driver.generate(executor, target, first, NUM_TOKENS)


def image(executor: CpuExecutor, target: DrivenSequence) -> list[bytes]:
    """All bits of State and KV of a sequence."""
    memory, stop = executor.memory, target.frontier
    pages = target.pages[: -(-stop // PAGE_TOKENS)]
    shape = (memory.k_pages.shape[0], -1, *memory.k_pages.shape[3:])
    keys = memory.k_pages[:, pages].reshape(shape)[:, :stop]
    values = memory.v_pages[:, pages].reshape(shape)[:, :stop]
    states = (memory.windows[target.slot], memory.states[target.slot])
    return [array.tobytes() for array in (keys, values, *states)]


def draft_for(rng: random.Random, coming: Sequence[int]) -> list[int]:
    """Some right tokens, then perhaps wrong ones."""
    size = rng.randint(0, MAX_DRAFT_TOKENS)
    draft = list(coming[:size])
    right = rng.randint(0, size)
    return [
        token if place < right else rng.randrange(SMALL_VOCAB) for place, token in enumerate(draft)
    ]


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_random_drafts_change_neither_tokens_nor_state(
    loaded: tuple[str, CpuExecutor], params: SamplingParams
) -> None:
    case, executor = loaded
    rng = random.Random(case)
    prompts = [golden.prompt for golden in load_prompts(case).values()][:3]
    texts = [await plain(executor, 7, prompt, params) for prompt in prompts]
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


@pytest.mark.parametrize("num_right", range(MAX_DRAFT_TOKENS + 1))
async def test_just_the_right_beginning_of_a_draft_is_accepted(
    hybrid: CpuExecutor, num_right: int
) -> None:
    prompt = load_prompts(HYBRID)["p7"].prompt
    text = await plain(hybrid, 7, prompt, SAMPLED)
    wrong = [(token + 1) % VOCAB_SIZE for token in text]
    draft = text[1 : 1 + num_right] + wrong[1 + num_right : 1 + MAX_DRAFT_TOKENS]
    target, first = await start(hybrid, 0, prompt, SAMPLED)
    (produced,) = await driver.verify(hybrid, [target], [first], [draft])
    assert produced == text[1 : 2 + num_right]


async def test_what_stands_behind_a_right_draft_is_never_read(hybrid: CpuExecutor) -> None:
    """The provisional slot and the KV behind the frontier hold NaN before each round."""
    prompt = load_prompts(HYBRID)["p7"].prompt
    text = await plain(hybrid, 7, prompt, SAMPLED)
    target, newest = await start(hybrid, 0, prompt, SAMPLED)
    said = [newest]
    while len(said) < 20:
        memory, stop = hybrid.memory, target.frontier
        memory.states[target.row([0], samples=False).write_slot] = np.nan
        memory.windows[target.row([0], samples=False).write_slot] = np.nan
        for ordinal in range(stop, stop + 9):
            page = target.pages[ordinal // PAGE_TOKENS]
            memory.k_pages[:, page, ordinal % PAGE_TOKENS] = np.nan
            memory.v_pages[:, page, ordinal % PAGE_TOKENS] = np.nan
        draft = [*text[len(said) : len(said) + 2], 0, 0]
        (more,) = await driver.verify(hybrid, [target], said[-1:], [draft])
        said += more
    assert said == text[: len(said)]


async def test_a_failing_choice_behind_a_right_draft_is_left_to_the_next_step(
    hybrid: CpuExecutor,
) -> None:
    prompt = load_prompts(HYBRID)["p7"].prompt
    text = await plain(hybrid, 7, prompt, SAMPLED)
    target, first = await start(hybrid, 0, prompt, SAMPLED)
    row = driver.draft_row(target, first, text[1:5])
    dead = dataclasses.replace(row.checks[2], mask=FixedMask(()))
    (output,) = await hybrid.verify(
        (dataclasses.replace(row, checks=(*row.checks[:2], dead, row.checks[3])),)
    )
    assert [token.token_id for token in output.tokens] == text[1:3]
    assert not output.is_dead_end
    target.advance(row.token_ids[:2].tolist())
    serial, first = await start(hybrid, 7, prompt, SAMPLED)
    await driver.generate(hybrid, serial, first, 3)
    assert image(hybrid, target) == image(hybrid, serial)
    (output,) = await hybrid.verify((dataclasses.replace(row, checks=(dead, *row.checks[1:])),))
    assert (output.tokens, output.is_dead_end) == ((), True)


async def test_masks_are_filled_as_far_as_a_draft_is_right(hybrid: CpuExecutor) -> None:
    prompt = load_prompts(HYBRID)["p7"].prompt
    text = await plain(hybrid, 7, prompt, SAMPLED)
    target, first = await start(hybrid, 0, prompt, SAMPLED)
    row = driver.draft_row(target, first, [*text[1:3], (text[3] + 1) % VOCAB_SIZE, text[4]])
    masks = [FixedMask(tuple(range(VOCAB_SIZE))) for _ in range(5)]
    samples = [
        driver.with_mask(sample, mask)
        for sample, mask in zip((*row.checks, driver.sample_row(0, SAMPLED)), masks, strict=True)
    ]
    row = dataclasses.replace(row, checks=tuple(samples[:4]), sample=samples[4])
    (output,) = await hybrid.verify((row,))
    assert [token.token_id for token in output.tokens] == text[1:4]
    assert [mask.num_fills for mask in masks] == [1, 1, 1, 0, 0]
