"""Whether answers with drafts are those without: the demo model, all kinds of requests and drafts.

    python -m bench.check_speculation [--prompts N] [--tokens N] [--passes N]
        [--json bench/results/NAME.json]
    python -m bench.check_speculation --device [--prompts N] [--tokens N] [--most-seconds N]
        [--lengths K ..] [--rows B ..] [--kernels DIR] [--json bench/results/NAME.json]

Every prompt is asked once without drafts. Then texts, tokens, log probabilities, calls and ends are
compared: greedy and sampled, with penalties, bias, stops, minimal lengths, grammars, thoughts and
tools. Who drafts changes from prompt to prompt and from setting to setting. Every other setting has
too few pages, so that requests are paused. One difference is a failure.

On the CPU each pass goes through all draft lengths and batch sizes, as many prompts at once as
there are rows; in every third setting a request is asked again and cancelled. With --device
all prompts are asked in each setting on a GPU, the plain answers too, at most B of them at once,
and one of every kind again to be cancelled. The most important settings come first; the record says
which ones were checked when the time was over.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from bench.common.record import environment, host, write_record
from bench.common.speculation_full import FullPlan, check_full
from bench.common.speculation_record import figures
from bench.common.speculation_settings import (
    FULL_LENGTHS,
    FULL_ROWS,
    MOST_ROWS,
    sample_settings,
)
from ninfer.contract.model import ModelSource
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import load_cuda
from tests.helpers.guided_rig import MAX_CONTEXT, load_guided_model
from tests.helpers.kept_executors import SizedExecutor
from tests.helpers.speculation_matrix import Matrix, Tally, cases

MOST_LISTED: Final = 40
DEVICE_OPTIONS: Final = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=MOST_ROWS,
    max_context=MAX_CONTEXT,
    memory_budget=4 << 30,
    host_cache_bytes=64 << 20,
    prefill_chunk=128,
)


async def check(
    num_prompts: int,
    num_tokens: int,
    num_passes: int,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """`report` is told of everything so far after each pass."""
    matrix = Matrix(load_guided_model(), cases(num_prompts, num_tokens))
    started = time.process_time()
    await matrix.ask_plain()
    print(f"plain: {time.process_time() - started:.0f} s of processor time", flush=True)
    tally, indices = Tally(), cycle(range(num_prompts))
    for number in range(num_passes):
        for setting in sample_settings(number):
            await matrix.check(setting, tuple(islice(indices, setting.lanes)), tally)
        report(
            {
                "prompts": num_prompts,
                "tokens_a_prompt": num_tokens,
                "passes": number + 1,
                "plain_tokens": sum(len(item.tokens) for item in matrix.plain),
                **figures(tally),
                "processor_s": round(time.process_time() - started),
            }
        )


def build_on_device(
    source: ModelSource, kernels: str | None, draft_tokens: int, has_draft_model: bool
) -> SizedExecutor:
    """Raises OptionError and DeviceError."""
    options = replace(DEVICE_OPTIONS, kernels=kernels)
    if draft_tokens > 0:
        spec = "mtp" if has_draft_model else "ngram"
        options = replace(options, spec=spec, draft_tokens=draft_tokens)
    built = load_cuda(source, options, lambda *_: None)
    return SizedExecutor(built.executor, built.plan.memory.capacity)


class Reporter:
    """Prints what was found and writes it to `path`, each time all of it."""

    def __init__(self, path: Path | None, surroundings: Callable[[], dict[str, Any]]) -> None:
        self._path = path
        self._surroundings = surroundings
        self.found: dict[str, Any] = {}

    def of_pass(self, found: dict[str, Any]) -> None:
        self._keep(found)
        print(f"{summary(found)} ({found['processor_s']} s of processor time)", flush=True)

    def of_setting(self, found: dict[str, Any]) -> None:
        self._keep(found)
        line = setting_line(found["rows"][-1]) if found["rows"] else "plain answers"
        print(f"{line}; {found['seconds']} s in all", flush=True)

    def _keep(self, found: dict[str, Any]) -> None:
        self.found = found
        if self._path is not None:
            write_record(self._path, {**self._surroundings(), **found})


def summary(found: dict[str, Any]) -> str:
    return (
        f"{found['answers']} answers of {found['tokens']} tokens in {found['settings']} settings,"
        f" {found['pauses']} pauses, {found['cancelled']} cancelled:"
        f" {len(found['differing'])} differ"
    )


def setting_line(row: dict[str, Any]) -> str:
    return (
        f"{setting_name(row)}: {row['answers']} answers of {row['tokens']} tokens,"
        f" {row['accepted']} of {row['drafted']} drafted accepted, {row['pauses']} pauses,"
        f" {row['cancelled']} cancelled: {row['differing']} differ ({row['seconds']} s)"
    )


def setting_name(row: dict[str, Any]) -> str:
    by = "mtp" if row["has_draft_model"] else "ngram"
    return (
        f"K={row['draft_tokens']} B={row['lanes']} {by},"
        f" {row['num_pages']} pages, {row['host_blocks']} host blocks"
    )


def print_end(found: dict[str, Any]) -> None:
    """Of a run on a device: all differences, or the first of many, and the summary."""
    for item in found["differing"][:MOST_LISTED]:
        print(f"differs: {setting_name(item)}, shift {item['shift']}: prompt {item['prompt']}")
    print(f"{summary(found)} ({found['seconds']} s); {found['settings_wanted']} settings wanted")


def exit_code(found: dict[str, Any]) -> int:
    return 1 if found.get("differing") else 0


def run_on_device(arguments: argparse.Namespace) -> dict[str, Any]:
    import cupy

    model = load_guided_model()
    plan = FullPlan(
        num_prompts=arguments.prompts,
        num_tokens=arguments.tokens,
        lengths=arguments.lengths,
        row_counts=arguments.rows,
        most_seconds=arguments.most_seconds,
    )
    reporter = Reporter(arguments.json, partial(environment, cupy))
    build = partial(build_on_device, model.source, arguments.kernels)
    try:
        asyncio.run(check_full(model, build, plan, reporter.of_setting))
    finally:
        if reporter.found:
            print_end(reporter.found)
    return reporter.found


def run_on_cpu(arguments: argparse.Namespace) -> dict[str, Any]:
    reporter = Reporter(arguments.json, host)
    asyncio.run(check(arguments.prompts, arguments.tokens, arguments.passes, reporter.of_pass))
    return reporter.found


def add_choice(
    parser: argparse.ArgumentParser, flag: str, metavar: str, choices: Sequence[int]
) -> None:
    parser.add_argument(
        flag, type=int, nargs="+", default=choices, choices=choices, metavar=metavar,
        help=f"some of {', '.join(map(str, sorted(choices)))}; default all",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--passes", type=int, default=3, help="on the CPU")
    parser.add_argument("--device", action="store_true", help="all prompts in every setting")
    parser.add_argument(
        "--most-seconds", type=float, default=math.inf, help="begin no setting then"
    )
    add_choice(parser, "--lengths", "K", FULL_LENGTHS)
    add_choice(parser, "--rows", "B", FULL_ROWS)
    parser.add_argument("--kernels", help="a folder of compiled kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = (run_on_device if arguments.device else run_on_cpu)(arguments)
    return exit_code(found)


if __name__ == "__main__":
    sys.exit(main())
