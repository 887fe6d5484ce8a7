"""`ninfer score`: token NLLs, perplexity and logits of a text or of token ids."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ninfer.cli.console import Console
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.input_files import read_json, read_text
from ninfer.cli.layout import table
from ninfer.cli.loading import LoadedModel, load_with_progress
from ninfer.cli.output_files import check_writable, write_file
from ninfer.cli.parser import Invocation
from ninfer.cli.progress import ProgressLine
from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import OptionError
from ninfer.engine.score import CausalScorer, ScoreResult
from ninfer.options import EngineOptions, SamplingOptions, ScoreOptions

_LONGEST_DEFAULT_WINDOW: Final = 4096


@dataclass(frozen=True, slots=True)
class _Windows:
    window: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Scored:
    windows: _Windows
    result: ScoreResult
    elapsed_s: float


def run(invocation: Invocation, console: Console) -> ExitCode:
    options = invocation.read(ScoreOptions)
    engine_options = invocation.read(EngineOptions)
    source = _read_source(options)
    if options.logits is not None:
        check_writable("--logits", Path(options.logits))
    model = load_with_progress(invocation.model_path, engine_options, SamplingOptions(), console)
    try:
        with ProgressLine(console, "scoring") as line:
            scored = asyncio.run(_score(model, options, source, line))
    finally:
        model.program.close()
    if options.logits is not None and scored.result.logits is not None:
        _write_logits(Path(options.logits), scored.result.logits)
    figures = _figures(model, scored)
    if options.json:
        console.write(json.dumps({**figures, "token_nlls": scored.result.token_nlls}) + "\n")
    else:
        console.write_lines(_as_table(figures))
    return ExitCode.OK


async def _score(
    model: LoadedModel, options: ScoreOptions, source: str | tuple[int, ...], line: ProgressLine
) -> _Scored:
    windows = _windows(options, model.card.max_context)
    frontend = model.frontend.for_context(None)  # windows cut it to the context
    if isinstance(source, str):
        prompt = await frontend.prepare_text(source)
    else:
        prompt = frontend.prepare_ids(source)
    started_s = time.monotonic()
    result = await CausalScorer(model.program).score(
        prompt.token_ids,
        window=windows.window,
        stride=windows.stride,
        with_logits=options.logits is not None,
        progress=lambda done, total: line("tokens", done, total),
    )
    return _Scored(windows, result, time.monotonic() - started_s)


def _read_source(options: ScoreOptions) -> str | tuple[int, ...]:
    if options.text is not None:
        return read_text("--text", options.text)
    if options.ids is not None:
        return _parse_ids(read_json("--ids", options.ids))
    raise OptionError("--text", "either --text FILE or --ids FILE.json is needed")


def _parse_ids(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise OptionError("--ids", "the file must hold a JSON list of token ids")
    for index, item in enumerate(raw):
        if not isinstance(item, int) or isinstance(item, bool):
            raise OptionError("--ids", f"entry {index} is {item!r}, not a whole number")
    return tuple(raw)


def _windows(options: ScoreOptions, max_context: int) -> _Windows:
    window = options.window or min(_LONGEST_DEFAULT_WINDOW, max_context)
    if window > max_context:
        raise OptionError(
            "--window", f"{window} is longer than the context of {max_context} tokens"
        )
    stride = options.stride or max(1, window // 2)
    if stride > window:
        raise OptionError("--stride", f"{stride} is longer than the window of {window} tokens")
    return _Windows(window, stride)


def _figures(model: LoadedModel, scored: _Scored) -> dict[str, Any]:
    return {
        "model": model.card.name,
        "tokens": len(scored.result.token_nlls),
        "scored_tokens": scored.result.num_scored,
        "window": scored.windows.window,
        "stride": scored.windows.stride,
        "mean_nll": scored.result.mean_nll,
        "perplexity": scored.result.perplexity,
        "elapsed_s": scored.elapsed_s,
    }


def _as_table(figures: dict[str, Any]) -> str:
    shown = {
        name.replace("_", " "): _shown(value)
        for name, value in figures.items()
        if name != "elapsed_s"
    }
    shown["elapsed"] = f"{figures['elapsed_s']:.1f} s"
    return table(list(shown.items()))


def _shown(value: object) -> str:
    """A mean over no token is a dash."""
    if value is None:
        return "-"
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _write_logits(path: Path, logits: Float32Array) -> None:
    """float32 [T, V] under `logits`, written whole or not at all."""
    write_file("--logits", path, lambda file: np.savez(file, logits=logits))
