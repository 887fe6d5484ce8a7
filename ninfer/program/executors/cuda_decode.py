"""DecodeSteps: decode steps as replayed graphs, each queued while the one before it still runs.

plain rows   one graph: layers, logits, choice; the step behind it is queued before its tokens
             are known, as the choice leaves them where the next embedding reads them
others       a graph up to the logits; the choice, under masks and counts that follow from the
             tokens before, is queued apart. Behind it the layers of the next step are queued,
             so that the device works while the host finds out what the next token may be
"""

from __future__ import annotations

from collections.abc import Callable

from ninfer.contract.arrays import IntArray
from ninfer.contract.units import RowOutput, UnitRow
from ninfer.program.executors.cuda_choice import TokenChoice, samples_of, unused_sample
from ninfer.program.executors.cuda_driver import CudaDriver, Graph
from ninfer.program.executors.cuda_mover import CudaMover
from ninfer.program.executors.cuda_run_ahead import StepAhead, are_plain, can_go_on, following
from ninfer.program.executors.cuda_watch import DeviceWatch
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.graphs import DecodeGraphs

WarmUpRows = Callable[[int], tuple[UnitRow, ...]]
QueueStep = Callable[[int, bool], None]
"""Queues a step of so many rows; with its choice or up to the logits."""


class DecodeSteps:
    """Captures its graphs at once."""

    def __init__(
        self,
        driver: CudaDriver,
        watch: DeviceWatch,
        workspace: Workspace,
        mover: CudaMover,
        choice: TokenChoice,
        *,
        max_rows: int,
        has_states: bool,
        queue_step: QueueStep,
        warm_up_rows: WarmUpRows,
    ) -> None:
        self._driver = driver
        self._watch = watch
        self._workspace = workspace
        self._mover = mover
        self._choice = choice
        self._has_states = has_states
        self._ahead: StepAhead | None = None
        self._has_inputs = False
        self._queue_step_of = queue_step
        self._warm_up_rows = warm_up_rows
        self.graphs = self._capture(max_rows, chooses=True)
        self._forwards = self._capture(max_rows, chooses=False)

    async def run(self, rows: tuple[UnitRow, ...], *, goes_on: bool) -> tuple[RowOutput, ...]:
        """One step of `rows`, each of one input. Raises DeviceError."""
        may_go_on = goes_on and can_go_on(rows, has_states=self._has_states)
        step, places = await self._take_ahead(rows)
        if step is None:
            step = self._queue_step(rows, chooses=are_plain(rows))
        if not step.is_chosen:
            await self._choose(step, rows, places)
        if places != tuple(range(len(step.rows))):
            self._has_inputs = False
        run = self._go_on if may_go_on else self._outputs
        outputs = await run(step, rows, places)
        return tuple(
            RowOutput(None) if row.sample is None else output
            for row, output in zip(rows, outputs, strict=True)
        )

    async def _take_ahead(
        self, rows: tuple[UnitRow, ...]
    ) -> tuple[StepAhead | None, tuple[int, ...]]:
        """The step ahead, if it serves `rows`, and which of its rows they are; else where they are
        in a step of their own."""
        step, self._ahead = self._ahead, None
        if step is not None:
            places = step.places_of(rows)
            if places is not None:
                return step, places
            await self._drop(step)
        return None, tuple(range(len(rows)))

    async def make_way(self, slot: int) -> None:
        """Before a unit that uses the sampler and the logits, and writes StateImage `slot`."""
        if self._ahead is not None and self._ahead.is_chosen:
            await self._results(self._ahead)
            self._ahead.spoil(slot)
        elif self._ahead is not None:
            await self._drop(self._ahead)
            self._ahead = None
        self._has_inputs = False

    def spoil(self, slot: int) -> None:
        """Something else writes this StateImage."""
        if self._ahead is not None:
            self._ahead.spoil(slot)

    def _capture(self, max_rows: int, *, chooses: bool) -> DecodeGraphs[Graph]:
        return DecodeGraphs(
            self._driver,
            max_rows,
            prepare=self._prepare,
            enqueue=lambda num_rows: self._queue_step_of(num_rows, chooses),
        )

    def _prepare(self, num_rows: int) -> None:
        rows = self._warm_up_rows(num_rows)
        self._write_inputs(rows)
        self._workspace.sampler.write(samples_of(rows))
        self._workspace.decode_inputs.queue_copy(num_rows, num_rows)
        self._workspace.sampler.queue_copy_in(num_rows)

    def _queue_step(self, rows: tuple[UnitRow, ...], *, chooses: bool) -> StepAhead:
        """Queue a step whose tokens are known. Nothing may be queued."""
        self._write_inputs(rows)
        if chooses:
            self._workspace.sampler.write(samples_of(rows))
        self._has_inputs = True
        self._mover.queue_copies(rows)
        return self._queue_graph(rows, chooses=chooses)

    def _write_inputs(self, rows: tuple[UnitRow, ...]) -> None:
        self._workspace.decode_inputs.write_decode(rows)
        self._workspace.sampler.write_tokens([row.token_ids.item(0) for row in rows])

    def _queue_graph(self, rows: tuple[UnitRow, ...], *, chooses: bool) -> StepAhead:
        """Queue a step whose inputs are written, and the mark behind it."""
        inputs, sampler, num_rows = (
            self._workspace.decode_inputs,
            self._workspace.sampler,
            len(rows),
        )
        inputs.queue_copy(num_rows, num_rows)
        if chooses:
            sampler.queue_copy_in(num_rows)
            self.graphs.replay(num_rows)
            sampler.queue_copy_out(num_rows)
            place = sampler.side
        else:
            self._forwards.replay(num_rows)
            place = sampler.next_side
        self._driver.mark(place)
        return StepAhead(rows, place, is_chosen=chooses)

    async def _choose(
        self, step: StepAhead, rows: tuple[UnitRow, ...], places: tuple[int, ...]
    ) -> None:
        """Queue the choice of a step that runs up to its logits, as `rows` want it; those of its
        own that are not among them choose anyhow."""
        wanted = [unused_sample()] * len(step.rows)
        for place, sample in zip(places, samples_of(rows), strict=True):
            wanted[place] = sample
        await self._choice.queue(wanted)
        step.note_choice(self._workspace.sampler.side, wanted)

    async def _go_on(
        self, step: StepAhead, rows: tuple[UnitRow, ...], places: tuple[int, ...]
    ) -> tuple[RowOutput, ...]:
        """What `step` has of `rows`; the step behind these is queued, before the results are known
        where its inputs follow, and kept if every row has a token."""
        ahead = self._queue_behind(rows) if self._has_inputs else None
        outputs = await self._outputs(step, rows, places)
        token_ids = [output.token.token_id for output in outputs if output.token is not None]
        if len(token_ids) == len(rows):
            behind = following(rows, token_ids)
            if ahead is None:
                self._ahead = self._queue_step(behind, chooses=are_plain(rows))
            else:
                self._ahead = ahead.of(behind)
        elif ahead is not None:
            await self._drop(ahead)
        return outputs

    def _queue_behind(self, rows: tuple[UnitRow, ...]) -> StepAhead:
        """Queue the step behind that of `rows`, whose tokens are not known yet."""
        inputs, is_plain = self._workspace.decode_inputs, are_plain(rows)
        inputs.advance(len(rows))
        # These rows may show a page that the step itself did not need.
        inputs.write_tables(rows)
        if is_plain:
            self._workspace.sampler.advance(len(rows))
        return self._queue_graph(rows, chooses=is_plain)

    async def _outputs(
        self, step: StepAhead, rows: tuple[UnitRow, ...], places: tuple[int, ...]
    ) -> tuple[RowOutput, ...]:
        """What a step that has chosen has of `rows`, which are those at `places` of it."""
        outputs = self._workspace.sampler.parse(step.samples, await self._results(step))
        return tuple(outputs[place] for place in places)

    async def _results(self, step: StepAhead) -> IntArray:
        """What the sampler made of a step that has chosen."""
        if step.results is None:
            await self._watch.passed(step.place)
            step.results = self._workspace.sampler.results(len(step.rows), step.place)
        return step.results

    async def _drop(self, step: StepAhead) -> None:
        """Nobody wants it; wait until it has run."""
        if step.results is None:
            await self._watch.passed(step.place)
        self._has_inputs = False
