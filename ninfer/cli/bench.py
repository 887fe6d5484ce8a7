"""`ninfer bench`: prompts and decode steps on a GPU, as a table and as a record."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ninfer import __version__
from ninfer.cli.console import Console
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.layout import table
from ninfer.cli.loading import open_named_model
from ninfer.cli.output_files import check_writable, write_file
from ninfer.cli.parser import Invocation
from ninfer.cli.progress import ProgressLine
from ninfer.options import BenchOptions, EngineOptions
from ninfer.program.benchmark import BenchCase, CaseFigures
from ninfer.program.cuda_bench import BenchSetup, open_benchmark, open_synthetic_benchmark

_EXTRA_TOKENS: Final = 64
"""Context beyond prompt and output: warm-up steps."""


def run(invocation: Invocation, console: Console) -> ExitCode:
    options = invocation.read(BenchOptions)
    if options.record is not None:
        check_writable("--record", Path(options.record))
    cases = [BenchCase(prompt, batch, options.output) for prompt, batch in options.cases]
    engine_options = _sized(invocation.read(EngineOptions), cases)
    with _opened(invocation, options, engine_options, console) as setup:
        console.write_lines(_heading(setup))
        figures = []
        for case in cases:
            figures.append(asyncio.run(setup.benchmark.run(case)))
            console.write_lines(_as_table(figures[-1]))
    if options.record is not None:
        _write_record(Path(options.record), setup, figures)
    return ExitCode.OK


def _sized(options: EngineOptions, cases: list[BenchCase]) -> EngineOptions:
    """Lanes and context of the largest case, unless asked for otherwise."""
    context = max(case.prompt_tokens + case.output_tokens for case in cases) + _EXTRA_TOKENS
    return dataclasses.replace(
        options,
        max_concurrency=max(case.batch for case in cases),
        max_context=options.max_context or context,
    )


@contextmanager
def _opened(
    invocation: Invocation, options: BenchOptions, engine_options: EngineOptions, console: Console
) -> Iterator[BenchSetup]:
    with ProgressLine(console, "loading") as line:
        if options.synthetic is not None:
            setup = open_synthetic_benchmark(options.synthetic, engine_options)
        else:
            source = open_named_model(invocation.model_path)
            setup = open_benchmark(source, engine_options, line)
    try:
        yield setup
    finally:
        setup.executor.close()


def _heading(setup: BenchSetup) -> str:
    plan = setup.plan
    return table(
        [
            ("model", setup.name),
            ("device", setup.device_name),
            ("weights", f"{setup.weight_format}, {plan.weights_bytes / 1e9:.2f} GB"),
            ("KV", setup.kv_dtype),
            ("read rate R", f"{setup.read_rate / 1e12:.3f} TB/s"),
            ("start", f"{setup.start_s:.2f} s"),
        ]
    )


def _as_table(figures: CaseFigures) -> str:
    case = figures.case
    families = sorted(figures.family_s.items(), key=lambda item: -item[1])
    total = sum(figures.family_s.values())
    return "\n" + table(
        [
            ("case", f"{case.prompt_tokens} tokens x {case.batch}, {case.output_tokens} steps"),
            (
                "prefill",
                f"{figures.prefill_tokens_s:,.0f} tokens/s, {figures.prefill_s.median * 1e3:.2f} ms"
                f" (spread {figures.prefill_s.spread:.0%}),"
                f" {figures.prefill_flop_s / 1e12:.0f} TFLOP/s",
            ),
            (
                "decode",
                f"{figures.tokens_s:,.1f} tokens/s, {_us(figures.step_s.median)} a step"
                f" (p95 {_us(figures.step_s.p95)}, device {_us(figures.device_step_s.median)})",
            ),
            (
                "floor",
                f"{_us(figures.floor_s)} for {figures.bytes_a_step / 1e9:.3f} GB:"
                f" {figures.fraction:.1%} reached, {figures.device_fraction:.1%} on the device",
            ),
            ("host gap", _us(figures.host_gap_s)),
            ("kernels a step", str(figures.kernels_a_step)),
            *((f"  {name}", f"{_us(s)}, {s / total:.0%}") for name, s in families),
        ]
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def _write_record(path: Path, setup: BenchSetup, figures: list[CaseFigures]) -> None:
    record: dict[str, Any] = {
        "model": setup.name,
        "device": setup.device_name,
        "weights": setup.weight_format,
        "kv_dtype": setup.kv_dtype,
        "read_rate": setup.read_rate,
        "start_s": setup.start_s,
        "plan": dataclasses.asdict(setup.plan),
        "cases": [dataclasses.asdict(item) for item in figures],
        "python": platform.python_version(),
        "ninfer": __version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    data = (json.dumps(record, indent=1) + "\n").encode()
    write_file("--record", path, lambda file: file.write(data))
