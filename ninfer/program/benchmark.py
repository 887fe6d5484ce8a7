"""ModelBenchmark: prompts and decode steps of one model on the CUDA executor, timed.

Runs through the executor's own calls, as an Engine would, greedily, on made-up prompts. Wall times
are those an event loop sees; device times are of replayed graphs between two events.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, Capacity, RowOutput, SampleRow, UnitRow
from ninfer.options import flag_of
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_weights import WeightPlan
from ninfer.program.traffic import prompt_flop, step_traffic

_WARM_UP_STEPS: Final = 4
_PREFILL_REPEATS: Final = 3
_DEVICE_REPEATS: Final = 20
_LONG_PREFILL_S: Final = 4.0
"""A prompt that takes longer is measured once, warm or not."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """`batch` sequences of `prompt_tokens`, then `output_tokens` decode steps."""

    prompt_tokens: int
    batch: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Of repeated measurements; `spread` is (largest - smallest) / median."""

    median: float
    p95: float
    spread: float


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """What one case took.

    prefill_s         one prompt from the first chunk to its token
    prefill_flop_s    model FLOP a second of it
    step_s            from the end of a decode step to the end of the next, seen by the event loop
    device_step_s     the same step's graph on the device
    host_gap_s        step_s less device_step_s, medians
    floor_s           bytes_a_step at the read rate
    fraction          floor_s / step_s;  device_fraction   floor_s / device_step_s
    family_s          by kernel family, kernels one after another
    """

    case: BenchCase
    prefill_s: Spread
    prefill_tokens_s: float
    prefill_flop_s: float
    step_s: Spread
    device_step_s: Spread
    host_gap_s: float
    tokens_s: float
    bytes_a_step: int
    bytes_a_token: float
    floor_s: float
    fraction: float
    device_fraction: float
    kernels_a_step: int
    family_s: Mapping[str, float]


class ModelBenchmark:
    """Cases one after another on one executor."""

    def __init__(
        self,
        config: ModelConfig,
        executor: CudaExecutor,
        capacity: Capacity,
        weights: WeightPlan,
        *,
        kv_dtype: str,
        read_rate: float,
    ) -> None:
        self._config = config
        self._executor = executor
        self._capacity = capacity
        self._weights = weights
        self._kv_dtype = kv_dtype
        self._read_rate = read_rate
        self._rng = np.random.default_rng(0)

    async def run(self, case: BenchCase) -> CaseFigures:
        """Raises OptionError when the capacity does not hold the case."""
        self._check(case)
        sequences = [_Sequence(index, self._capacity) for index in range(case.batch)]
        prefill_s = await self._prefill_times(sequences, case)
        step_s = await self._step_times(sequences, case)
        return self._figures(case, prefill_s, step_s)

    def _check(self, case: BenchCase) -> None:
        tokens = case.prompt_tokens + case.output_tokens + _WARM_UP_STEPS
        pages = case.batch * -(-self._capacity.max_context // PAGE_TOKENS)
        if case.batch > self._capacity.max_concurrency or tokens > self._capacity.max_context:
            raise OptionError(flag_of("max_context"), f"too small for {case}")
        if pages > self._capacity.num_pages:
            raise OptionError(flag_of("memory_budget"), f"too few pages for {case}")

    async def _prefill_times(self, sequences: Sequence[_Sequence], case: BenchCase) -> list[float]:
        """The first sequence several times, after one run that does not count unless it is long;
        the others, whose pages must be filled too, once."""
        times: list[float] = []
        for sequence in (sequences[0], *([sequences[0]] * _PREFILL_REPEATS), *sequences[1:]):
            if sequence is sequences[0] and times and times[0] > _LONG_PREFILL_S:
                continue
            sequence.restart()
            prompt = self._rng.integers(0, self._config.vocab_size, case.prompt_tokens, np.int32)
            started = time.perf_counter()
            for first in range(0, prompt.size, self._capacity.prefill_chunk):
                part = prompt[first : first + self._capacity.prefill_chunk]
                output = await self._executor.prefill(
                    sequence.row(part, samples=first + part.size == prompt.size)
                )
                sequence.advance(part.size, output)
            times.append(time.perf_counter() - started)
        return times if len(times) < 2 or times[0] > _LONG_PREFILL_S else times[1:]

    async def _step_times(self, sequences: Sequence[_Sequence], case: BenchCase) -> list[float]:
        times = []
        num_steps = _WARM_UP_STEPS + case.output_tokens
        ended = time.perf_counter()
        for step in range(num_steps):
            rows = tuple(sequence.row(sequence.newest, samples=True) for sequence in sequences)
            outputs = await self._executor.decode(rows, goes_on=step + 1 < num_steps)
            before, ended = ended, time.perf_counter()
            times.append(ended - before)
            for sequence, output in zip(sequences, outputs, strict=True):
                sequence.advance(1, output)
        return times[_WARM_UP_STEPS:]

    def _figures(
        self, case: BenchCase, prefill_s: Sequence[float], step_s: Sequence[float]
    ) -> CaseFigures:
        driver, graphs = self._executor.driver, self._executor.graphs
        device_s = [
            driver.measure(lambda: graphs.replay(case.batch)) for _ in range(_DEVICE_REPEATS)
        ]
        counts: Counter[str] = Counter()
        with driver.traced(lambda family: counts.update((family,))):
            driver.capture(lambda: self._executor.queue_decode(case.batch))
        prefill, step, device = _spread(prefill_s), _spread(step_s), _spread(device_s)
        traffic = step_traffic(
            self._config,
            self._weights,
            kv_dtype=self._kv_dtype,
            num_rows=case.batch,
            context_tokens=case.prompt_tokens + case.output_tokens // 2,
        )
        floor_s = traffic.total_bytes / self._read_rate
        flop = prompt_flop(self._config, self._weights, case.prompt_tokens)
        return CaseFigures(
            case=case,
            prefill_s=prefill,
            prefill_tokens_s=case.prompt_tokens / prefill.median,
            prefill_flop_s=flop / prefill.median,
            step_s=step,
            device_step_s=device,
            host_gap_s=step.median - device.median,
            tokens_s=case.batch / step.median,
            bytes_a_step=traffic.total_bytes,
            bytes_a_token=traffic.total_bytes / case.batch,
            floor_s=floor_s,
            fraction=floor_s / step.median,
            device_fraction=floor_s / device.median,
            kernels_a_step=counts.total(),
            family_s=driver.time_families(lambda: self._executor.queue_decode(case.batch)),
        )


class _Sequence:
    """One made-up sequence on pages and slots of its own."""

    def __init__(self, index: int, capacity: Capacity) -> None:
        num_pages = -(-capacity.max_context // PAGE_TOKENS)
        self._pages = np.arange(index * num_pages, (index + 1) * num_pages, dtype=np.int32)
        self._slots = (1 + 2 * index, 2 + 2 * index)
        self.newest = np.zeros(1, np.int32)
        self.restart()

    def restart(self) -> None:
        self._frontier = 0
        self._slot = ROOT_SLOT

    def row(self, token_ids: np.typing.NDArray[np.int32], *, samples: bool) -> UnitRow:
        stop = self._frontier + token_ids.size
        return UnitRow(
            token_ids=token_ids,
            start=self._frontier,
            page_table=self._pages[: -(-stop // PAGE_TOKENS)],
            read_slot=self._slot,
            write_slot=self._next_slot(),
            sample=self._sample(stop) if samples else None,
        )

    def advance(self, num_tokens: int, output: RowOutput) -> None:
        self._slot = self._next_slot()
        self._frontier += num_tokens
        if output.token is not None:
            self.newest = np.array([output.token.token_id], np.int32)

    def _next_slot(self) -> int:
        return self._slots[1] if self._slot == self._slots[0] else self._slots[0]

    def _sample(self, position: int) -> SampleRow:
        nothing = np.empty(0, np.int32)
        return SampleRow(SamplingParams(), position, nothing, nothing, nothing)


def _spread(seconds: Sequence[float]) -> Spread:
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return Spread(median, p95, (ordered[-1] - ordered[0]) / median)
