"""Speed of the CPU executor on the embedded model: prefill, and decode of 1 and of 8 rows.

    python -m bench.bench_cpu_executor [--model DIR] [--threads N] [--json OUT.json]

First checks that a batch of eight gives each row the bits it gets alone. Decode samples with
temperature, top_k and top_p; every figure is a median with the fastest and slowest run beside it.
Targets are those of two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from bench.common.record import commit, write_record
from ninfer import __version__
from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, Capacity, SampleRow, UnitRow
from ninfer.convert.source import open_model
from ninfer.program.executors.cpu import CpuExecutor

ROWS = 8
PROMPT_TOKENS = 512
CHUNK_TOKENS = 256
CONTEXT_TOKENS = 256
STEPS = 100
REPEATS = 7
SAMPLING = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=1)
PAGES_PER_ROW = (max(PROMPT_TOKENS, CONTEXT_TOKENS + STEPS) + 1) // PAGE_TOKENS + 1
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens a second over the repeats."""

    name: str
    median: float
    slowest: float
    fastest: float
    target: float


class Bench:
    """Rows with scattered pages on one executor."""

    def __init__(self, executor: CpuExecutor, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self._executor = executor
        self._tokens = rng.integers(0, vocab_size, PROMPT_TOKENS).astype(np.int32)
        pages = rng.permutation(ROWS * PAGES_PER_ROW).astype(np.int32)
        self._tables = pages.reshape(ROWS, PAGES_PER_ROW)

    async def check(self) -> None:
        """Eight rows together equal each alone. Raises InvariantError."""
        await self._open(ROWS)
        rows = tuple(self._row(index, 0) for index in range(ROWS))
        together = await self._executor.decode(rows)
        alone = [(await self._executor.decode((row,)))[0] for row in rows]
        if list(together) != alone:
            raise InvariantError("a row's token depends on its batch")

    async def prefill(self) -> int:
        """One prompt in chunks; returns its tokens."""
        for start in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
            await self._executor.prefill(self._prompt_row(0, start, start + CHUNK_TOKENS))
        return PROMPT_TOKENS

    async def decode(self, num_rows: int) -> int:
        """STEPS steps of `num_rows` rows; returns their tokens."""
        for step in range(STEPS):
            rows = tuple(self._row(index, step) for index in range(num_rows))
            await self._executor.decode(rows)
        return STEPS * num_rows

    async def _open(self, num_rows: int) -> None:
        for index in range(num_rows):
            await self._executor.prefill(self._prompt_row(index, 0, CONTEXT_TOKENS))

    def _prompt_row(self, index: int, start: int, stop: int) -> UnitRow:
        return UnitRow(
            token_ids=self._tokens[start:stop],
            start=start,
            page_table=self._tables[index],
            read_slot=ROOT_SLOT if start == 0 else _slot(index, start),
            write_slot=_slot(index, 0 if start == 0 else start + 1),
        )

    def _row(self, index: int, step: int) -> UnitRow:
        position = CONTEXT_TOKENS + step
        sample = SampleRow(SAMPLING, position + 1, NO_TOKENS, NO_TOKENS, NO_TOKENS)
        return UnitRow(
            token_ids=self._tokens[step : step + 1],
            start=position,
            page_table=self._tables[index],
            read_slot=_slot(index, step),
            write_slot=_slot(index, step + 1),
            sample=replace(sample, params=replace(SAMPLING, seed=index)),
        )


def _slot(index: int, parity: int) -> int:
    return 1 + 2 * index + parity % 2


async def figure(name: str, run: Callable[[], Awaitable[int]], target: float) -> Figure:
    await run()
    rates = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        num_tokens = await run()
        rates.append(num_tokens / (time.perf_counter() - began))
    return Figure(name, statistics.median(rates), min(rates), max(rates), target)


async def measure(model: Path, num_threads: int | None) -> tuple[list[Figure], dict[str, Any]]:
    source = open_model(model)
    weights = {item.name: array for item, array in source.read_float32()}
    capacity = Capacity(
        max_concurrency=ROWS,
        max_context=PAGES_PER_ROW * PAGE_TOKENS,
        num_pages=ROWS * PAGES_PER_ROW,
        num_slots=1 + 2 * ROWS,
        prefill_chunk=CHUNK_TOKENS,
    )
    executor = CpuExecutor(source.config, weights, capacity, num_threads=num_threads)
    try:
        bench = Bench(executor, source.config.vocab_size)
        await bench.check()
        figures = [
            await figure("prefill", bench.prefill, 2000.0),
            await figure("decode, 1 row", lambda: bench.decode(1), 60.0),
            await figure("decode, 8 rows", lambda: bench.decode(ROWS), 250.0),
        ]
        return figures, environment(source.name)
    finally:
        executor.close()


def environment(model: str) -> dict[str, Any]:
    """The machine and the versions behind the figures."""
    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "model": model,
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "blas": [
            {key: pool[key] for key in ("internal_api", "version", "architecture", "num_threads")}
            for pool in blas
        ],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ninfer": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python -m bench.bench_cpu_executor", *sys.argv[1:]]),
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path(str(files("ninfer") / "data/demo_model"))
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="of a product; default the BLAS's"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    arguments = parser.parse_args()
    figures, machine = asyncio.run(measure(arguments.model, arguments.threads))
    for item in figures:
        print(
            f"{item.name:15} {item.median:8.0f} tokens/s"
            f"   slowest {item.slowest:8.0f}   fastest {item.fastest:8.0f}"
            f"   target {item.target:g}"
        )
    if arguments.json is not None:
        record = {
            "machine": machine,
            "figures": [
                {name: getattr(item, name) for name in Figure.__dataclass_fields__}
                for item in figures
            ],
        }
        write_record(arguments.json, record)


if __name__ == "__main__":
    main()
