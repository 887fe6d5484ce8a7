"""Host cost of a decode step at full lanes, with no model behind it.

    python -m bench.bench_scheduler [--lanes 8] [--tokens 512] [--entries 1000] [--repeats 9]

The executor answers at once, sessions show one delta a token and every consumer reads along, so
the time of a step is all host work between two model units. `order` is the part of Scheduler,
permits and context cache in it, in processor time: boundaries and launches without what the
Program does in them. The context cache holds so many entries of two pages.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer.contract.arrays import ByteArray, Float32Array
from ninfer.contract.cache import CheckpointKind
from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    OutputPreview,
    RequestHandle,
)
from ninfer.contract.program import Program
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.contract.units import Capacity, Move, RowOutput, UnitRow
from ninfer.engine.context.limits import CacheLimits, CacheMemory
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.core import Engine
from ninfer.program.program import ModelProgram
from tests.helpers.model_configs import hybrid_config

TARGET_US_PER_STEP = 500.0
"""Under half of the 1.1 ms that a decode step may take on the fastest device."""
TARGET_ORDER_US_PER_STEP = 50.0
ENTRY_TOKENS = 128
OUTPUT = RowOutput(GeneratedToken(7))


class InstantExecutor:
    """Implements the contract's Executor without computing anything."""

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def device_name(self) -> str:
        return "none"

    async def prefill(self, row: UnitRow) -> RowOutput:
        return RowOutput(None) if row.sample is None else OUTPUT

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        return (OUTPUT,) * len(rows)

    @property
    def max_draft_tokens(self) -> int:
        return 0

    @property
    def has_draft_model(self) -> bool:
        return False

    @property
    def pads_rows(self) -> bool:
        return False

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        raise InvariantError("no drafts are verified here")

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        raise InvariantError("no drafts are verified here")

    async def score(self, row: UnitRow) -> Float32Array:
        raise InvariantError("nothing is scored here")

    @property
    def page_bytes(self) -> int:
        return 64

    @property
    def slot_bytes(self) -> int:
        return 64

    @property
    def host_blocks(self) -> ByteArray:
        return np.empty((0, self.page_bytes), np.uint8)

    async def save(self, move: Move) -> None:
        return None

    async def load(self, move: Move) -> None:
        return None

    def close(self) -> None:
        return None


class PlainSession:
    """Implements the contract's OutputSession: one delta a token, no stops."""

    @property
    def reasoning_tokens(self) -> int:
        return 0

    @property
    def broken_calls(self) -> int:
        return 0

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        finish = None if limit is None else Finish(limit)
        delta = OutputDelta("content", "token", tuple(tokens))
        return OutputPreview(len(tokens), finish, (delta,), None)

    def goes_on_after(self, token: GeneratedToken) -> bool:
        return True

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[None]:
        return (None,) * len(token_ids)

    def commit(self, preview: OutputPreview) -> None:
        return None

    def flush(self) -> tuple[OutputDelta, ...]:
        return ()


class TimedProgram:
    """A Program that knows how long launches and the permits before them have spent in it."""

    TIMED = frozenset({"reserve_units", "launch_decode", "launch_prefill"})

    def __init__(self, program: Program) -> None:
        self._program = program
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._program, name)
        if name not in self.TIMED:
            return value

        def timed(*args: Any, **options: Any) -> Any:
            started = time.thread_time()
            try:
                return value(*args, **options)
            finally:
                self.seconds += time.thread_time() - started

        setattr(self, name, timed)
        return timed


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of one decode step of all lanes."""

    wall: float
    process: float
    order: float


async def measure(num_lanes: int, num_tokens: int, num_entries: int) -> StepCost:
    max_context = num_tokens + ENTRY_TOKENS
    num_pages = num_lanes * -(-max_context // 64) + 2 * num_entries
    capacity = Capacity(
        num_lanes, max_context, num_pages, 2 * num_lanes + 1 + num_entries, ENTRY_TOKENS
    )
    program = TimedProgram(ModelProgram(hybrid_config(), InstantExecutor(), capacity))
    cache = ContextCache(program, CacheMemory(64, 64), CacheLimits(max_entries=num_entries))
    engine = Engine(program, max_pending=num_lanes, queue_timeout_s=60.0, policy=cache)
    await engine.start()
    try:
        for index in range(num_entries):
            await _count_tokens(engine.submit(_request(index, ENTRY_TOKENS - 2, 4)))
        if program.occupancy().num_checkpoints < num_entries // 2:
            raise InvariantError(f"{program.occupancy().num_checkpoints} entries")
        await asyncio.sleep(0)
        return await _measure_steps(engine, program, num_lanes, num_tokens)
    finally:
        await engine.aclose()


async def _measure_steps(
    engine: Engine, program: TimedProgram, num_lanes: int, num_tokens: int
) -> StepCost:
    metrics = engine.metrics
    num_before = metrics.num_decode_units + metrics.num_prefill_units
    order_before, inside_before = metrics.scheduling_s_total, program.seconds
    handles = [engine.submit(_request(-1 - i, 8, num_tokens)) for i in range(num_lanes)]
    wall, process = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*map(_count_tokens, handles))
    wall, process = time.perf_counter() - wall, time.process_time() - process
    if counts != [num_tokens] * num_lanes:
        raise InvariantError(f"lanes produced {counts} tokens")
    num_units = metrics.num_decode_units + metrics.num_prefill_units - num_before
    inside = program.seconds - inside_before
    order = metrics.scheduling_s_total - order_before - inside
    return StepCost(*(seconds / num_units * 1e6 for seconds in (wall, process, order)))


def _request(index: int, num_prompt_tokens: int, num_tokens: int) -> GenerationRequest:
    """A raw prompt of its own."""
    token_ids = np.random.default_rng(index % 2**32).integers(1, 64, num_prompt_tokens)
    tail = PromptFrontier(num_prompt_tokens - 1, CheckpointKind.PROMPT_TAIL)
    prompt = PreparedPrompt(token_ids.astype(np.int32), frontiers=(tail,))
    return GenerationRequest(
        f"r{index}", prompt, SamplingParams(), PlainSession(), max_tokens=num_tokens
    )


async def _count_tokens(handle: RequestHandle) -> int:
    count = 0
    async with handle:
        async for event in handle:
            count = event.usage.completion_tokens
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    cases = [
        asyncio.run(measure(arguments.lanes, arguments.tokens, arguments.entries))
        for _ in range(arguments.repeats)
    ]
    targets = {"wall": TARGET_US_PER_STEP, "process": None, "order": TARGET_ORDER_US_PER_STEP}
    for label, target in targets.items():
        ordered = sorted(getattr(case, label) for case in cases)
        print(
            f"{label:8} median {statistics.median(ordered):7.1f} us/step"
            f"   best {ordered[0]:7.1f}   worst {ordered[-1]:7.1f}"
            + ("" if target is None else f"   target {target:g}")
        )


if __name__ == "__main__":
    main()
