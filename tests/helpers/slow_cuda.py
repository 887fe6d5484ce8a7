"""SlowCuda: a device that runs queued work late, in order, over a made-up model.

Nothing that was queued happens before a look sees the mark behind it, so host memory that is
written too early shows. The model keeps a hash in every StateImage slot and the tokens in the KV
pages; the next token follows from both and from how it is to be sampled. So a wrong slot, page,
place or token anywhere changes what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT
from ninfer.ops.device_sampling import MAX_TOP, ROW
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_driver import NUM_MARKS
from ninfer.program.executors.cuda_inputs import UnitTensors
from tests.helpers.fake_cuda import FakeCuda, Launch


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Where a replayed graph computes; without `sampling` it ends at the logits."""

    embedding: Launch
    sampling: Launch | None


class SlowCuda(FakeCuda):
    """`executor` is set once it is built; `draw_polls` says how late the next mark is seen."""

    def __init__(self, draw_polls: Callable[[], int]) -> None:
        super().__init__()
        self.executor: CudaExecutor | None = None
        self.num_steps = 0
        self._draw_polls = draw_polls
        self._waiting: list[Any] = []
        self._marked = [0] * NUM_MARKS
        self._prompt_tokens = 0
        self._logits: list[int] = []
        self._states: dict[int, int] = {ROOT_SLOT: 0}
        self._tokens: dict[tuple[int, int], int] = {}

    def queue(self, item: Any) -> None:
        if self._capture is not None:
            super().queue(item)
        else:
            self._waiting.append(item)

    def replay(self, graph: list[Any]) -> None:
        launches = self.launches(graph)
        last = launches[-1]
        if len(launches) == 1:
            self.queue(last)
            return
        self.queue(_Step(launches[0], last if last.family == "sampling" else None))

    def mark(self, place: int = 0) -> None:
        self.polls = self._draw_polls()
        super().mark(place)
        self._marked[place] = len(self._waiting)

    def has_passed(self, place: int = 0) -> bool:
        if not super().has_passed(place):
            return False
        self._run(self._marked[place])
        return True

    def synchronize(self) -> None:
        super().synchronize()
        self._run(len(self._waiting))

    def _run(self, count: int) -> None:
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        self._marked = [max(0, marked - count) for marked in self._marked]
        for item in ready:
            if callable(item):
                item()
            elif self.executor is not None:
                self._compute(self.executor, item)
        if self.executor is not None:
            self._end_prompt(self.executor, None)

    def _compute(self, executor: CudaExecutor, item: Any) -> None:
        if isinstance(item, _Step):
            self._step(executor, item)
        elif isinstance(item, Launch) and item.family == "embedding":
            self._prompt_tokens = item.grid[0]
        elif isinstance(item, Launch) and item.family == "sampling":
            self._end_prompt(executor, item)

    def _step(self, executor: CudaExecutor, step: _Step) -> None:
        """A decode step or a prompt's unit of few inputs: their tokens lie in different places."""
        count = step.embedding.grid[0]
        unit = executor.workspace.decode_inputs.tensors(1, 1)
        if int(step.embedding.arguments["token_ids"]) == unit.token_ids.address:
            self.num_steps += 1
            self._advance(executor.workspace.decode_inputs.tensors(count, count), step.sampling)
        else:
            self._advance(executor.small_units.tensors(count), step.sampling)

    def _end_prompt(self, executor: CudaExecutor, sampling: Launch | None) -> None:
        count, self._prompt_tokens = self._prompt_tokens, 0
        if count:
            self._advance(executor.workspace.prefill_inputs.tensors(1, count), sampling)
        elif sampling is not None:
            self._choose(sampling, self._logits[: sampling.grid[1]])

    def _advance(self, unit: UnitTensors, sampling: Launch | None) -> None:
        """Run every column of a unit, and choose a token a row."""
        token_ids, ordinals, starts, reads, writes, tables = (
            self.read(tensor).copy()
            for tensor in (
                unit.token_ids, unit.ordinals, unit.row_starts, unit.read_slots, unit.write_slots,
                unit.page_tables,
            )
        )  # fmt: skip
        chosen = []
        for row, (read, write) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
            state, seen = self._states[read], 0
            for column in range(starts[row], starts[row + 1]):
                if ordinals[column] < 0:
                    continue
                ordinal, token_id = int(ordinals[column]), int(token_ids[column])
                self._tokens[self._place(tables[row], ordinal)] = token_id
                state = hash((state, token_id, ordinal))
                seen = ordinal
            self._states[write] = state
            places = [self._place(tables[row], ordinal) for ordinal in range(seen + 1)]
            chosen.append(hash((state, *(self._tokens[place] for place in places))))
        self._logits = chosen
        if sampling is not None:
            self._choose(sampling, chosen)

    def _choose(self, sampling: Launch, hashes: list[int]) -> None:
        count, arguments = len(hashes), sampling.arguments
        rows = self.memory(int(arguments["rows"]), count * ROW.itemsize).view(ROW)
        results = np.zeros(count * (3 + 2 * MAX_TOP), np.int32)
        for index, value in enumerate(hashes):
            row = rows[index]
            counts = int(row["generated_count"]), float(row["presence"])
            drawn = hash((value, int(row["seed"]), int(row["position"]), counts))
            results[index] = drawn % int(arguments["num_valid_ids"])
        results[count : 2 * count] = 1
        address = int(arguments["token_ids"])
        self.memory(address, results.nbytes)[:] = results.view(np.uint8)

    @staticmethod
    def _place(table: np.typing.NDArray[np.int32], ordinal: int) -> tuple[int, int]:
        return int(table[ordinal // PAGE_TOKENS]), ordinal % PAGE_TOKENS
