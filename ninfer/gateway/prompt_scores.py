"""What protocols that report log probabilities of prompts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ninfer.contract.errors import RequestError

MAX_SCORED: Final = 1 << 20
"""Log probabilities of prompts in one answer; each takes a hundred bytes or so until it is sent."""


def check_num_scored(num_tokens: Sequence[int], num_top: int, param: str) -> None:
    """Raises RequestError naming `param` when prompts of `num_tokens` report too many numbers."""
    num_scored = sum(num_tokens) * (1 + num_top)
    if num_scored > MAX_SCORED:
        raise RequestError(
            "invalid_value",
            f"'{param}' asks for {num_scored} log probabilities of prompts, at most {MAX_SCORED}"
            " can be in one answer: send fewer tokens at once, or ask for fewer alternatives.",
            param,
        )
