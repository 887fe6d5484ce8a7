"""Drafter: what guesses the tokens of one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from ninfer.contract.generation import GenerationRequest


class Drafter(Protocol):
    """Lives from a request's first decode step to its end."""

    def draft(self, accepted: list[int], num_rows: int, room: int) -> tuple[int, ...]:
        """What may follow prompt and `accepted`, which only grows: at most `room` tokens, in a
        batch of `num_rows`."""

    def note(self, num_drafted: int, num_right: int) -> None:
        """A draft was checked."""


MakeDrafter: TypeAlias = Callable[[GenerationRequest, int], Drafter]
"""From a request and the most tokens it may draft."""
