"""Rounds with drafts on a device against steps of one token: tokens, proposals, bits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import UnitRow
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_tensor import DeviceTensor
from tests.helpers import executor_driver as driver
from tests.helpers.executor_driver import DrivenSequence

NUM_TOKENS: Final = 44
SMALL_VOCAB: Final = 300
SAMPLED: Final = SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, seed=5)
PROMPT_SIZES: Final = (70, 33, 5, 1, 64, 100, 17)


def read(executor: CudaExecutor, tensor: DeviceTensor) -> np.ndarray[Any, Any]:
    """A dense tensor's contents."""
    data = np.empty(tensor.shape, tensor.dtype)
    executor.driver.download(data, tensor.address)
    executor.driver.synchronize()
    return data


def image(executor: CudaExecutor, target: DrivenSequence) -> list[bytes]:
    """All bits of State and KV of a sequence."""
    memory, stop = executor.workspace.memory, target.frontier
    found = []
    for layer in memory.kv:
        pages = np.stack([read(executor, layer.pages.index(int(page))) for page in target.pages])
        tokens = np.moveaxis(pages, 3, 1).reshape(-1, *pages.shape[1:3], pages.shape[4])
        found.append(tokens[:stop].tobytes())
    for plane in (memory.conv, memory.recurrent, memory.hidden):
        if plane is not None:
            found.append(read(executor, plane.index(target.slot)).tobytes())
    return found


async def start(
    executor: CudaExecutor | CpuExecutor, index: int, prompt: Sequence[int], params: SamplingParams
) -> tuple[DrivenSequence, int]:
    target = driver.sequence(index, params)
    output = await driver.prefill(executor, target, prompt, (64,))
    return target, driver.taken(output).token_id


def draft_for(rng: random.Random, coming: Sequence[int]) -> list[int]:
    size = rng.randint(0, MAX_DRAFT_TOKENS)
    draft, right = list(coming[:size]), rng.randint(0, size)
    return [
        token if place < right else rng.randrange(SMALL_VOCAB) for place, token in enumerate(draft)
    ]


async def check_rounds_against_steps(
    executor: CudaExecutor, num_proposed: int, vocab_size: int = SMALL_VOCAB
) -> None:
    """Seven rows with drafts of all lengths: their tokens, what is proposed behind them, and the
    bits of State and KV, the draft model's too, are those of a row that goes alone, token by
    token. So guesses depend neither on mates, nor on what was wrong before, nor on how wide rounds
    are."""
    rng = random.Random(4)
    prompts = [[rng.randrange(vocab_size) for _ in range(size)] for size in PROMPT_SIZES]
    alone = []
    for prompt in prompts:
        serial, first = await start(executor, 7, prompt, SAMPLED)
        alone.append(await _steps(executor, serial, first, num_proposed))
    begun = [await start(executor, i, prompt, SAMPLED) for i, prompt in enumerate(prompts)]
    targets, said = [target for target, _ in begun], [[first] for _, first in begun]
    while min(map(len, said)) < NUM_TOKENS - num_proposed - 1:
        rows = [
            _asking(
                driver.draft_row(
                    target, tokens[-1], draft_for(rng, text[len(tokens) :])[:num_proposed]
                ),
                target,
                num_proposed,
            )
            for target, tokens, (text, _) in zip(targets, said, alone, strict=True)
        ]
        outputs = await executor.verify(tuple(rows))
        for target, tokens, row, output in zip(targets, said, rows, outputs, strict=True):
            more = [token.token_id for token in output.tokens]
            target.advance(row.token_ids[: len(more)].tolist())
            tokens += more
        for tokens, output, (text, proposals) in zip(said, outputs, alone, strict=True):
            assert tokens[:NUM_TOKENS] == text[: len(tokens)]
            if len(tokens) <= NUM_TOKENS:
                assert output.proposal == proposals[len(tokens)]
    for target, prompt, tokens in zip(targets, prompts, said, strict=True):
        serial, _ = await start(executor, 7, prompt, SAMPLED)
        for token in tokens[:-1]:
            await driver.verify(executor, [serial], [token], [[]])
        assert serial.frontier == target.frontier
        assert image(executor, target) == image(executor, serial)


async def check_going_back(executor: CudaExecutor) -> None:
    """A round of rows that are all right, gone back behind 1 .. 4 of their inputs, leaves the bits
    of as many steps; the last row keeps all."""
    prompts = [[index + 5] * size for index, size in enumerate((9, 64, 70, 3))]
    texts = []
    for prompt in prompts:
        serial, first = await start(executor, 7, prompt, SAMPLED)
        texts.append((await _steps(executor, serial, first, 0))[0])
    begun = [await start(executor, i, prompt, SAMPLED) for i, prompt in enumerate(prompts)]
    targets = [target for target, _ in begun]
    rows = tuple(
        _asking(driver.draft_row(target, text[0], text[1:4]), target, 0)
        for target, text in zip(targets, texts, strict=True)
    )
    outputs = await executor.verify(rows)
    assert [len(output.tokens) for output in outputs] == [4] * 4
    await executor.rewind(rows, (1, 2, 3, 4))
    for count, (target, prompt, text) in enumerate(
        zip(targets, prompts, texts, strict=True), start=1
    ):
        target.advance(text[:count])
        serial, _ = await start(executor, 7, prompt, SAMPLED)
        for token in text[:count]:
            await driver.verify(executor, [serial], [token], [[]])
        assert image(executor, target) == image(executor, serial)


async def _steps(
    executor: CudaExecutor, target: DrivenSequence, first: int, count: int
) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The text, one token a round, and the proposals behind its first n tokens."""
    text, proposals = [first], dict[int, tuple[int, ...]]()
    while len(text) < NUM_TOKENS:
        row = _asking(target.row(text[-1:], samples=True), target, count)
        (output,) = await executor.verify((row,))
        target.advance(text[-1:])
        text.append(driver.taken(output).token_id)
        proposals[len(text)] = output.proposal
    return text, proposals


def _asking(row: UnitRow, target: DrivenSequence, count: int) -> UnitRow:
    """With room for all that is proposed."""
    return dataclasses.replace(row, num_proposed=count, page_table=target.pages)
