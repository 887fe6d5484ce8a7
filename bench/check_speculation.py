"""Whether answers with drafts are those without: the demo model, all kinds of requests and drafts.

    python -m bench.check_speculation [--prompts N] [--tokens N] [--passes N]
        [--json bench/results/NAME.json]

Every prompt is asked once without drafts. Then each pass goes through all draft lengths and batch
sizes, as many prompts at once as there are rows, and compares texts, tokens, log probabilities,
calls and ends: greedy and sampled, with penalties, bias, stops, minimal lengths, grammars, thoughts
and tools. Who drafts changes from prompt to prompt and from pass to pass. Every other setting
has too few pages, so that requests are paused; in every third a request is asked again and
cancelled. One difference is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from bench.common.record import host, write_record
from tests.helpers.guided_rig import load_guided_model
from tests.helpers.speculation_matrix import Matrix, Setting, Tally, cases, small_pool

LENGTHS: Final = (1, 2, 3, 4, 5, 7)
MOST_ROWS: Final = 8


def settings_of(number: int) -> Iterator[Setting]:
    """All draft lengths and batch sizes, in one pass."""
    for place, length in enumerate(LENGTHS):
        for lanes in range(1, MOST_ROWS + 1):
            turn = number + place + lanes
            is_short = turn % 2 == 0
            yield Setting(
                length,
                lanes,
                shift=2 * number,
                has_draft_model=(number + place) % 3 > 0,
                num_pages=small_pool(lanes) if is_short else 8 * lanes,
                host_blocks=64 if turn % 4 == 0 else 0,
                num_cancelled=int(turn % 3 == 0),
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
        for setting in settings_of(number):
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


def figures(tally: Tally) -> dict[str, Any]:
    return {
        "settings": tally.num_settings,
        "answers": tally.num_requests,
        "tokens": tally.num_tokens,
        "differing": [{**asdict(setting), "prompt": index} for setting, index in tally.differing],
        "pauses": tally.num_pauses,
        "cancelled": tally.num_cancelled,
        "ends": dict(sorted(tally.ends.items())),
        "drafts": [
            {
                "by": source.value,
                "rounds": counts.rounds,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "accepted_at": list(counts.accepted_at),
            }
            for source, counts in tally.drafts.items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    differing = 0

    def report(found: dict[str, Any]) -> None:
        nonlocal differing
        differing = len(found["differing"])
        print(
            f"{found['answers']} answers of {found['tokens']} tokens in {found['settings']}"
            f" settings, {found['pauses']} pauses, {found['cancelled']} cancelled:"
            f" {differing} differ ({found['processor_s']} s of processor time)",
            flush=True,
        )
        if arguments.json is not None:
            write_record(arguments.json, {**host(), **found})

    asyncio.run(check(arguments.prompts, arguments.tokens, arguments.passes, report))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
