"""CostModel: what it takes to have a prefix in State and KV, in seconds.

It orders what is possible; it never decides what is.
"""

from __future__ import annotations

from typing import Final

from ninfer.contract.cache import Tier

_PREFILL_TOKENS_S: Final = 2_000.0
_MOVE_TOKENS_S: Final = 200_000.0
_FETCH_SHARE: Final = 0.1
"""A disk's pace as a part of the pace between host and device; an assumption."""
_BEGIN_S: Final = 0.001
"""What a transfer takes beside its copies."""


class CostModel:
    """Starts with rates of a small machine and goes by the measured ones once there are any."""

    def __init__(self) -> None:
        self._prefill_tokens_s = _PREFILL_TOKENS_S
        self._move_tokens_s = _MOVE_TOKENS_S

    def note(self, prefill_tokens_s: float | None, move_tokens_s: float | None) -> None:
        """Rates that are not above zero are no measurement."""
        if prefill_tokens_s is not None and prefill_tokens_s > 0.0:
            self._prefill_tokens_s = prefill_tokens_s
        if move_tokens_s is not None and move_tokens_s > 0.0:
            self._move_tokens_s = move_tokens_s

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self._prefill_tokens_s

    def transfer_s(self, num_tokens: int, tier: Tier) -> float:
        """To bring a checkpoint of so many tokens to the device."""
        if tier is Tier.DEVICE:
            return 0.0
        seconds = _BEGIN_S + num_tokens / self._move_tokens_s
        if tier is Tier.DISK:
            seconds += _BEGIN_S + num_tokens / (_FETCH_SHARE * self._move_tokens_s)
        return seconds

    def source_s(self, num_prompt_tokens: int, num_used: int, frontier: int, tier: Tier) -> float:
        """To start a prompt from `num_used` tokens of a checkpoint and compute the rest."""
        return self.transfer_s(frontier, tier) + self.prefill_s(num_prompt_tokens - num_used)
