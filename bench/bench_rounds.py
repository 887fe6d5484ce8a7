"""Rounds of drafts on the device over made-up weights: what checking and proposing cost, and what
comes out when a set share of the drafts is right.

    python -m bench.bench_rounds --model qwen3.5-27b --weights fp8 --json FILE

First plain decoding, then the same sequences with drafts that are the plain tokens up to a place
and wrong behind it; of K drafted tokens on average `--right` are accepted. The draft model (`--spec
mtp` or `dflash`) proposes in every round, and what it proposes is thrown away. Tokens have to be
those of plain decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from bench.common.record import environment, write_record
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, RowOutput, SampleRow, UnitRow
from ninfer.options import EngineOptions
from ninfer.program.cuda_bench import BenchSetup, open_synthetic_benchmark
from ninfer.program.executors.cuda import CudaExecutor

PROMPT_TOKENS = 1024
NUM_TOKENS = 160
REPEATS = 20
WRONG = 7


class DraftedSequence:
    """A made-up sequence on pages and slots of its own."""

    def __init__(self, index: int, pages: int) -> None:
        self.index = index
        self.pages = np.arange(index * pages, (index + 1) * pages, dtype=np.int32)
        self.frontier = 0
        self.slots = [ROOT_SLOT, 2 * index + 1, 2 * index + 2]
        self.said: list[int] = []

    def row(self, token_ids: Sequence[int], *, num_proposed: int = 0) -> UnitRow:
        stop = self.frontier + len(token_ids)
        first = self.frontier + 1 if self.said else stop
        samples = [_sample(position) for position in range(first, stop + 1)]
        room = stop + num_proposed + 1
        return UnitRow(
            token_ids=np.array(token_ids, np.int32),
            start=self.frontier,
            page_table=self.pages[: -(-room // PAGE_TOKENS)],
            read_slot=self.slots[0],
            write_slot=self.slots[1],
            sample=samples[-1],
            checks=tuple(samples[:-1]),
            num_proposed=num_proposed,
            residence=(self.index, 1),
        )

    def advance(self, num_inputs: int, token_ids: Sequence[int]) -> None:
        read, write, *rest = self.slots
        self.slots = [write, rest[0] if read == ROOT_SLOT else read, *rest]
        self.frontier += num_inputs
        self.said += token_ids


def _sample(position: int) -> SampleRow:
    nothing = np.empty(0, np.int32)
    return SampleRow(SamplingParams(), position, nothing, nothing, nothing)


def token_of(output: RowOutput) -> int:
    if output.token is None:
        raise SystemExit("a row has no token")
    return output.token.token_id


async def begin(executor: CudaExecutor, count: int, pages: int) -> list[DraftedSequence]:
    rng = np.random.default_rng(3)
    sequences = []
    for index in range(count):
        prompt = rng.integers(0, 100_000, PROMPT_TOKENS).tolist()
        sequence = DraftedSequence(index, pages)
        output = await executor.prefill(sequence.row(prompt))
        sequence.advance(len(prompt), [token_of(output)])
        sequences.append(sequence)
    return sequences


async def plain_run(setup: BenchSetup, batch: int, pages: int) -> tuple[float, list[list[int]]]:
    """Seconds a token of a row, and the tokens."""
    executor = setup.executor
    sequences = await begin(executor, batch, pages)
    times = []
    for step in range(NUM_TOKENS):
        started = time.perf_counter()
        outputs = await executor.decode(
            tuple(sequence.row(sequence.said[-1:]) for sequence in sequences),
            goes_on=step + 1 < NUM_TOKENS,
        )
        times.append(time.perf_counter() - started)
        for sequence, output in zip(sequences, outputs, strict=True):
            sequence.advance(1, [token_of(output)])
    return statistics.median(times), [sequence.said for sequence in sequences]


async def drafted_run(
    setup: BenchSetup, texts: list[list[int]], num_drafts: int, right: float, pages: int
) -> dict[str, float]:
    executor, rng = setup.executor, np.random.default_rng(5)
    sequences = await begin(executor, len(texts), pages)
    seconds, rounds, drafted, accepted = 0.0, 0, 0, 0
    times = []
    while max(len(sequence.said) for sequence in sequences) < NUM_TOKENS - num_drafts - 1:
        rows = []
        for sequence, text in zip(sequences, texts, strict=True):
            draft = list(text[len(sequence.said) : len(sequence.said) + num_drafts])
            good = lucky(rng, num_drafts, right)
            draft[good:] = [token ^ WRONG for token in draft[good:]]
            rows.append(sequence.row([sequence.said[-1], *draft], num_proposed=num_drafts))
        started = time.perf_counter()
        outputs = await executor.verify(tuple(rows))
        times.append(time.perf_counter() - started)
        seconds += times[-1]
        for sequence, text, output in zip(sequences, texts, outputs, strict=True):
            found = [token.token_id for token in output.tokens]
            if found != text[len(sequence.said) : len(sequence.said) + len(found)]:
                raise SystemExit(f"row {sequence.index} says {found}, not as without drafts")
            sequence.advance(len(found), found)
            rounds, drafted = rounds + 1, drafted + num_drafts
            accepted += len(found) - 1
    said = sum(len(sequence.said) - 1 for sequence in sequences)
    return {
        "round_us": statistics.median(times) * 1e6,
        "tokens_s": said / seconds,
        "tokens_a_round": said / rounds,
        "accepted_share": accepted / drafted,
    }


def lucky(rng: np.random.Generator, num_drafts: int, right: float) -> int:
    """How many of a draft are right: on average `right` of them."""
    low = int(np.floor(num_drafts * right))
    return low + int(rng.random() < num_drafts * right - low)


async def device_times(
    executor: CudaExecutor, batch: int, num_drafts: int, pages: int
) -> dict[str, float]:
    """Microseconds of the parts of a round, replayed alone behind a round of that size."""
    rounds, driver = executor.rounds, executor.driver
    sequences, rng = await begin(executor, batch, pages), np.random.default_rng(7)

    def of(enqueue: Any) -> float:
        return statistics.median(driver.measure(enqueue) for _ in range(REPEATS)) * 1e6

    found: dict[str, float] = {}
    for columns in (1, 1 + num_drafts):
        size = (batch, columns)
        inputs = rng.integers(0, 100_000, (batch, columns)).tolist()
        await executor.verify(
            tuple(
                each.row(tokens, num_proposed=num_drafts)
                for each, tokens in zip(sequences, inputs, strict=True)
            )
        )
        found[f"forward_{columns}_us"] = of(partial(rounds.queue_forward, size))
        found[f"finish_{columns}_us"] = of(partial(rounds.queue_finish, size))
    size = (batch, 1 + num_drafts)
    for count in range(num_drafts + 1):
        found[f"propose_{count}_us"] = of(partial(rounds.queue_guesses, size, count))
    return found


def beside_the_plan(setup: BenchSetup) -> int:
    """Bytes of the device that the driver, its kernels and graphs take."""
    free, total = setup.executor.driver.memory_info()
    return total - free - setup.plan.total_bytes


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options = EngineOptions(
        executor="cuda",
        weights=args.weights,
        max_concurrency=max(args.batches),
        max_context=2048,
        prefill_chunk=1024,
        host_cache_bytes=0,
        kernels=args.kernels,
    )
    pages = 2048 // PAGE_TOKENS
    plain: dict[int, tuple[float, list[list[int]]]] = {}
    figures: dict[str, Any] = {}
    setup = open_synthetic_benchmark(args.model, options)
    for batch in args.batches:
        plain[batch] = await plain_run(setup, batch, pages)
        driver, graph = setup.executor.driver, setup.executor.graphs.of(batch)
        replay = partial(driver.replay, graph)
        device = [driver.measure(replay) for _ in range(REPEATS)]
        figures[f"B={batch}"] = {
            "plain_step_us": plain[batch][0] * 1e6,
            "plain_device_us": statistics.median(device) * 1e6,
            "plain_tokens_s": batch / plain[batch][0],
        }
    setup.executor.close()
    drafting = dataclasses.replace(options, spec=args.spec, draft_tokens=args.drafts)
    setup = open_synthetic_benchmark(args.model, drafting)
    started = {"start_s": setup.start_s, "bytes_beside_the_plan": beside_the_plan(setup)}
    for batch in args.batches:
        row = figures[f"B={batch}"]
        row |= await drafted_run(setup, plain[batch][1], args.drafts, args.right, pages)
        row |= await device_times(setup.executor, batch, args.drafts, pages)
        columns = 1 + args.drafts
        verify = row[f"forward_{columns}_us"] + row[f"finish_{columns}_us"]
        row["verify_ratio"] = verify / row["plain_device_us"]
        row["propose_share"] = row[f"propose_{args.drafts}_us"] / row["plain_device_us"]
        row["speed_up"] = row["tokens_s"] / row["plain_tokens_s"]
    setup.executor.close()
    return {
        **environment(cupy),
        "model": args.model,
        "weights": args.weights,
        "spec": args.spec,
        "drafts": args.drafts,
        "right": args.right,
        **started,
        "figures": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3.5-27b")
    parser.add_argument("--weights", default="fp8")
    parser.add_argument("--spec", choices=("ngram", "mtp", "dflash"), default="mtp")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--right", type=float, default=0.75)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    if args.json is not None:
        write_record(args.json, found)
    print(
        f"{found['start_s']:.1f} s from the open device to ready graphs,"
        f" {found['bytes_beside_the_plan'] / 1e9:.2f} GB beside the plan"
    )
    for name, row in found["figures"].items():
        figures = {key: round(value, 3) for key, value in row.items()}
        print(args.model, args.weights, args.spec, name, figures)


if __name__ == "__main__":
    main()
