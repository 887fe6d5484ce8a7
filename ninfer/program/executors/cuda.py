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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ninfer.contract.arrays import ByteArray, Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.sampling import PromptScores
from ninfer.contract.units import (
    PAGE_TOKENS,
    ROOT_SLOT,
    Capacity,
    Move,
    RowOutput,
    ScoreRow,
    UnitRow,
)
from ninfer.program.executors.cpu_batch import check_rows
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS
from ninfer.program.executors.cuda_choice import TokenChoice
from ninfer.program.executors.cuda_decode import DecodeSteps
from ninfer.program.executors.cuda_dflash import CudaDflash
from ninfer.program.executors.cuda_driver import CudaDriver, Graph, HostArray
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_model import CudaModel, Taps
from ninfer.program.executors.cuda_mover import CudaMover
from ninfer.program.executors.cuda_mtp import CudaMtp
from ninfer.program.executors.cuda_round_draft import RoundDraft
from ninfer.program.executors.cuda_rounds import Rounds
from ninfer.program.executors.cuda_scores import score_inputs
from ninfer.program.executors.cuda_small_units import SmallUnits
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_watch import LONGEST_UNIT_S, DeviceWatch
from ninfer.program.executors.cuda_weights import DeviceWeights
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.graphs import DecodeGraphs


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
        dflash: DflashSetup | None = None,
        longest_unit_s: float = LONGEST_UNIT_S,
    ) -> None:
        """dflash   the draft model whose weights are there too"""
        self._config = config
        self._driver = driver
        self._watch = DeviceWatch(driver, longest_unit_s)
        self._workspace = workspace
        self._model = CudaModel(config, driver, weights, workspace, _taps_of(dflash, workspace))
        self._has_states = config.num_gdn_layers > 0 or workspace.memory.hidden is not None
        self._is_closed = False
        self._mover = CudaMover(
            driver,
            workspace.memory,
            host_blocks,
            max_rows=capacity.max_concurrency,
        )
        self._choice = TokenChoice(
            driver,
            self._watch,
            workspace.sampler,
            workspace.logits,
            max_rows=capacity.max_concurrency,
        )
        self._draft: RoundDraft | None = None
        if dflash is not None:
            self._draft = CudaDflash(dflash, capacity, driver, weights, workspace)
        elif capacity.has_draft_model:
            self._draft = CudaMtp(config, driver, weights, workspace)
        self._max_draft_tokens = capacity.max_draft_tokens
        self._rounds: Rounds | None = None
        if capacity.max_draft_tokens:
            self._rounds = Rounds(
                config,
                capacity,
                driver,
                self._watch,
                self._model,
                self._draft,
                workspace,
                self._mover,
                self._choice,
                lambda num_rows: warm_up_rows(num_rows, 1),
            )
        self._steps: DecodeSteps | None = None
        if self._draft is None:
            self._steps = DecodeSteps(
                driver,
                self._watch,
                workspace,
                self._mover,
                self._choice,
                max_rows=capacity.max_concurrency,
                has_states=self._has_states,
                queue_step=self.queue_decode,
                warm_up_rows=lambda num_rows: warm_up_rows(num_rows, 1),
            )
        self._small_units = SmallUnits(
            driver,
            workspace.small_window,
            max_tokens=min(SMALL_TOKENS, capacity.prefill_chunk),
            queue_layers=self._model.queue_hidden,
            warm_up_row=warm_up_rows(1, 1)[0],
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
        return self._plain_steps.graphs

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
        with self._watch.using("save"):
            await self._mover.save(move)

    async def load(self, move: Move) -> None:
        with self._watch.using("load"):
            if move.slot is not None and self._steps is not None:
                self._steps.spoil(move.slot)
            await self._mover.load(move)

    async def prefill(self, row: UnitRow) -> RowOutput:
        check_rows((row,), has_states=self._has_states)
        with self._watch.using("prefill"):
            await self._make_way(row)
            prompt = await self._run_prompt(row)
            hidden = prompt.hidden
            scores = None
            if row.score is not None:
                scores = await self._scores(hidden, row.score, row.start)
                if scores is None:
                    return RowOutput(None, is_finite=False)
            if row.sample is not None:
                logits = self._workspace.logits(1)
                self._model.queue_logits(hidden.rows(hidden.shape[0] - 1, hidden.shape[0]), logits)
                await self._choice.queue((row.sample,), are_new=True)
            self._queue_absorb(prompt)
            place = self._workspace.sampler.side
            self._driver.mark(place)
            await self._watch.passed(place)
            if row.sample is None:
                return RowOutput(None, scores=scores)
            (output,) = self._choice.outputs((row.sample,))
            return replace(output, scores=scores if output.is_finite else None)

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        check_rows(rows, has_states=self._has_states)
        with self._watch.using("decode"):
            return await self._plain_steps.run(rows, goes_on=goes_on)

    @property
    def max_draft_tokens(self) -> int:
        return self._max_draft_tokens

    @property
    def has_draft_model(self) -> bool:
        return self._draft is not None

    @property
    def pads_rows(self) -> bool:
        return True

    @property
    def small_units(self) -> SmallUnits:
        """To be read between units only."""
        return self._small_units

    @property
    def rounds(self) -> Rounds:
        """For benchmarks, between units only. InvariantError when nothing is drafted."""
        if self._rounds is None:
            raise InvariantError("the executor was built without drafts")
        return self._rounds

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        check_rows(rows, has_states=self._has_states)
        with self._watch.using("verify"):
            for row in rows:
                await self._make_way(row)
            return await self.rounds.run(rows)

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        with self._watch.using("rewind"):
            await self.rounds.rewind(rows, counts)

    async def score(self, row: UnitRow) -> Float32Array:
        check_rows((row,), has_states=self._has_states)
        num_tokens = row.token_ids.size
        scores = np.empty((num_tokens, self._config.vocab_size), np.float32)
        with self._watch.using("score"):
            await self._make_way(row)
            prompt = await self._run_prompt(row)
            hidden = prompt.hidden
            for first in range(0, num_tokens, SMALL_TOKENS):
                last = min(first + SMALL_TOKENS, num_tokens)
                logits = self._workspace.logits(last - first)
                self._model.queue_logits(hidden.rows(first, last), logits)
                self._workspace.queue_scores(logits)
                self._driver.mark()
                await self._watch.passed()
                scores[first:last] = self._workspace.read_scores(last - first)
            self._queue_absorb(prompt)
            self._driver.mark()
            await self._watch.passed()
        return scores

    def _queue_absorb(self, prompt: _Prompt) -> None:
        """Let the draft model follow a prompt's unit."""
        if self._draft is not None:
            self._draft.queue_absorb(prompt.unit, prompt.stream, prompt.num_inputs)

    async def _scores(
        self, hidden: DeviceTensor, score: ScoreRow, start: int
    ) -> PromptScores | None:
        """Scores behind the inputs of a prompt's unit; None when logits are not finite."""

        def queue_logits(first: int, last: int) -> DeviceTensor:
            logits = self._workspace.logits(last - first)
            self._model.queue_logits(hidden.rows(first, last), logits)
            return logits

        max_rows = self._workspace.sampler.max_rows
        return await score_inputs(score, start, queue_logits, self._choice.run, max_rows=max_rows)

    def queue_decode(self, num_rows: int, chooses: bool = True) -> None:
        """Queue one decode step between the copies in and the copy out, or only up to its logits:
        what the graphs hold. Called by benchmarks too, between units only."""
        unit = self._workspace.decode_inputs.tensors(num_rows, num_rows)
        hidden = self._model.queue_hidden(unit)
        logits = self._workspace.logits(num_rows)
        self._model.queue_decode_logits(hidden, logits)
        if chooses:
            self._workspace.sampler.queue(logits)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._choice.close()
        self._watch.close()
        # Giving memory back waits for what runs: a stuck device keeps it until the process ends.
        if not self._watch.is_stuck:
            self._driver.close()

    @property
    def _plain_steps(self) -> DecodeSteps:
        """InvariantError with a draft model: all decode units are rounds."""
        if self._steps is None:
            raise InvariantError("a decode step beside a draft model")
        return self._steps

    async def _make_way(self, row: UnitRow) -> None:
        if self._steps is not None:
            await self._steps.make_way(row.write_slot)

    async def _run_prompt(self, row: UnitRow) -> _Prompt:
        """Queue a prompt's inputs through all layers."""
        self._mover.queue_copies((row,))
        if row.token_ids.size <= SMALL_TOKENS:
            return _Prompt(*self._small_units.queue(row), row.token_ids.size)
        unit = self._queue_prompt(row)
        hidden = self._model.queue_embedding(unit)
        for _ in self._model.queue_layers(unit, hidden):
            await asyncio.sleep(0)
        return _Prompt(unit, hidden, row.token_ids.size)

    def _queue_prompt(self, row: UnitRow) -> UnitTensors:
        """Queue a prompt's inputs."""
        inputs, num_tokens = self._workspace.prefill_inputs, row.token_ids.size
        inputs.write_prompt(row)
        inputs.queue_copy(1, num_tokens)
        return inputs.tensors(1, num_tokens)

    def _warm_up_prompts(self, prefill_chunk: int) -> None:
        """Units of the large regime and of the largest size: kernels and cuBLAS load what they
        need."""
        for num_tokens in sorted({min(SMALL_TOKENS, prefill_chunk), prefill_chunk}):
            (row,) = warm_up_rows(1, num_tokens)
            unit = self._queue_prompt(row)
            hidden = self._model.queue_hidden(unit)
            self._model.queue_logits(hidden.rows(0, 1), self._workspace.logits(1))
            self._queue_absorb(_Prompt(unit, hidden, num_tokens))
            self._driver.synchronize()


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt's unit that is queued up to the last layer. stream [T, C]: the residual stream, with
    columns of padding behind the inputs."""

    unit: UnitTensors
    stream: DeviceTensor
    num_inputs: int

    @property
    def hidden(self) -> DeviceTensor:
        """The residual stream of the inputs."""
        return self.stream.rows(0, self.num_inputs)


def _taps_of(dflash: DflashSetup | None, workspace: Workspace) -> Taps | None:
    if dflash is None or workspace.rounds is None or workspace.rounds.dflash is None:
        return None
    return Taps(dflash.config.tap_layers, workspace.rounds.dflash.taps)


def warm_up_rows(num_rows: int, num_tokens: int) -> tuple[UnitRow, ...]:
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
