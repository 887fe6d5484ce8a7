"""Host cost of a decode step: worker, Program and events at full lanes, with no model behind them.

    python -m bench.bench_scheduler [--lanes 8] [--tokens 512] [--repeats 9]

The executor answers at once, sessions show one delta a token and every consumer reads along, so
the time of a step is all host work between two model units.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    OutputPreview,
    RequestHandle,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.contract.units import Capacity, RowOutput, UnitRow
from ninfer.engine.core import Engine
from ninfer.program.program import ModelProgram
from tests.helpers.model_configs import hybrid_config

TARGET_US_PER_STEP = 500.0
"""Under half of the 1.1 ms that a decode step may take on the fastest device."""
OUTPUT = RowOutput(GeneratedToken(7))


class InstantExecutor:
    """Implements the contract's Executor without computing anything."""

    @property
    def name(self) -> str:
        return "cpu"

    async def prefill(self, row: UnitRow) -> RowOutput:
        return RowOutput(None) if row.sample is None else OUTPUT

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        return (OUTPUT,) * len(rows)

    async def score(self, row: UnitRow) -> Float32Array:
        raise InvariantError("nothing is scored here")

    def close(self) -> None:
        return None


class PlainSession:
    """Implements the contract's OutputSession: one delta a token, no stops."""

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        finish = None if limit is None else Finish(limit)
        delta = OutputDelta("content", "token", tuple(tokens))
        return OutputPreview(len(tokens), finish, (delta,), None)

    def goes_on_after(self, token: GeneratedToken) -> bool:
        return True

    def commit(self, preview: OutputPreview) -> None:
        return None

    def flush(self) -> tuple[OutputDelta, ...]:
        return ()


async def measure_us_per_step(num_lanes: int, num_tokens: int) -> tuple[float, float]:
    """(wall time, process time) of one decode step of all lanes, in microseconds."""
    max_context = num_tokens + 64
    num_pages = num_lanes * -(-max_context // 64)
    capacity = Capacity(num_lanes, max_context, num_pages, 2 * num_lanes + 1, 64)
    program = ModelProgram(hybrid_config(), InstantExecutor(), capacity)
    engine = Engine(program, max_pending=0, queue_timeout_s=60.0)
    await engine.start()
    try:
        handles = [engine.submit(_request(index, num_tokens)) for index in range(num_lanes)]
        wall, process = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(*map(_count_tokens, handles))
        wall, process = time.perf_counter() - wall, time.process_time() - process
    finally:
        await engine.aclose()
    if counts != [num_tokens] * num_lanes:
        raise InvariantError(f"lanes produced {counts} tokens")
    num_units = engine.metrics.num_decode_units + engine.metrics.num_prefill_units
    return wall / num_units * 1e6, process / num_units * 1e6


def _request(index: int, num_tokens: int) -> GenerationRequest:
    prompt = PreparedPrompt(np.arange(1, 9, dtype=np.int32))
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
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    asyncio.run(measure_us_per_step(arguments.lanes, 64))
    samples = [
        asyncio.run(measure_us_per_step(arguments.lanes, arguments.tokens))
        for _ in range(arguments.repeats)
    ]
    for label, times in zip(("wall", "process"), zip(*samples, strict=True), strict=True):
        ordered = sorted(times)
        print(
            f"{label:8} median {statistics.median(ordered):7.1f} us/step"
            f"   best {ordered[0]:7.1f}   worst {ordered[-1]:7.1f}"
            f"   target {TARGET_US_PER_STEP:g}"
        )


if __name__ == "__main__":
    main()
