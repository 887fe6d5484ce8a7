"""Sequences on a CPU executor with an MTP module: rounds that ask for proposals, and their bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array, FloatArray, IntArray
from ninfer.contract.model import ModelConfig, ModelSource
from ninfer.contract.units import PAGE_TOKENS, Capacity, RowOutput, UnitRow
from ninfer.ops import linear, rotary
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_batch import TokenBatch, prefill_batch
from ninfer.program.executors.cpu_memory import CpuMemory
from ninfer.program.executors.cpu_model import CpuModel
from ninfer.program.executors.cpu_mtp import CpuMtp, MtpModel
from ninfer.program.executors.draft_shape import mtp_shape
from tests.helpers import executor_driver as driver
from tests.helpers.executor_driver import DrivenSequence


def read_all(source: ModelSource) -> dict[str, Float32Array]:
    """Weights of the text model and its MTP module."""
    return {
        item.name: array
        for component in ("text", "mtp")
        for item, array in source.read_float32(component)
    }


def build_executor(
    source: ModelSource, weights: Mapping[str, Float32Array] | None = None
) -> CpuExecutor:
    """As driver.build_executor, with the module."""
    weights = read_all(source) if weights is None else weights
    return CpuExecutor(
        source.config,
        weights,
        driver.default_capacity(),
        draft_model=MtpModel(source.config, weights),
        num_threads=1,
    )


def asking_row(
    target: DrivenSequence, token_id: int, draft: Sequence[int], num_proposed: int
) -> UnitRow:
    """The next input with a draft behind it, and pages for what is proposed."""
    row = driver.draft_row(target, token_id, draft)
    stop = row.start + row.token_ids.size + num_proposed
    return dataclasses.replace(
        row,
        num_proposed=num_proposed,
        page_table=target.pages[: -(-stop // PAGE_TOKENS)],
    )


async def run_round(
    executor: CpuExecutor,
    targets: Sequence[DrivenSequence],
    token_ids: Sequence[int],
    drafts: Sequence[Sequence[int]],
    num_proposed: int = 3,
) -> list[RowOutput]:
    """One round of every target; it takes all that it produced."""
    rows = tuple(
        asking_row(target, token_id, draft, num_proposed)
        for target, token_id, draft in zip(targets, token_ids, drafts, strict=True)
    )
    outputs = await executor.verify(rows)
    for target, row, output in zip(targets, rows, outputs, strict=True):
        driver.taken(output)
        target.advance(row.token_ids[: len(output.tokens)].tolist())
    return list(outputs)


def ids_of(output: RowOutput) -> list[int]:
    return [token.token_id for token in output.tokens]


async def generate(executor: CpuExecutor, target: DrivenSequence, first: int, count: int) -> None:
    """Feed `count` tokens, of which `first` came from the prefill, one by one without drafts."""
    newest = first
    for _ in range(count):
        (output,) = await run_round(executor, [target], [newest], [()], 0)
        newest = driver.taken(output).token_id


def draft_image(executor: CpuExecutor, target: DrivenSequence) -> list[bytes]:
    """All bits that the module keeps of a sequence."""
    pages = target.pages[: -(-target.frontier // PAGE_TOKENS)]
    return image_of(executor.memory, pages, target.frontier, target.slot)


class ModuleParts:
    """Model and module without an executor, for one sequence that is run from its beginning."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Float32Array],
        target: DrivenSequence | None = None,
    ) -> None:
        memory = cpu_memory.allocate(config, driver.default_capacity(), mtp_shape(config))
        self.model = CpuModel(config, weights, memory)
        self.module = CpuMtp(config, weights, self.model, memory)
        self._frequencies = rotary.frequencies(config.attention.rope)
        self._target = driver.sequence() if target is None else target

    def batch(self, token_ids: Sequence[int]) -> TokenBatch:
        """From the beginning, at once."""
        row = self._target.row(token_ids, samples=False)
        return prefill_batch(row, 0, len(token_ids), self._frequencies)

    def stream(self, token_ids: Sequence[int]) -> FloatArray:
        """[n, C] behind the last layer."""
        *_, stream = self.model.hidden_states(self.batch(token_ids))
        return stream

    def hidden(self, token_ids: Sequence[int]) -> FloatArray:
        """[n, C] behind the final norm."""
        return self.model.final_norm(self.stream(token_ids))

    def guesses(self, token_ids: Sequence[int], hidden: FloatArray) -> NDArray[np.int64]:
        """[n] likeliest tokens behind the pairs of tokens and `hidden` [n, C]."""
        outputs = self.module.run(self.batch(token_ids), hidden)
        guesses: NDArray[np.int64] = self.model.head(outputs, linear.reference).argmax(axis=1)
        return guesses


class WatchedMtp(CpuExecutor):
    """Notes what the module keeps of a sequence at each frontier of a verify unit; of one text it
    has to be the same each time.

    images   by cache ordinal of a row's first input: bits of all keys and values below it and of
             the StateImage there
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Float32Array], capacity: Capacity
    ) -> None:
        super().__init__(
            config, weights, capacity, draft_model=MtpModel(config, weights), num_threads=1
        )
        self.config = config
        self.images: dict[int, list[bytes]] = {}

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        outputs = await super().verify(rows)
        for row in rows:
            pages = row.page_table[: -(-row.start // PAGE_TOKENS)]
            image = image_of(self.memory, pages, row.start, row.read_slot)
            assert self.images.setdefault(row.start, image) == image
        return outputs


def image_of(memory: CpuMemory, pages: IntArray, stop: int, slot: int) -> list[bytes]:
    """All bits that the module keeps of a sequence of `stop` tokens."""
    pools = (*memory.draft_k_pages, *memory.draft_v_pages)
    keys = [pool[pages].reshape(-1, *pool.shape[2:])[:stop].tobytes() for pool in pools]
    return [*keys, memory.hidden[slot].tobytes()]
