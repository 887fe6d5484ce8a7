"""What the places of a chat prompt cost beside rendering and tokenising it.

    python -m bench.bench_frontiers [--json bench/results/NAME.json]

Processor time of one thread, the least of several repeats, over the embedded model's template and
tokenizer: agents' histories of growing length, thoughts and results of tools included.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.common.agent_trace import AgentTrace
from bench.common.record import commit, write_record
from ninfer import __version__
from ninfer.cli.loading import embedded_model_path
from ninfer.contract.chat import ChatPrompt
from ninfer.convert.source import open_model
from ninfer.frontend.chat_renderer import ChatRenderer
from ninfer.frontend.frontiers import FrontierFinder
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.tokenizer import TextTokenizer
from ninfer.gateway.chat_request import parse_chat_request
from ninfer.gateway.fields import Fields

TURNS: Final = (1, 5, 15, 60)
REPEATS: Final = 9


def least_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return 1e3 * min(times)


def history(num_turns: int, vocab_size: int) -> ChatPrompt:
    trace = AgentTrace(1, num_turns)
    session = trace.sessions[0]
    for turn in range(num_turns):
        if turn:
            trace.answer(session, trace.words(40), trace.words(30), calls_tool=True)
            trace.answer(session, trace.words(40), trace.words(30), calls_tool=False)
        trace.ask(session)
    return parse_chat_request(Fields(trace.body(session, 1)), vocab_size).chat


def measure() -> list[dict[str, Any]]:
    source = open_model(embedded_model_path())
    resources, vocab_size = source.resources, source.config.vocab_size
    if resources.tokenizer_json is None or resources.chat_template is None:
        raise RuntimeError("the embedded model has no tokenizer or no template")
    tokenizer = TextTokenizer(resources.tokenizer_json, vocab_size)
    renderer = ChatRenderer(ChatTemplate(resources.chat_template), tokenizer.control_texts)
    finder = FrontierFinder(tokenizer)
    return [
        measure_one(renderer, tokenizer, finder, num_turns, history(num_turns, vocab_size))
        for num_turns in TURNS
    ]


def measure_one(
    renderer: ChatRenderer,
    tokenizer: TextTokenizer,
    finder: FrontierFinder,
    num_turns: int,
    chat: ChatPrompt,
) -> dict[str, Any]:
    rendered = renderer.render_with_places(chat)
    text = rendered.text
    token_ids = tokenizer.encode(text.text)
    render_ms = least_ms(lambda: renderer.render(chat))
    places_ms = least_ms(lambda: renderer.render_with_places(chat)) - render_ms
    encode_ms = least_ms(lambda: tokenizer.encode(text.text))
    find_ms = least_ms(lambda: finder.find(text, token_ids, rendered.places))
    return {
        "turns": num_turns,
        "tokens": len(token_ids),
        "frontiers": len(finder.find(text, token_ids, rendered.places)),
        "render_ms": render_ms,
        "encode_ms": encode_ms,
        "frontiers_ms": places_ms + find_ms,
        "share": (places_ms + find_ms) / (render_ms + encode_ms),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure()
    for row in rows:
        print(
            f"{row['turns']:3} turns {row['tokens']:6} tokens: render {row['render_ms']:6.2f} ms,"
            f" tokenise {row['encode_ms']:6.2f} ms, {row['frontiers']} frontiers"
            f" {row['frontiers_ms']:5.2f} ms, {row['share']:.1%} more"
        )
    if arguments.json is not None:
        record = {
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "ninfer": __version__,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "rows": rows,
        }
        write_record(arguments.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
