"""EngineHistograms: how times and sizes of requests are spread. Written by the worker alone.

Edges are those that dashboards of other servers expect, with finer ones where steps are short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ninfer.contract.generation import Timings, Usage
from ninfer.contract.metrics import Histogram

FIRST_TOKEN_EDGES_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKEN_GAP_EDGES_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
DURATION_EDGES_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_EDGES: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
UNIT_EDGES: Final = (1, 8, *(2**power for power in range(4, 15)))


@dataclass(frozen=True, slots=True)
class EngineHistograms:
    """Seconds, or tokens where the name says so.

    queue, prefill, decode, inference, total   phases of requests that ran to their end; inference
                      is all but the queue
    first_token       from submit to the first token
    token_gap         between two tokens of a request
    prompt_tokens, output_tokens, max_output_tokens   of requests that ran to their end
    unit_tokens       inputs of all rows of one unit
    """

    queue: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_S))
    first_token: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_EDGES_S))
    token_gap: Histogram = field(default_factory=partial(Histogram, TOKEN_GAP_EDGES_S))
    prefill: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_S))
    decode: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_S))
    inference: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_S))
    total: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_S))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_EDGES))
    output_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_EDGES))
    max_output_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_EDGES))
    unit_tokens: Histogram = field(default_factory=partial(Histogram, UNIT_EDGES))

    def note_ended(self, timings: Timings, usage: Usage, max_tokens: int) -> None:
        """A request ran to its end."""
        self.queue.observe(timings.queue_s)
        self.prefill.observe(timings.prefill_s)
        self.decode.observe(timings.decode_s)
        self.inference.observe(timings.total_s - timings.queue_s)
        self.total.observe(timings.total_s)
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.output_tokens.observe(usage.completion_tokens)
        self.max_output_tokens.observe(max_tokens)
