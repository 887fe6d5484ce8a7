"""Host cost of a token in an output session: plain text, text beside tools, calls as they come.

    python -m bench.bench_output_session [--tokens 4000] [--repeats 9]

Each row previews and commits single tokens, checks what came out of it, and prints the median and
the 95th percentile over the repeats of the mean microseconds a token, with the cost in comparison
to plain text. A call's text is held or kept while it is read, so its tokens cost more the longer
it gets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Final

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_session import TextOutputSession
from ninfer.frontend.output_state import SessionRules
from ninfer.frontend.stops import StopMatcher
from ninfer.frontend.tool_calls.call_state import CallRules
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools

TARGET_US: Final = 50.0
"""A twentieth of the shortest decode step."""
_SCHEMA: Final = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "items": {"type": "array"}},
}
_XML: Final = "<tool_call>\n<function=write>\n<parameter={}>\n"
_XML_END: Final = "\n</parameter>\n</function>\n</tool_call>"


def made_up_rows(num_tokens: int) -> dict[str, tuple[list[str], Mapping[str, object]]]:
    """Pieces of an answer, and how the session reads them."""
    tools = ToolRules(tools=(ToolSpec("write", _SCHEMA),))
    calls = {"calls": CallRules(DeclaredTools(tools))}
    words = [" word" if index % 12 else ".\n\nNext" for index in range(num_tokens)]
    written = [word.replace("\n", "\\n") for word in words]
    numbers = ["7, "] * num_tokens
    head = '<tool_call>\n{"name": "write", "arguments": {"text": "'
    return {
        "text": (words, {}),
        "text, stop string": (words, {"stops": StopMatcher(("Observation:",))}),
        "text, tools": (words, calls),
        "thought, tools": (words, {**calls, "opens_in_reasoning": True}),
        "XML call, string": ([_XML.format("text"), *words, _XML_END], calls),
        "XML call, list": ([_XML.format("items"), "[", *numbers, "7]", _XML_END], calls),
        "JSON call, string": ([head, *written, '"}}\n</tool_call>'], calls),
    }


def time_answer(pieces: Sequence[str], fields: Mapping[str, object]) -> float:
    """Mean microseconds a token. Raises InvariantError when text is missing."""
    data = [piece.encode() for piece in pieces]
    tokens = [GeneratedToken(index) for index in range(len(data))]
    session = TextOutputSession(SessionRules(token_bytes=data.__getitem__, **fields))  # type: ignore[arg-type]
    num_characters = 0
    start_s = time.perf_counter()
    for token in tokens:
        preview = session.preview([token], None)
        session.commit(preview)
        for delta in preview.deltas:
            num_characters += len(delta.text)
    taken_s = time.perf_counter() - start_s
    num_characters += sum(len(delta.text) for delta in session.flush())
    if num_characters < sum(map(len, pieces[1:-1])):
        raise InvariantError("the session lost text")
    return taken_s * 1e6 / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rows = made_up_rows(options.tokens)
    samples: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.repeats):
        for name, (pieces, fields) in rows.items():
            samples[name].append(time_answer(pieces, fields))
    plain = statistics.median(samples["text"])
    print(f"{'row':<20} {'median us':>10} {'p95 us':>8} {'of text':>8} {'of target':>10}")
    for name, values in samples.items():
        median = statistics.median(values)
        p95 = sorted(values)[round(0.95 * (len(values) - 1))]
        shares = f"{median / plain:>8.2f} {median / TARGET_US:>10.2f}"
        print(f"{name:<20} {median:>10.2f} {p95:>8.2f} {shares}")


if __name__ == "__main__":
    main()
