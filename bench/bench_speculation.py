"""What drafts bring on the CPU: tokens a decode row, and processor time a token, by kind of text.

    python -m bench.bench_speculation [--rows N] [--json bench/results/NAME.json]

The demo model, greedy, N rows at once; each kind of text without drafts, with drafts from the text,
and with those of the MTP module besides; medians of interleaved runs. That the answers are the same
is checked first.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common.record import host, write_record
from ninfer.cli.loading import (
    LoadedModel,
    load_model,
    make_cache,
    make_engine,
    measured_costs,
    open_named_model,
)
from ninfer.contract.cache import CacheMode, CacheRequest
from ninfer.contract.chat import ChatMessage, ChatPrompt, GenerationParams, TextPart
from ninfer.contract.generation import Finished, GenerationEngine, Progress
from ninfer.contract.prompt import PreparedPrompt
from ninfer.engine.core import Engine
from ninfer.options import EngineOptions, SamplingOptions

RUNS: Final = 3
SPECS: Final = ("none", "ngram", "mtp")
MAX_TOKENS: Final = 48
COPY: Final = (
    "Repeat after me: 183 604 77 912 415 550",
    "Copy this text: The little dog sees a red ball and runs to the old house.",
    "Please repeat this: Tom likes Anna in Rome.",
    "Write: 12 908 33 471 205 6",
)
STORY: Final = (
    "Tell me a story about a little penguin who is afraid of deep water.",
    "Tell me a story about a boat.",
    "What is a river?",
    "How can I sleep better?",
)
VERSE: Final = (
    "The red fox runs over the hill. The blue bird sings in the tree. The old man sits by the"
    " river and looks at the boats. "
)


@dataclass(frozen=True, slots=True)
class Run:
    answers: list[list[int]]
    processor_s: float
    num_rows: int
    drafted: int
    accepted: int
    num_tokens: int


async def prompts_of(model: LoadedModel, kind: str, num_rows: int) -> list[PreparedPrompt]:
    frontend = model.frontend
    if kind == "repetition":
        text = VERSE * 3
        starts = [text[: len(VERSE) * 2 + 9 * row] for row in range(num_rows)]
        return [await frontend.prepare_text(start) for start in starts]
    texts = COPY if kind == "copy" else STORY
    return [
        await frontend.prepare_chat(
            ChatPrompt(messages=(ChatMessage("user", (TextPart(texts[row % len(texts)]),)),))
        )
        for row in range(num_rows)
    ]


async def answer(
    engine: GenerationEngine, model: LoadedModel, prompt: PreparedPrompt, *, ends: bool
) -> list[int]:
    params = GenerationParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        ignore_eos=not ends,
        cache=CacheRequest(mode=CacheMode.OFF),
    )
    request = model.frontend.build_request("bench", prompt, params, now=engine.now())
    token_ids: list[int] = []
    async with engine.submit(request) as events:
        async for event in events:
            if isinstance(event, Progress | Finished):
                for delta in event.deltas:
                    token_ids += [token.token_id for token in delta.tokens]
    return token_ids


async def run(engine: Engine, model: LoadedModel, kind: str, num_rows: int) -> Run:
    prompts = await prompts_of(model, kind, num_rows)
    before = totals(engine)
    started = time.process_time()
    answers = await asyncio.gather(
        *(answer(engine, model, prompt, ends=kind != "repetition") for prompt in prompts)
    )
    processor_s = time.process_time() - started
    counts = [new - old for old, new in zip(before, totals(engine), strict=True)]
    return Run(list(answers), processor_s, *counts)


def totals(engine: Engine) -> tuple[int, int, int, int]:
    """Decode rows, drafted and accepted tokens, tokens."""
    metrics = engine.metrics
    drafts = metrics.drafts
    return (
        metrics.decode_rows_total,
        drafts.drafted_total,
        drafts.accepted_total,
        metrics.completion_tokens_total,
    )


async def compare(kind: str, num_rows: int) -> list[dict[str, Any]]:
    engines: dict[str, tuple[Engine, LoadedModel]] = {}
    runs: dict[str, list[Run]] = {spec: [] for spec in SPECS}
    for spec in runs:
        options = EngineOptions(
            executor="cpu", max_concurrency=num_rows, max_context=512, cpu_threads=1, spec=spec
        )
        model = load_model(open_named_model(None), options, SamplingOptions(), lambda *_: None)
        costs = await measured_costs(model)
        engine = make_engine(model, options, make_cache(model, options), costs)
        await engine.start()
        engines[spec] = engine, model
    try:
        for _ in range(RUNS):
            for spec, (engine, model) in engines.items():
                runs[spec].append(await run(engine, model, kind, num_rows))
    finally:
        for engine, _ in engines.values():
            await engine.aclose()
    plain = runs.pop("none")
    return [figures(kind, num_rows, spec, plain, drafting) for spec, drafting in runs.items()]


def figures(
    kind: str, num_rows: int, spec: str, plain: Sequence[Run], drafting: Sequence[Run]
) -> dict[str, Any]:
    if any(item.answers != plain[0].answers for item in (*plain, *drafting)):
        raise RuntimeError(f"the answers of {kind} with {spec} differ")
    last = drafting[-1]
    without, with_drafts = (
        statistics.median(item.processor_s / item.num_tokens for item in runs)
        for runs in (plain, drafting)
    )
    return {
        "kind": kind,
        "spec": spec,
        "rows": num_rows,
        "tokens": last.num_tokens,
        # The first token of an answer is the prompt's.
        "tokens_a_row": (last.num_tokens - num_rows) / last.num_rows,
        "acceptance": last.accepted / last.drafted if last.drafted else None,
        "plain_ms": 1e3 * without,
        "drafting_ms": 1e3 * with_drafts,
        "speed": without / with_drafts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for kind in ("copy", "repetition", "story"):
        for num_rows in arguments.rows:
            for row in asyncio.run(compare(kind, num_rows)):
                found.append(row)
                share = "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
                print(
                    f"{kind:10} {row['spec']:5} {num_rows} rows: {row['tokens_a_row']:.2f} tokens a"
                    f" row, {share} of drafts right; {row['plain_ms']:.1f} ->"
                    f" {row['drafting_ms']:.1f} ms a token, {row['speed']:.2f}x",
                    flush=True,
                )
    if arguments.json is not None:
        write_record(arguments.json, {**host(), "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
