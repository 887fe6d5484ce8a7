"""Answers of a model with random weights to random schemas: are all of them valid?

    python -m bench.check_random_answers [--answers 1000] [--json bench/results/NAME.json]

Schemas bound the length of what they allow. The model draws at temperature 1 from noise, so only
the grammar makes an answer what it is. Answers that reach the limit of tokens are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import jsonschema

from bench.common.record import host, write_record
from ninfer.contract.generation import FinishReason
from tests.helpers.checkpoints import CheckpointSpec, write_checkpoint
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE
from tests.helpers.guided_rig import (
    GuidedAnswer,
    GuidedModel,
    answers,
    constraint,
    load_guided_model,
)
from tests.helpers.model_paths import DEMO_MODEL
from tests.helpers.random_schemas import Schema, bounded, random_root

LANES: Final = 16
MAX_TOKENS: Final = 400
_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """`wrong` are answers that ended by themselves and are not valid, with their schemas."""

    num_valid: int = 0
    num_cut: int = 0
    num_tokens: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)


def write_random_model(folder: Path) -> Path:
    """The demo model's vocabulary, and weights that nobody trained."""
    spec = CheckpointSpec(vocab_size=DEMO_VOCAB_SIZE, num_layers=4, hidden_size=32, seed=7)
    write_checkpoint(folder, spec)
    for file in _FILES:
        shutil.copy(DEMO_MODEL / file, folder / file)
    return folder


async def tally(model: GuidedModel, seeds: Sequence[int]) -> Tally:
    """One answer for each seed."""
    result = Tally()
    async with model.engine(lanes=LANES, num_pages=8 * LANES) as engine:
        for part in _batches(seeds, LANES):
            schemas = [bounded(random_root(random.Random(seed))) for seed in part]
            requests = [
                await model.request(
                    "Anything.",
                    temperature=1.0,
                    seed=seed,
                    max_tokens=MAX_TOKENS,
                    constraint=constraint("json_schema", schema),
                )
                for seed, schema in zip(part, schemas, strict=True)
            ]
            for schema, found in zip(schemas, await answers(engine, requests), strict=True):
                _judge(result, schema, found)
    return result


def _batches(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(seeds), size):
        yield seeds[start : start + size]


def _judge(result: Tally, schema: Schema, found: GuidedAnswer) -> None:
    result.num_tokens += found.usage.completion_tokens
    if found.finish is not None and found.finish.reason is FinishReason.OUTPUT_LIMIT:
        result.num_cut += 1
    elif found.error is None and _is_valid(schema, found.content):
        result.num_valid += 1
    else:
        result.wrong.append(
            {"schema": schema, "answer": found.content, "error": str(found.error or "")}
        )


def _is_valid(schema: Schema, text: str) -> bool:
    kind = jsonschema.Draft202012Validator
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = load_guided_model(write_random_model(Path(folder)))
        result = asyncio.run(tally(model, range(arguments.answers)))
    print(
        f"{arguments.answers} answers of {result.num_tokens} tokens in"
        f" {time.perf_counter() - started:.0f} s: {result.num_valid} valid, {result.num_cut} cut"
        f" off, {len(result.wrong)} wrong"
    )
    for wrong in result.wrong:
        print(json.dumps(wrong, ensure_ascii=False))
    if arguments.json is not None:
        write_record(arguments.json, {**host(), "rows": [asdict(result)]})
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
