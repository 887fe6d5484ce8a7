"""CpuExecutor: runs units with NumPy in one thread of its own, and moves memory in another.

Only these threads touch weights and memory once the executor is built; the event loop never waits
for a product. Units run in the order they were asked for. A move touches pages and slots that no
unit writes (of a page that a sequence still fills, only bytes that nobody reads are torn).
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from ninfer.contract.arrays import ByteArray, Float32Array, FloatArray
from ninfer.contract.cache import CHUNK_GRANULE
from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.sampling import GeneratedToken, PromptScores
from ninfer.contract.units import (
    PAGE_TOKENS,
    Capacity,
    Move,
    RowOutput,
    SampleRow,
    ScoreRow,
    UnitRow,
)
from ninfer.ops import linear, prompt_logprobs, rotary, sampling
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu_batch import (
    TokenBatch,
    check_rows,
    decode_batch,
    positions_of,
    prefill_batch,
    window_batch,
)
from ninfer.program.executors.cpu_draft import CpuDraft, DraftModel, ProposalRow
from ninfer.program.executors.cpu_memory import CpuMemory
from ninfer.program.executors.cpu_model import CpuModel
from ninfer.program.executors.draft_shape import NO_DRAFT_SHAPE

PASS_TOKENS: Final = CHUNK_GRANULE
"""Most tokens that go through the layers at once. Passes end at multiples of it from the sequence's
start, so a unit may be cut there without changing a bit, and intermediate arrays stay small
whatever the prefill chunk is."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """A verify unit that has run: `hidden` [N, C] behind the final norm, `taps` for a draft
    model."""

    rows: tuple[UnitRow, ...]
    batch: TokenBatch
    hidden: FloatArray
    taps: FloatArray


class CpuExecutor:
    """Implements contract Executor. Raises MemoryError at construction.

    `weights` are keyed by ModelObject.name, float32, and are not copied; lm_head is missing when
    tied. A decode row's token and state are the same bits whatever else is in the batch.
    `num_threads` holds for the whole process until close; None leaves the library's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Float32Array],
        capacity: Capacity,
        *,
        draft_model: DraftModel | None = None,
        num_threads: int | None = None,
    ) -> None:
        shape = NO_DRAFT_SHAPE if draft_model is None else draft_model.shape
        self._memory = cpu_memory.allocate(config, capacity, shape)
        self._model = CpuModel(config, weights, self._memory)
        self._draft: CpuDraft | None = None
        if draft_model is not None:
            self._draft = draft_model.build(self._model, self._memory)
        self._tap_layers = () if self._draft is None else self._draft.tap_layers
        self._frequencies = rotary.frequencies(config.attention.rope)
        self._has_states = self._memory.slot_bytes > 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ninfer-cpu")
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="ninfer-copy")
        self._products = threadpool_limits(num_threads, user_api="blas")
        self._is_closed = False
        self._round: _Round | None = None

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def device_name(self) -> str:
        return platform.processor() or platform.machine()

    @property
    def memory(self) -> CpuMemory:
        """To be read between units only."""
        return self._memory

    @property
    def page_bytes(self) -> int:
        return int(self._memory.host_blocks.shape[1])

    @property
    def slot_bytes(self) -> int:
        return self._memory.slot_bytes

    @property
    def host_blocks(self) -> ByteArray:
        return self._memory.host_blocks

    async def prefill(self, row: UnitRow) -> RowOutput:
        return await self._submit("prefill", self._prefill, row)

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        return await self._submit("decode", self._decode, rows)

    @property
    def max_draft_tokens(self) -> int:
        return MAX_DRAFT_TOKENS

    @property
    def has_draft_model(self) -> bool:
        return self._draft is not None

    @property
    def pads_rows(self) -> bool:
        return False

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        return await self._submit("verify", self._verify, rows)

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        await self._submit("rewind", self._rewind, (rows, counts))

    async def score(self, row: UnitRow) -> Float32Array:
        return await self._submit("score", self._score, row)

    async def save(self, move: Move) -> None:
        await self._submit("save", self._memory.save, move, self._copy_thread)

    async def load(self, move: Move) -> None:
        await self._submit("load", self._memory.load, move, self._copy_thread)

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown(wait=True)
        self._copy_thread.shutdown(wait=True)
        self._products.restore_original_limits()

    async def _submit(
        self,
        what: str,
        work: Callable[[Argument], Result],
        argument: Argument,
        thread: ThreadPoolExecutor | None = None,
    ) -> Result:
        if self._is_closed:
            raise DeviceError(f"cpu executor: {what} after close")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread or self._thread, _guarded, what, work, argument)

    def _replay(self, row: UnitRow) -> RowOutput:
        """With the bits of as many decode steps."""
        check_rows((row,), has_states=self._has_states)
        self._copy_pages((row,))
        self._follow(window_batch((row,), self._frequencies))
        return RowOutput(None)

    def _prefill(self, row: UnitRow) -> RowOutput:
        if row.is_replayed:
            return self._replay(row)
        hidden, done, parts = None, 0, list[PromptScores]()
        for batch in self._passes(row):
            hidden = self._follow(batch)
            if row.score is not None:
                found = self._scores(batch, hidden, row.score, row.start, done)
                if found is None:
                    return RowOutput(None, is_finite=False)
                parts += found
            done += hidden.shape[0]
        scores = prompt_logprobs.joined(parts) if parts else None
        if row.sample is None or hidden is None:
            return RowOutput(None, scores=scores)
        output = _choose(self._model.head(hidden[-1:], linear.tiled)[0], row.sample)
        return replace(output, scores=scores if output.is_finite else None)

    def _scores(
        self, batch: TokenBatch, hidden: FloatArray, score: ScoreRow, start: int, done: int
    ) -> list[PromptScores] | None:
        """Scores behind the inputs of one pass, `done` of the unit's came before it; None when
        logits are not finite."""
        first = max(score.first, done)
        last = min(score.first + score.targets.size, done + hidden.shape[0])
        if first >= last:
            return []
        scores = prompt_logprobs.reference(
            self._model.head(hidden, batch.project)[first - done : last - done],
            score.targets[first - score.first : last - score.first],
            first=start + first + 1,
            num_top=score.num_top,
        )
        return None if scores is None else [scores]

    def _decode(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        if self._draft is not None:
            raise InvariantError("a draft model follows verify units, not decode units")
        check_rows(rows, has_states=self._has_states)
        self._copy_pages(rows)
        batch = decode_batch(rows, self._frequencies)
        logits = self._model.head(self._run(batch)[0], batch.project)
        return tuple(
            RowOutput(None) if row.sample is None else _choose(logits[index], row.sample)
            for index, row in enumerate(rows)
        )

    def _verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        check_rows(rows, has_states=self._has_states)
        self._copy_pages(rows)
        batch = window_batch(rows, self._frequencies)
        hidden, taps = self._run(batch)
        logits = self._model.head(hidden, batch.project)
        outputs = [
            _choose_all(logits[first : first + row.token_ids.size], row)
            for first, row in zip(batch.row_first, rows, strict=True)
        ]
        num_right = [1 + len(output.drafts) for output in outputs]
        self._round = _Round(rows, batch, hidden, taps)
        self._keep(self._round, num_right)
        if self._draft is not None:
            _propose(self._draft, rows, outputs, hidden[batch.row_first + np.array(num_right) - 1])
        return tuple(outputs)

    def _rewind(self, asked: tuple[tuple[UnitRow, ...], Sequence[int]]) -> None:
        rows, counts = asked
        if self._round is None or self._round.rows is not rows:
            raise InvariantError("rows go back that are not those of the newest round")
        self._keep(self._round, counts)

    def _keep(self, round_: _Round, counts: Sequence[int]) -> None:
        """Leave the StateImages behind so many inputs of each row."""
        if round_.batch.window is not None:
            round_.batch.window.fold(counts)
        if self._draft is not None:
            self._draft.absorb(round_.batch, round_.hidden, round_.taps, counts)

    def _score(self, row: UnitRow) -> Float32Array:
        parts = [
            self._model.head(self._follow(batch), batch.project) for batch in self._passes(row)
        ]
        return np.concatenate(parts).astype(np.float32, copy=False)

    def _passes(self, row: UnitRow) -> list[TokenBatch]:
        """The parts of a prompt unit; pages that it copies are copied before."""
        check_rows((row,), has_states=self._has_states)
        self._copy_pages((row,))
        num_tokens = row.token_ids.size
        first_border = PASS_TOKENS - row.start % PASS_TOKENS
        borders = [0, *range(first_border, num_tokens, PASS_TOKENS), num_tokens]
        return [
            prefill_batch(row, first, last, self._frequencies) for first, last in pairwise(borders)
        ]

    def _copy_pages(self, rows: tuple[UnitRow, ...]) -> None:
        for row in rows:
            for source, target in row.copies:
                self._memory.copy_page(source, target)

    def _follow(self, batch: TokenBatch) -> FloatArray:
        """Run inputs that are all right, the draft model behind them; what `_run` says of the
        target."""
        hidden, taps = self._run(batch)
        if self._draft is not None:
            self._draft.absorb(batch, hidden, taps, batch.row_sizes.tolist())
        return hidden

    def _run(self, batch: TokenBatch) -> tuple[FloatArray, FloatArray]:
        """[N, C] behind the final norm, and the taps that the draft model wants."""
        taps = []
        for index, hidden in enumerate(self._model.hidden_states(batch), -1):
            if index in self._tap_layers:
                taps.append(hidden.copy())
        tapped = np.concatenate(taps, axis=1) if taps else hidden[:, :0]
        return self._model.final_norm(hidden), tapped


def _guarded(what: str, work: Callable[[Argument], Result], argument: Argument) -> Result:
    """Top of the thread: numbers may overflow (logits are checked), failures get one type."""
    try:
        with np.errstate(all="ignore"):
            return work(argument)
    except Exception as error:
        raise DeviceError(
            f"cpu executor: {what} failed: {type(error).__name__}: {error}"
        ) from error


def _choose_all(logits: FloatArray, row: UnitRow) -> RowOutput:
    """The choices from a row's columns [T, V], as far as its draft was right."""
    if row.sample is None:
        return RowOutput(None)
    right: list[GeneratedToken] = []
    for column, sample in enumerate((*row.checks, row.sample)):
        output = _choose(logits[column], sample)
        if output.token is None:
            # Behind a right draft it is met again, by a step of its own.
            return RowOutput(right[-1], drafts=tuple(right[:-1])) if right else output
        right.append(output.token)
        if column == len(row.checks) or row.token_ids[column + 1] != output.token.token_id:
            break
    return RowOutput(right[-1], drafts=tuple(right[:-1]))


def _propose(
    draft: CpuDraft, rows: Sequence[UnitRow], outputs: list[RowOutput], hidden: FloatArray
) -> None:
    """Add the proposals of the rows that ask for some; `hidden` [B, C] is that before each row's
    newest token."""
    asking = {
        index: asked
        for index, row in enumerate(rows)
        if (asked := _proposal_row(row, outputs[index], hidden[index])) is not None
    }
    proposals = draft.propose(tuple(asking.values())) if asking else []
    for index, proposal in zip(asking, proposals, strict=True):
        outputs[index] = replace(outputs[index], proposal=proposal)


def _proposal_row(row: UnitRow, output: RowOutput, hidden: FloatArray) -> ProposalRow | None:
    """What guesses behind a row's newest token start from; None when there can be none."""
    if output.token is None or row.sample is None:
        return None
    num_inputs = len(output.tokens)
    ordinal = row.start + num_inputs
    num_tokens = min(row.num_proposed, row.page_table.size * PAGE_TOKENS - ordinal)
    if num_tokens < 1:
        return None
    return ProposalRow(
        output.token.token_id,
        ordinal,
        positions_of(row, num_inputs - 1, num_inputs)[:, 0] + 1,
        hidden,
        row.page_table,
        row.sample.params,
        num_tokens,
    )


def _choose(logits: FloatArray, sample: SampleRow) -> RowOutput:
    token = sampling.reference(logits, sample, sampling.filled_mask(sample, logits.size))
    if token is not None:
        return RowOutput(token)
    is_finite = bool(np.isfinite(logits).all())
    return RowOutput(None, is_finite=is_finite, is_dead_end=is_finite)
