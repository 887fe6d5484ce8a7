"""Rounds: units that check drafts, as replayed graphs.

    forward   layers over all columns, logits; StateImages stay
    (masks)   filled on the host beside it
    finish    a choice behind every column, how many drafts were right, StateImages behind these,
              what the draft model keeps of them
    guesses   graphs of the draft model's own (cuda_round_draft)

All of a round is queued at once; only masks are waited for. A graph serves rows with up to T
inputs: widths T that there are graphs for are few, a unit takes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import Capacity, RowOutput, SampleRow, UnitRow
from ninfer.ops import draft_match, gdn_fold
from ninfer.ops.draft_match import MatchInputs
from ninfer.ops.gdn_device import GdnRows
from ninfer.program.executors.cuda_choice import TokenChoice, unused_sample
from ninfer.program.executors.cuda_driver import CudaDriver, Graph
from ninfer.program.executors.cuda_model import CudaModel
from ninfer.program.executors.cuda_mover import CudaMover
from ninfer.program.executors.cuda_round_draft import RoundDraft
from ninfer.program.executors.cuda_sampler import has_masks, num_listed
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_watch import DeviceWatch
from ninfer.program.executors.cuda_window import Size, WindowInputs, WindowTensors, widths
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.graphs import capture_warm


class Rounds:
    """Captures its graphs at once. `draft` None: nothing is proposed."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        driver: CudaDriver,
        watch: DeviceWatch,
        model: CudaModel,
        draft: RoundDraft | None,
        workspace: Workspace,
        mover: CudaMover,
        choice: TokenChoice,
        warm_up_rows: Callable[[int], tuple[UnitRow, ...]],
    ) -> None:
        if workspace.rounds is None:
            raise InvariantError("rounds without their memory")
        self._config = config
        self._driver = driver
        self._watch = watch
        self._model = model
        self._draft = draft
        self._workspace = workspace
        self._buffers = workspace.rounds
        self._mover = mover
        self._choice = choice
        self._inputs = WindowInputs(driver, self._buffers.window, keeps_state=False)
        self._widths = widths(capacity.max_draft_tokens)
        self._max_proposals = capacity.max_draft_tokens if draft is not None else 0
        lanes = capacity.max_concurrency
        self._accepted = _pinned_ints(driver, lanes)
        self._proposals = _pinned_ints(driver, lanes * max(1, self._max_proposals))
        self._row_ends = _pinned_ints(driver, lanes)
        self._kept_columns = _pinned_ints(driver, lanes)
        self._newest: tuple[tuple[UnitRow, ...], Size] | None = None
        self._upload_fold_layers()
        self._forwards: dict[Size, Graph] = {}
        self._finishes: dict[Size, Graph] = {}
        self._capture(lanes, warm_up_rows)

    async def run(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        """One round of `rows`. Raises DeviceError."""
        counts = self._counts(rows)
        size = (len(rows), self._width(max(counts)))
        self._mover.queue_copies(rows)
        self._inputs.queue(rows, size[1], counts)
        self._driver.replay(self._forwards[size])
        samples = _samples(rows, size[1], counts)
        await self._queue_finish(size, samples)
        num_proposed = min(self._max_proposals, max(row.num_proposed for row in rows))
        self.queue_guesses(size, num_proposed)
        side = self._queue_results(size, num_proposed)
        await self._watch.passed(side)
        self._newest = rows, size
        sampler = self._workspace.sampler
        columns = sampler.parse(samples, sampler.results(len(samples), side))
        return self._outputs(rows, columns, size[1])

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        """Fold the newest round, which was of `rows`, anew: behind counts[r] inputs of row r.
        Raises DeviceError."""
        if self._newest is None or self._newest[0] is not rows:
            raise InvariantError("rows go back that are not those of the newest round")
        window = self.window(self._newest[1])
        match = self._buffers.match.outputs(*window.size)
        ends = self._row_ends[: len(rows)]
        ends[:] = [row * window.num_columns + count for row, count in enumerate(counts)]
        np.subtract(ends, 1, out=self._kept_columns[: len(rows)])
        self._driver.upload(match.row_ends.address, ends)
        self._driver.upload(match.kept_columns.address, self._kept_columns[: len(rows)])
        self._queue_fold(window, match.row_ends, is_chained=False)
        if self._draft is not None:
            self._draft.queue_rewound(window)
        self._driver.mark()
        await self._watch.passed()

    def queue_forward(self, size: Size) -> None:
        """Replay the layers and logits of a unit of that size whose inputs are there; like the
        other two for benchmarks, between units only."""
        self._driver.replay(self._forwards[size])

    def queue_finish(self, size: Size) -> None:
        """Replay the choice and what follows from it."""
        self._driver.replay(self._finishes[size])

    def queue_guesses(self, size: Size, num_proposed: int) -> None:
        """Replay the draft model: so many guesses a row, or what it does without any."""
        if self._draft is not None:
            self._draft.replay(size, num_proposed)

    async def _queue_finish(self, size: Size, samples: tuple[SampleRow, ...]) -> None:
        sampler = self._workspace.sampler
        sampler.write(samples)
        sampler.queue_copy_in(len(samples))
        if has_masks(samples):
            await self._choice.masks.fill(samples, size[1])
            sampler.queue_masks(len(samples))
        self._driver.replay(self._finishes[size])

    def _queue_results(self, size: Size, num_proposed: int) -> int:
        """Queue the copies of the results and the mark behind them; its place."""
        num_rows, num_columns = size
        sampler = self._workspace.sampler
        sampler.queue_copy_out(num_rows * num_columns)
        match = self._buffers.match.outputs(num_rows, num_columns)
        self._driver.download(self._accepted[:num_rows], match.accepted.address)
        if num_proposed and self._draft is not None:
            count = num_rows * self._max_proposals
            self._driver.download(self._proposals[:count], self._draft.proposals.address)
        self._driver.mark(sampler.side)
        return sampler.side

    def _outputs(
        self, rows: tuple[UnitRow, ...], columns: Sequence[RowOutput], num_columns: int
    ) -> tuple[RowOutput, ...]:
        accepted = self._accepted[: len(rows)].tolist()
        most = max(1, self._max_proposals)
        proposals = self._proposals[: len(rows) * most].reshape(-1, most).tolist()
        return tuple(
            _row_output(
                row,
                columns[index * num_columns : (index + 1) * num_columns],
                accepted[index],
                proposals[index],
            )
            for index, row in enumerate(rows)
        )

    def _counts(self, rows: Sequence[UnitRow]) -> list[int]:
        """Inputs of each row that are checked: as far as the sampler has room for their lists. A
        draft that is cut short costs time only."""
        room = self._workspace.sampler.max_listed
        room -= sum(num_listed(_samples_of(row)[0]) for row in rows)
        counts = []
        for row in rows:
            count = 1
            for sample in _samples_of(row)[1:]:
                room -= num_listed(sample)
                if room < 0:
                    break
                count += 1
            counts.append(count)
        return counts

    def _width(self, count: int) -> int:
        return next(width for width in self._widths if width >= count)

    def _capture(self, lanes: int, warm_up_rows: Callable[[int], tuple[UnitRow, ...]]) -> None:
        for num_rows in range(1, lanes + 1):
            for num_columns in self._widths:
                rows = warm_up_rows(num_rows)
                self._inputs.queue(rows, num_columns, [1] * num_rows)
                samples = (unused_sample(),) * (num_rows * num_columns)
                self._workspace.sampler.write(samples)
                self._workspace.sampler.queue_copy_in(len(samples))
                self._capture_unit((num_rows, num_columns))
            if self._draft is not None:
                self._draft.capture_rows(self.window((num_rows, self._widths[-1])))

    def _capture_unit(self, size: Size) -> None:
        driver = self._driver
        self._forwards[size] = capture_warm(driver, partial(self._queue_layers, size))
        self._finishes[size] = capture_warm(driver, partial(self._queue_choice, size))
        if self._draft is not None:
            self._draft.capture_unit(self.window(size))

    def _queue_layers(self, size: Size) -> None:
        unit = self.window(size).unit
        hidden = self._model.queue_hidden(unit)
        self._model.queue_decode_logits(hidden, self._workspace.logits(unit.num_tokens))

    def _queue_choice(self, size: Size) -> None:
        window, sampler = self.window(size), self._workspace.sampler
        unit, num_tokens = window.unit, window.unit.num_tokens
        sampler.queue_masked(self._workspace.logits(num_tokens))
        chosen = sampler.outputs(num_tokens)
        match = self._buffers.match.outputs(*size)
        draft_match.launch(
            self._driver.kernels,
            MatchInputs(
                token_ids=unit.token_ids,
                counts=window.counts,
                ordinals=unit.ordinals,
                rope_positions=unit.rope_positions,
                read_slots=unit.read_slots,
                limits=window.limits,
                rows=sampler.rows(num_tokens),
                chosen=chosen.token_ids,
                is_finite=chosen.is_finite,
            ),
            match,
            stream=self._driver.stream,
            is_chained=True,
        )
        if not unit.keeps_state:
            self._queue_fold(window, match.row_ends)
        if self._draft is not None:
            self._draft.queue_settled(window)

    def _queue_fold(
        self, window: WindowTensors, row_ends: DeviceTensor, *, is_chained: bool = True
    ) -> None:
        """StateImages behind the right inputs, in all layers."""
        memory, layers, unit = self._workspace.memory, self._buffers.fold_layers, window.unit
        if self._config.gdn is None or layers is None:
            return
        if memory.conv is None or memory.recurrent is None:
            raise InvariantError("GDN layers without StateImages")
        gdn_fold.launch(
            self._driver.kernels,
            self._config.gdn,
            layers,
            memory.conv,
            memory.recurrent,
            GdnRows(unit.row_starts, unit.read_slots, unit.write_slots, row_ends),
            stream=self._driver.stream,
            is_chained=is_chained,
        )

    def window(self, size: Size) -> WindowTensors:
        """Where the inputs of a unit of that size lie."""
        return self._inputs.tensors(*size)

    def _upload_fold_layers(self) -> None:
        layers = self._buffers.fold_layers
        if self._config.gdn is not None and layers is not None:
            table = gdn_fold.describe(self._config.gdn, self._model.fold_layers)
            self._driver.upload(layers.address, table.view(np.uint8))
            self._driver.synchronize()


def _samples_of(row: UnitRow) -> tuple[SampleRow, ...]:
    """How to choose behind each input of a row; anyhow where nobody wants a token."""
    return (unused_sample(),) if row.sample is None else (*row.checks, row.sample)


def _samples(
    rows: Sequence[UnitRow], num_columns: int, counts: Sequence[int]
) -> tuple[SampleRow, ...]:
    """Of all columns, padding included."""
    samples: list[SampleRow] = []
    padding = unused_sample()
    for row, count in zip(rows, counts, strict=True):
        samples += _samples_of(row)[:count]
        samples += [padding] * (num_columns - count)
    return tuple(samples)


def _row_output(
    row: UnitRow, columns: Sequence[RowOutput], accepted: int, proposal: Sequence[int]
) -> RowOutput:
    """From the choices behind a row's columns, of which `accepted` drafts were right."""
    if row.sample is None:
        return RowOutput(None)
    if not 0 <= accepted < len(columns):
        raise InvariantError(f"the device accepts {accepted} of {len(row.checks)} drafts")
    right = [output.token for output in columns[: accepted + 1] if output.token is not None]
    if len(right) <= accepted:
        return columns[0]
    return RowOutput(
        right[-1], drafts=tuple(right[:-1]), proposal=_whole(proposal[: row.num_proposed])
    )


def _whole(proposal: Sequence[int]) -> tuple[int, ...]:
    """Up to where a chain ended."""
    ends = [index for index, token_id in enumerate(proposal) if token_id < 0]
    return tuple(proposal[: ends[0]] if ends else proposal)


def _pinned_ints(driver: CudaDriver, count: int) -> IntArray:
    words: IntArray = driver.allocate_pinned(4 * count).view(np.int32)
    return words
