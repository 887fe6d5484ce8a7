"""What constraints cost: masks of a large vocabulary, and decode speed of the demo model.

    python -m bench.bench_constraints [--executor cpu|cuda] [--json bench/results/NAME.json]

Masks: random walks through each grammar over a made-up vocabulary of 151,000 tokens; processor
time of one thread. Speed: greedy answers of the same length without a grammar and with one that
leaves the model nearly all of its freedom; medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from bench.common.record import commit, write_record
from ninfer import __version__
from ninfer.cli.loading import LoadedModel, load_model, make_cache, make_engine, open_named_model
from ninfer.contract.chat import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    GenerationParams,
    TextPart,
)
from ninfer.contract.generation import Finished, GenerationEngine
from ninfer.frontend.constraints.compiler import LIBRARY_LIMITS
from ninfer.frontend.constraints.grammar import build_grammar
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.options import EngineOptions, SamplingOptions

VOCAB_SIZE: Final = 151_000
WALKS: Final = 4
STEPS: Final = 200
ROUNDS: Final = 7
ANSWER_TOKENS: Final = 64
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
MARKS: Final = '{}[]":,.-_ \n\t0123456789()<>/='
GRAMMARS: Final[tuple[tuple[str, ConstraintKind, Any], ...]] = (
    ("any object", "json_object", ""),
    ("record", "json_schema", {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "when": {"type": "string", "format": "date-time"},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        },
        "required": ["name", "age", "when", "tags"],
    }),
    ("10,000 values", "json_schema", {
        "enum": [f"value {i * 7919 % 99_991}" for i in range(10_000)],
    }),
    ("long text", "json_schema", {"type": "string", "minLength": 500, "maxLength": 5000}),
    ("500 optional members", "json_schema", {
        "type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)},
    }),
    ("regex", "regex", r"([A-Z][a-z]+ ){3,50}[0-9]{2,4}"),
    ("gbnf", "gbnf", 'root ::= line+\nline ::= "- " [^\\n]+ "\\n"'),
    ("recursive gbnf", "gbnf", 'root ::= [0-9]+ | "(" root ("+" root)* ")"'),
)  # fmt: skip


class MadeUpVocabulary(TokenizerWrapper):
    """Words, marks and foreign characters in about the shares of a real vocabulary."""

    def __init__(self) -> None:
        rng = random.Random(1)
        found = dict.fromkeys(bytes([byte]) for byte in range(256))
        while len(found) < VOCAB_SIZE:
            kind, length = rng.random(), rng.randint(2, 10)
            if kind < 0.7:
                text = rng.choice(["", " "]) + "".join(rng.choices(LETTERS, k=length))
            elif kind < 0.8:
                text = "".join(rng.choices(MARKS, k=rng.randint(2, 5)))
            else:
                text = "".join(chr(rng.randint(0x400, 0x9FFF)) for _ in range(rng.randint(1, 3)))
            found.setdefault(text.encode())
        self.tokens = [*found, b"<end>"]
        self.eos_token_id = VOCAB_SIZE
        self.bos_token_id = None
        self.special_token_ids = [VOCAB_SIZE]
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def mask_times(
    vocabulary: LLTokenizer, name: str, kind: ConstraintKind, value: Any
) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value)
    constraint = Constraint(kind, text, name)
    started = time.perf_counter()
    built = LLMatcher(vocabulary, build_grammar(constraint).text, limits=LIBRARY_LIMITS)
    build_ms = 1e3 * (time.perf_counter() - started)
    words: NDArray[np.uint32] = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    fills, commits = [], []
    for seed in range(WALKS):
        rng, matcher = random.Random(seed), Matcher(built.deep_copy(), VOCAB_SIZE)
        for _ in range(STEPS):
            started = time.thread_time()
            matcher.fill(words)
            fills.append(1e6 * (time.thread_time() - started))
            ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not ids.size:
                break
            token_ids = [int(rng.choice(ids))]
            started = time.thread_time()
            if not matcher.accepts(token_ids) or not matcher.consume(token_ids):
                raise RuntimeError(f"{name}: the mask and the matcher differ")
            commits.append(1e6 * (time.thread_time() - started))
    return {
        "grammar": name,
        "build_ms": build_ms,
        "masks": len(fills),
        "mask_p50_us": float(np.percentile(fills, 50)),
        "mask_p99_us": float(np.percentile(fills, 99)),
        "mask_max_us": max(fills),
        "commit_p50_us": float(np.percentile(commits, 50)),
    }


async def answer_s(engine: GenerationEngine, model: LoadedModel, is_bound: bool) -> float:
    """Seconds a token behind the first one."""
    message = ChatMessage("user", (TextPart("Tell me a story."),))
    prompt = await model.frontend.prepare_chat(ChatPrompt(messages=(message,)))
    constraint = Constraint("regex", r"(.|\n){300,}", "regex") if is_bound else None
    params = GenerationParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, constraint=constraint
    )
    request = model.frontend.build_request("r", prompt, params, now=engine.now())
    if request.prepare is not None:
        await request.prepare()
    async with engine.submit(request) as events:
        async for event in events:
            if isinstance(event, Finished):
                return event.timings.decode_s / (event.usage.completion_tokens - 1)
    raise RuntimeError("the answer did not finish")


async def decode_speed(executor: str, kernels: str | None) -> dict[str, Any]:
    options = EngineOptions(executor=executor, max_concurrency=2, max_context=512, kernels=kernels)
    model = load_model(open_named_model(None), options, SamplingOptions(), lambda *_: None)
    engine = make_engine(model, options, make_cache(model, options))
    await engine.start()
    try:
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS + 1):
            for is_bound, found in times.items():
                found.append(await answer_s(engine, model, is_bound))
    finally:
        await engine.aclose()
    free, bound = (1e3 * statistics.median(times[is_bound][1:]) for is_bound in (False, True))
    return {"executor": executor, "free_ms": free, "bound_ms": bound, "cost": bound / free - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executor", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    vocabulary = LLTokenizer(MadeUpVocabulary(), n_vocab=VOCAB_SIZE + 1)
    print(f"vocabulary of {VOCAB_SIZE} tokens: {time.perf_counter() - started:.2f} s to make")
    rows = [mask_times(vocabulary, *grammar) for grammar in GRAMMARS]
    for row in rows:
        print(
            f"{row['grammar']:22} build {row['build_ms']:7.1f} ms, {row['masks']:4} masks: p50"
            f" {row['mask_p50_us']:6.0f} us, p99 {row['mask_p99_us']:6.0f} us, most"
            f" {row['mask_max_us']:6.0f} us; commit p50 {row['commit_p50_us']:5.0f} us"
        )
    speed = asyncio.run(decode_speed(arguments.executor, arguments.kernels))
    print(
        f"demo model on {speed['executor']}: {speed['free_ms']:.3f} ms a token, with a grammar"
        f" {speed['bound_ms']:.3f} ms ({speed['cost']:+.1%})"
    )
    if arguments.json is not None:
        record = {
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "ninfer": __version__,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "speed": speed,
            "rows": rows,
        }
        write_record(arguments.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
