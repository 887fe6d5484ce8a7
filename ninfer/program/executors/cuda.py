"""CudaExecutor: runs units with the kernels, decode as replayed graphs, all on one stream.

    write inputs -> queue copies and launches (or one graph) -> mark
                     (-> queue the decode step that follows) -> poll the mark -> read results

Moves between device and host go beside them on a stream of their own (`cuda_mover.py`).

The event loop is never held: launches of a prefill are queued layer by layer with a turn of the
loop between them, and waiting is polling with turns of the loop. After a failure of the device
every later call fails at once: nothing on it can be trusted any more. A unit that never ends is
such a failure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Final

import numpy as np

from ninfer.contract.arrays import ByteArray, Float32Array, IntArray
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.sampling import PromptScores, SamplingParams
from ninfer.contract.units import (
    PAGE_TOKENS,
    ROOT_SLOT,
    Capacity,
    Move,
    RowOutput,
    SampleRow,
    ScoreRow,
    UnitRow,
)
from ninfer.program.executors.cpu_batch import check_rows
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS
from ninfer.program.executors.cuda_driver import CudaDriver, Graph, HostArray
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_model import CudaModel
from ninfer.program.executors.cuda_mover import CudaMover
from ninfer.program.executors.cuda_run_ahead import StepAhead, can_go_on, following
from ninfer.program.executors.cuda_sampler import has_masks
from ninfer.program.executors.cuda_scores import score_inputs
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DeviceWeights
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.graphs import DecodeGraphs

MASK_THREADS: Final = 4
"""Rows of a batch whose masks are filled at once."""
LONGEST_UNIT_S: Final = 180.0
"""A unit that the device has not ended by then will never end."""


class CudaExecutor:
    """Implements contract Executor. Owns the driver: close gives all memory of the device back.

    All memory is there already (`weights`, `workspace`, `host_blocks`: page-locked, whole blocks in
    a row); running allocates nothing.
    A decode row's bits do not depend on its mates or their number. Raises DeviceError.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        driver: CudaDriver,
        weights: DeviceWeights,
        workspace: Workspace,
        host_blocks: HostArray,
        *,
        longest_unit_s: float = LONGEST_UNIT_S,
    ) -> None:
        self._config = config
        self._longest_unit_s = longest_unit_s
        self._is_stuck = False
        self._driver = driver
        self._workspace = workspace
        self._model = CudaModel(config, driver, weights, workspace)
        self._has_states = config.num_gdn_layers > 0
        self._failure: DeviceError | None = None
        self._ahead: StepAhead | None = None
        self._has_inputs = False
        self._is_closed = False
        self._mask_threads = ThreadPoolExecutor(MASK_THREADS, "ninfer-masks")
        self._mover = CudaMover(
            driver,
            workspace.memory,
            host_blocks,
            max_rows=capacity.max_concurrency,
        )
        self._graphs: DecodeGraphs[Graph] = DecodeGraphs(
            driver,
            capacity.max_concurrency,
            warm_up=self._warm_up_decode,
            enqueue=self.queue_decode,
        )
        self._warm_up_prompts(capacity.prefill_chunk)

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def device_name(self) -> str:
        return self._driver.kernels.limits.name

    @property
    def driver(self) -> CudaDriver:
        """For benchmarks and tests, between units only."""
        return self._driver

    @property
    def graphs(self) -> DecodeGraphs[Graph]:
        """For benchmarks, between units only."""
        return self._graphs

    @property
    def workspace(self) -> Workspace:
        """To be read between units only."""
        return self._workspace

    @property
    def page_bytes(self) -> int:
        return self._mover.page_bytes

    @property
    def slot_bytes(self) -> int:
        return self._mover.slot_bytes

    @property
    def host_blocks(self) -> ByteArray:
        return self._mover.host_blocks

    async def save(self, move: Move) -> None:
        with self._using_device("save"):
            await self._mover.save(move)

    async def load(self, move: Move) -> None:
        with self._using_device("load"):
            if self._ahead is not None and move.slot is not None:
                self._ahead.spoil(move.slot)
            await self._mover.load(move)

    async def prefill(self, row: UnitRow) -> RowOutput:
        check_rows((row,), has_states=self._has_states)
        with self._using_device("prefill"):
            await self._make_way(row)
            hidden = await self._run_prompt(row)
            scores = None
            if row.score is not None:
                scores = await self._scores(hidden, row.score, row.start)
                if scores is None:
                    return RowOutput(None, is_finite=False)
            if row.sample is None:
                self._driver.mark()
                await self._completion()
                return RowOutput(None, scores=scores)
            sampler, logits = self._workspace.sampler, self._workspace.logits(1)
            sampler.write((row.sample,))
            sampler.queue_copy_in(1)
            self._model.queue_logits(hidden.rows(hidden.shape[0] - 1, hidden.shape[0]), logits)
            await self._queue_choice((row.sample,), logits)
            await self._completion(sampler.side)
            output = sampler.parse((row.sample,), sampler.results(1, sampler.side))[0]
            return replace(output, scores=scores if output.is_finite else None)

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        check_rows(rows, has_states=self._has_states)
        may_go_on = goes_on and can_go_on(rows, has_states=self._has_states)
        with self._using_device("decode"):
            step, self._ahead = self._ahead, None
            if step is not None and not step.is_just(rows):
                picked = await self._pick(step, rows)
                if picked is not None:
                    token_ids = _token_ids(picked) if may_go_on else None
                    if token_ids is not None:
                        self._ahead = self._queue_step(following(rows, token_ids))
                    return picked
                step = None
            if step is None:
                step = self._queue_step(rows)
                if has_masks(_samples(rows)):
                    await self._queue_choice(_samples(rows), self._workspace.logits(len(rows)))
            results = await (self._go_on(step, rows) if may_go_on else self._results(step))
            outputs = self._workspace.sampler.parse(_samples(rows), results)
        return tuple(
            RowOutput(None) if row.sample is None else output
            for row, output in zip(rows, outputs, strict=True)
        )

    @property
    def max_draft_tokens(self) -> int:
        return 0

    @property
    def has_draft_model(self) -> bool:
        return False

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        raise InvariantError("the cuda executor verifies no drafts")

    async def score(self, row: UnitRow) -> Float32Array:
        check_rows((row,), has_states=self._has_states)
        num_tokens = row.token_ids.size
        scores = np.empty((num_tokens, self._config.vocab_size), np.float32)
        with self._using_device("score"):
            await self._make_way(row)
            hidden = await self._run_prompt(row)
            for first in range(0, num_tokens, SMALL_TOKENS):
                last = min(first + SMALL_TOKENS, num_tokens)
                logits = self._workspace.logits(last - first)
                self._model.queue_logits(hidden.rows(first, last), logits)
                self._workspace.queue_scores(logits)
                self._driver.mark()
                await self._completion()
                scores[first:last] = self._workspace.read_scores(last - first)
        return scores

    async def _scores(
        self, hidden: DeviceTensor, score: ScoreRow, start: int
    ) -> PromptScores | None:
        """Scores behind the inputs of a prompt's unit; None when logits are not finite."""

        def queue_logits(first: int, last: int) -> DeviceTensor:
            logits = self._workspace.logits(last - first)
            self._model.queue_logits(hidden.rows(first, last), logits)
            return logits

        max_rows = self._workspace.sampler.max_rows
        return await score_inputs(score, start, queue_logits, self._choose, max_rows=max_rows)

    async def _choose(
        self, samples: tuple[SampleRow, ...], logits: DeviceTensor
    ) -> tuple[RowOutput, ...]:
        """Tokens from logits that are queued."""
        sampler = self._workspace.sampler
        sampler.write(samples)
        sampler.queue_copy_in(len(samples))
        await self._queue_choice(samples, logits)
        await self._completion(sampler.side)
        return sampler.parse(samples, sampler.results(len(samples), sampler.side))

    def queue_decode(self, num_rows: int) -> None:
        """Queue one decode step between the copies in and the copy out: what the graphs hold.
        Called by benchmarks too, between units only."""
        unit = self._workspace.decode_inputs.tensors(num_rows, num_rows)
        hidden = self._model.queue_embedding(unit)
        for _ in self._model.queue_layers(unit, hidden):
            pass
        logits = self._workspace.logits(num_rows)
        self._model.queue_decode_logits(hidden, logits)
        self._workspace.sampler.queue(logits)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._mask_threads.shutdown()
        # Giving memory back waits for what runs: a stuck device keeps it until the process ends.
        if not self._is_stuck:
            self._driver.close()

    def _queue_step(self, rows: tuple[UnitRow, ...]) -> StepAhead:
        """Queue a decode step whose tokens are known, and the mark behind it. Nothing may be
        queued."""
        self._write_step(rows)
        self._has_inputs = True
        self._mover.queue_copies(rows)
        return StepAhead(rows, self._queue_graph(len(rows)))

    def _write_step(self, rows: tuple[UnitRow, ...]) -> None:
        self._workspace.decode_inputs.write_decode(rows)
        self._workspace.sampler.write(_samples(rows))
        self._workspace.sampler.write_tokens([row.token_ids.item(0) for row in rows])

    def _queue_graph(self, num_rows: int) -> int:
        """Queue a decode step whose inputs are written; the place of its mark."""
        inputs, sampler = self._workspace.decode_inputs, self._workspace.sampler
        inputs.queue_copy(num_rows, num_rows)
        sampler.queue_copy_in(num_rows)
        self._graphs.replay(num_rows)
        sampler.queue_copy_out(num_rows)
        self._driver.mark(sampler.side)
        return sampler.side

    async def _go_on(self, step: StepAhead, rows: tuple[UnitRow, ...]) -> IntArray:
        """The results of `step`, which runs just `rows`; the step behind it is queued, before they
        are known where nothing came between, and kept if every row has a token."""
        inputs, sampler, place = self._workspace.decode_inputs, self._workspace.sampler, None
        if self._has_inputs:
            inputs.advance(len(rows))
            # These rows may show a page that the step itself did not need.
            inputs.write_tables(rows)
            sampler.advance(len(rows))
            place = self._queue_graph(len(rows))
        results = await self._results(step)
        token_ids = sampler.chosen(results, len(rows))
        if token_ids is None:
            self._has_inputs = False
            if place is not None:
                await self._completion(place)
        elif place is None:
            self._ahead = self._queue_step(following(rows, token_ids))
        else:
            self._ahead = StepAhead(following(rows, token_ids), place)
        return results

    async def _queue_choice(self, samples: tuple[SampleRow, ...], logits: DeviceTensor) -> None:
        """Queue the choice of tokens from logits that are queued, and the mark behind it. Masks are
        filled in threads while the device works; a decode step's graph has chosen without them
        before, which costs a few microseconds and keeps it one graph."""
        sampler = self._workspace.sampler
        if has_masks(samples):
            loop, parts = asyncio.get_running_loop(), min(len(samples), MASK_THREADS)
            fills = [
                loop.run_in_executor(self._mask_threads, sampler.fill_masks, samples, part, parts)
                for part in range(parts)
            ]
            await asyncio.gather(*fills)
            sampler.queue_masked(logits)
        else:
            sampler.queue(logits)
        sampler.queue_copy_out(len(samples))
        self._driver.mark(sampler.side)

    async def _results(self, step: StepAhead) -> IntArray:
        """What the sampler made of a queued step."""
        if step.results is None:
            await self._completion(step.place)
            step.results = self._workspace.sampler.results(len(step.rows), step.place)
        return step.results

    async def _pick(
        self, step: StepAhead, rows: tuple[UnitRow, ...]
    ) -> tuple[RowOutput, ...] | None:
        """Outputs of `rows` from a step that ran others too; None when it did not run all."""
        results = await self._results(step)
        self._has_inputs = False
        return step.pick(rows, self._workspace.sampler.parse(_samples(step.rows), results))

    async def _make_way(self, row: UnitRow) -> None:
        """Before a prompt's unit, which writes where `row` says and uses the sampler."""
        if self._ahead is not None:
            await self._results(self._ahead)
            self._ahead.spoil(row.write_slot)
        self._has_inputs = False

    async def _run_prompt(self, row: UnitRow) -> DeviceTensor:
        """Queue a prompt's inputs through all layers; the residual stream [T, C] behind them."""
        unit, hidden = self._queue_prompt(row)
        for _ in self._model.queue_layers(unit, hidden):
            await asyncio.sleep(0)
        return hidden

    def _queue_prompt(self, row: UnitRow) -> tuple[UnitTensors, DeviceTensor]:
        """Queue a prompt's inputs up to the first layer."""
        inputs, num_tokens = self._workspace.prefill_inputs, row.token_ids.size
        self._mover.queue_copies((row,))
        inputs.write_prompt(row)
        inputs.queue_copy(1, num_tokens)
        unit = inputs.tensors(1, num_tokens)
        return unit, self._model.queue_embedding(unit)

    def _warm_up_prompts(self, prefill_chunk: int) -> None:
        """Units of both regimes and of the largest size: kernels and cuBLAS load what they need."""
        for num_tokens in sorted({min(SMALL_TOKENS, prefill_chunk), prefill_chunk}):
            (row,) = _warm_up_rows(1, num_tokens)
            unit, hidden = self._queue_prompt(row)
            for _ in self._model.queue_layers(unit, hidden):
                pass
            self._model.queue_logits(hidden.rows(0, 1), self._workspace.logits(1))
            self._driver.synchronize()

    def _warm_up_decode(self, num_rows: int) -> None:
        self._write_step(_warm_up_rows(num_rows, 1))
        self._workspace.decode_inputs.queue_copy(num_rows, num_rows)
        self._workspace.sampler.queue_copy_in(num_rows)
        self.queue_decode(num_rows)

    async def _completion(self, place: int = 0) -> None:
        """Poll until all up to the mark has run, with a turn of the loop between two looks."""
        latest_s = monotonic() + self._longest_unit_s
        while not self._driver.has_passed(place):
            if monotonic() > latest_s:
                self._is_stuck = True
                raise DeviceError(
                    f"cuda: the device has not ended a unit in {self._longest_unit_s:g} s"
                )
            await asyncio.sleep(0)

    @contextmanager
    def _using_device(self, what: str) -> Iterator[None]:
        """Remember a failure of the device; leave nothing queued when the unit is cut off."""
        if self._is_closed:
            raise DeviceError(f"cuda executor: {what} after close")
        if self._failure is not None:
            raise DeviceError(f"cuda executor: {what} after a failure: {self._failure}")
        try:
            self._driver.activate()
            yield
        except DeviceError as error:
            self._failure = error
            raise
        except asyncio.CancelledError:
            self._driver.synchronize()
            raise


def _token_ids(outputs: Sequence[RowOutput]) -> list[int] | None:
    """The token of every row, or None when one has none."""
    token_ids = [output.token.token_id for output in outputs if output.token is not None]
    return token_ids if len(token_ids) == len(outputs) else None


def _samples(rows: Sequence[UnitRow]) -> tuple[SampleRow, ...]:
    """How to choose a token in each row; anyhow where nobody wants one."""
    return tuple(row.sample or _unused_sample() for row in rows)


def _unused_sample() -> SampleRow:
    nothing = np.empty(0, np.int32)
    return SampleRow(SamplingParams(), 0, nothing, nothing, nothing)


def _warm_up_rows(num_rows: int, num_tokens: int) -> tuple[UnitRow, ...]:
    """Rows that are in nobody's way before the first request: they write page 0 and each the slot
    behind the root, which every sequence writes before it reads."""
    return tuple(
        UnitRow(
            token_ids=np.zeros(num_tokens, np.int32),
            start=0,
            page_table=np.zeros(-(-num_tokens // PAGE_TOKENS), np.int32),
            read_slot=ROOT_SLOT,
            write_slot=index + 1,
        )
        for index in range(num_rows)
    )
