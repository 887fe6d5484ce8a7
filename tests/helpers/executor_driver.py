"""Sequences on a bare executor: pages and slots as a Program would give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ninfer.contract.arrays import Float32Array, IntArray
from ninfer.contract.masks import TokenMask
from ninfer.contract.model import ModelSource
from ninfer.contract.sampling import GeneratedToken, PromptScores, SamplingParams
from ninfer.contract.units import (
    PAGE_TOKENS,
    ROOT_SLOT,
    Capacity,
    Executor,
    RowOutput,
    SampleRow,
    ScoreRow,
    UnitRow,
)
from ninfer.ops import prompt_logprobs
from ninfer.program.executors.cpu import CpuExecutor

GREEDY = SamplingParams()
MAX_SEQUENCES = 8
PAGES_PER_SEQUENCE = 8


def build_executor(source: ModelSource) -> CpuExecutor:
    """Room for MAX_SEQUENCES sequences of PAGES_PER_SEQUENCE pages.

    One thread: these models gain nothing from more, and lose much on a busy machine.
    """
    weights = {item.name: array for item, array in source.read_float32()}
    return CpuExecutor(source.config, weights, default_capacity(), num_threads=1)


def default_capacity() -> Capacity:
    return Capacity(
        max_concurrency=MAX_SEQUENCES,
        max_context=PAGES_PER_SEQUENCE * PAGE_TOKENS,
        num_pages=MAX_SEQUENCES * PAGES_PER_SEQUENCE,
        num_slots=1 + 2 * MAX_SEQUENCES,
        prefill_chunk=256,
        num_host_blocks=64,
    )


def sample_row(
    position: int,
    params: SamplingParams = GREEDY,
    *,
    generated: Sequence[int] = (),
    prompt: Sequence[int] = (),
    suppressed: tuple[int, ...] = (),
) -> SampleRow:
    """A SampleRow from plain token lists."""
    ids, counts = np.unique(np.array(generated, np.int32), return_counts=True)
    return SampleRow(
        params=params,
        position=position,
        generated_ids=ids.astype(np.int32),
        generated_counts=counts.astype(np.int32),
        prompt_ids=np.unique(np.array(prompt, np.int32)).astype(np.int32),
        suppressed_ids=suppressed,
    )


@dataclass(eq=False)
class DrivenSequence:
    """One sequence; the StateImage alternates between two slots of its own.

    `pages` may be any page ids; rotary positions are `positions` [3, n] inside the prompt and
    ordinal + `rope_delta` behind it.
    """

    index: int
    pages: IntArray
    params: SamplingParams = GREEDY
    positions: IntArray | None = None
    rope_delta: int = 0
    tokens: list[int] = field(default_factory=list)
    slot: int = ROOT_SLOT

    @property
    def frontier(self) -> int:
        return len(self.tokens)

    def row(self, token_ids: Sequence[int], *, samples: bool) -> UnitRow:
        """The next inputs, without running them."""
        stop = self.frontier + len(token_ids)
        return UnitRow(
            token_ids=np.array(token_ids, np.int32),
            start=self.frontier,
            page_table=self.pages[: -(-stop // PAGE_TOKENS)],
            read_slot=self.slot,
            write_slot=self._next_slot(),
            positions=self._positions(stop),
            sample=sample_row(stop, self.params) if samples else None,
            residence=(self.index, 1),
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """The inputs have run."""
        self.slot = self._next_slot()
        self.tokens.extend(token_ids)

    def _next_slot(self) -> int:
        first = 1 + 2 * self.index
        return first + 1 if self.slot == first else first

    def _positions(self, stop: int) -> IntArray | None:
        if self.positions is None:
            return None
        ordinals = np.arange(self.frontier, stop, dtype=np.int32)
        later = np.broadcast_to(ordinals + self.rope_delta, (3, ordinals.size))
        inside = self.positions[:, self.frontier : stop]
        return np.concatenate((inside, later[:, inside.shape[1] :]), axis=1)


def sequence(
    index: int = 0,
    params: SamplingParams = GREEDY,
    *,
    rng: np.random.Generator | None = None,
    positions: IntArray | None = None,
    rope_delta: int = 0,
) -> DrivenSequence:
    """A sequence in its own share of the pool; with `rng` its pages lie in random order."""
    first = index * PAGES_PER_SEQUENCE
    pages = np.arange(first, first + PAGES_PER_SEQUENCE, dtype=np.int32)
    if rng is not None:
        pages = rng.permutation(pages)
    return DrivenSequence(index, pages, params, positions, rope_delta)


async def prefill(
    executor: Executor, target: DrivenSequence, prompt: Sequence[int], chunks: Sequence[int]
) -> RowOutput:
    """Run a prompt in chunks (the last size repeats); the last one samples."""
    done, index = 0, 0
    output = RowOutput(None)
    while done < len(prompt):
        size = chunks[min(index, len(chunks) - 1)]
        part = list(prompt[done : done + size])
        done, index = done + len(part), index + 1
        output = await executor.prefill(target.row(part, samples=done == len(prompt)))
        target.advance(part)
    return output


async def prefill_scored(
    executor: Executor,
    target: DrivenSequence,
    prompt: Sequence[int],
    chunks: Sequence[int],
    *,
    first: int = 1,
    num_top: int = 0,
) -> tuple[PromptScores, RowOutput]:
    """As `prefill`; also the scores of the prompt's tokens from `first` on."""
    done, index, parts = 0, 0, list[PromptScores]()
    output = RowOutput(None)
    while done < len(prompt):
        stop = min(done + chunks[min(index, len(chunks) - 1)], len(prompt))
        row = target.row(prompt[done:stop], samples=stop == len(prompt))
        begin, end = max(first, done + 1), min(stop + 1, len(prompt))
        if begin < end:
            targets = np.array(prompt[begin:end], np.int32)
            row = dataclasses.replace(row, score=ScoreRow(begin - done - 1, targets, num_top))
        output = await executor.prefill(row)
        parts += [] if output.scores is None else [output.scores]
        target.advance(prompt[done:stop])
        done, index = stop, index + 1
    return prompt_logprobs.joined(parts), output


async def score(
    executor: Executor, target: DrivenSequence, prompt: Sequence[int], chunks: Sequence[int]
) -> Float32Array:
    """Logits [n, V] of a prompt run in chunks (the last size repeats)."""
    done, index = 0, 0
    parts: list[Float32Array] = []
    while done < len(prompt):
        size = chunks[min(index, len(chunks) - 1)]
        part = list(prompt[done : done + size])
        done, index = done + len(part), index + 1
        parts.append(await executor.score(target.row(part, samples=False)))
        target.advance(part)
    return np.concatenate(parts)


async def decode(
    executor: Executor,
    targets: Sequence[DrivenSequence],
    token_ids: Sequence[int],
    *,
    goes_on: bool = False,
) -> list[GeneratedToken]:
    """One step of every target with its input token, in this order."""
    rows = tuple(
        target.row([token_id], samples=True)
        for target, token_id in zip(targets, token_ids, strict=True)
    )
    outputs = await executor.decode(rows, goes_on=goes_on)
    for target, token_id in zip(targets, token_ids, strict=True):
        target.advance([token_id])
    return [taken(output) for output in outputs]


def draft_row(target: DrivenSequence, token_id: int, draft: Sequence[int]) -> UnitRow:
    """The next input with a draft behind it."""
    row = target.row([token_id, *draft], samples=True)
    first = target.frontier + 1
    checks = tuple(sample_row(first + index, target.params) for index in range(len(draft)))
    return dataclasses.replace(row, checks=checks)


async def verify(
    executor: Executor,
    targets: Sequence[DrivenSequence],
    token_ids: Sequence[int],
    drafts: Sequence[Sequence[int]],
) -> list[list[int]]:
    """One round of every target: the tokens it produced."""
    rows = tuple(map(draft_row, targets, token_ids, drafts))
    outputs = await executor.verify(rows)
    produced = []
    for target, row, output in zip(targets, rows, outputs, strict=True):
        taken(output)
        produced.append([token.token_id for token in output.tokens])
        target.advance(row.token_ids[: len(produced[-1])].tolist())
    return produced


async def generate(executor: Executor, target: DrivenSequence, first: int, count: int) -> list[int]:
    """`count` tokens, of which `first` came from the prefill."""
    tokens = [first]
    while len(tokens) < count:
        tokens.append((await decode(executor, [target], tokens[-1:]))[0].token_id)
    return tokens


def taken(output: RowOutput) -> GeneratedToken:
    """The token of an output that must have one."""
    assert output.is_finite
    assert output.token is not None
    return output.token


def with_mask(sample: SampleRow, mask: TokenMask) -> SampleRow:
    return dataclasses.replace(sample, mask=mask)


def with_sample(row: UnitRow, sample: SampleRow) -> UnitRow:
    """The same inputs with another choice behind them."""
    return dataclasses.replace(row, sample=sample)
