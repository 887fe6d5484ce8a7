"""The device's idle time between two decode steps while clients stream over HTTP, and the start.

    python -m bench.bench_host_gap --out DIR [--synthetic qwen3.5-4b] [--weights bf16]
                                   [--kernels DIR] [--folder DIR]

Writes a model with made-up weights into a temporary folder (of --folder), serves it in a process
of its own (bench/common/watched_server.py says what is measured there), and streams from it with
one and with eight clients. Start to ready is of the same process, its kernels compiled before when
--kernels says where, its file in the page cache: `file_read_s` is what reading that takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

import aiohttp
import cupy

from bench.bench_http import peak_mib, served, stream_once
from bench.common.made_up_model import write_model
from bench.common.record import environment, write_record
from ninfer.models.synthetic import SYNTHETIC_MODELS

_CLIENTS: Final = (1, 8)
_TOKENS: Final = 200
_WARM_UP_TOKENS: Final = 16
_TARGETS_US: Final = {"1": 60.0, "8": 150.0}
_BLOCK_BYTES: Final = 1 << 26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--synthetic", choices=SYNTHETIC_MODELS, default="qwen3.5-4b")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--kernels")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        model, record = Path(folder) / arguments.synthetic, Path(folder) / "record.json"
        size = write_model(model, arguments.synthetic)
        file_read_s = _read_time(model / "model.safetensors")
        options = ["--executor", "cuda", "--weights", arguments.weights]
        options += ["--max-concurrency", str(max(_CLIENTS)), "--max-context", "4096"]
        if arguments.kernels is not None:
            options += ["--kernels", arguments.kernels]
        with (arguments.out / "host_gap_server.log").open("wb") as log:
            figures = asyncio.run(_measure(record, str(model), options, log))
        figures["steps"] = json.loads(record.read_text())
    figures |= {"weights_bytes": size, "file_read_s": file_read_s}
    _print(figures)
    write_record(
        arguments.out / "host_gap.json",
        {
            **environment(cupy),
            "model": arguments.synthetic,
            "weights": arguments.weights,
            "targets_us": _TARGETS_US,
            **figures,
        },
    )


async def _measure(record: Path, model: str, options: list[str], log: BinaryIO) -> dict[str, Any]:
    command = ["-m", "bench.common.watched_server", str(record), model, *options]
    async with (
        served(*command, log=log) as (url, process_id, ready_s),
        aiohttp.ClientSession() as session,
    ):
        rates, firsts = {}, {}
        for clients in _CLIENTS:
            await _stream(session, url, clients, _WARM_UP_TOKENS)
            started = time.perf_counter()
            tokens, first_s = await _stream(session, url, clients, _TOKENS)
            rates[str(clients)] = tokens / (time.perf_counter() - started)
            firsts[str(clients)] = 1e3 * first_s
        peak = peak_mib(process_id)
    return {"ready_s": ready_s, "tokens_s": rates, "first_token_ms": firsts, "peak_mib": peak}


async def _stream(
    session: aiohttp.ClientSession, url: str, clients: int, num_tokens: int
) -> tuple[int, float]:
    """Tokens that all clients got, and the median of the seconds to the first."""
    results = await asyncio.gather(
        *(stream_once(session, url, seed, num_tokens) for seed in range(clients))
    )
    return sum(tokens for _, tokens in results), statistics.median(first for first, _ in results)


def _read_time(path: Path) -> float:
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        block = bytearray(_BLOCK_BYTES)
        while file.readinto(block):
            pass
    return time.perf_counter() - started


def _print(figures: dict[str, Any]) -> None:
    print(
        f"start to ready {figures['ready_s']:.2f} s, reading the {figures['weights_bytes']:,} bytes"
        f" alone {figures['file_read_s']:.2f} s, peak memory {figures['peak_mib']:.0f} MiB"
    )
    for rows, step in figures["steps"].items():
        columns = ", ".join(
            f"{name.removesuffix('_us')} {values['median']:.0f} (p95 {values['p95']:.0f})"
            for name, values in step.items()
        )
        rate = figures["tokens_s"].get(rows)
        first_ms = figures["first_token_ms"].get(rows)
        shown = "" if rate is None else f"{rate:.0f} tokens/s, first token {first_ms:.0f} ms"
        print(f"{rows} rows: us {columns}; {step['gap_us']['count']} steps {shown}")


if __name__ == "__main__":
    main()
