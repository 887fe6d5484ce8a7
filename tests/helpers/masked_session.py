"""MaskedSession: an output session that is its own TokenMask, by a rule a test can repeat.

The rule says what may come behind the tokens so far, so a mask that was made from a state too early
or too late gives other tokens than `expected_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import NInferError, RequestError
from ninfer.contract.generation import FinishReason, OutputPreview
from ninfer.contract.masks import TokenMask
from ninfer.contract.sampling import GeneratedToken
from tests.helpers.fixed_mask import FixedMask, packed
from tests.helpers.scripted_session import ScriptedSession


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Tokens [begin, end) of an answer are restricted; all others may be any.

    width       how many tokens may come there, other ones behind every token; 1: it is forced
    dead_end    the token of the answer for which nothing is left
    """

    begin: int
    end: int
    width: int
    vocab_size: int
    dead_end: int | None = None

    def allows(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """What may come behind these tokens of the answer; None: any."""
        index = len(token_ids)
        if index == self.dead_end:
            return ()
        if not self.begin <= index < self.end:
            return None
        first = (token_ids[-1] if token_ids else 0) + 7 * index
        return tuple((first + 5 * step) % self.vocab_size for step in range(self.width))


class MaskedSession(ScriptedSession):
    """Implements the contract's OutputSession and TokenMask. A token that the rule does not allow
    is an AssertionError."""

    def __init__(
        self, rule: MaskRule, *, finish_after: int | None = None, hold_back: int = 0
    ) -> None:
        super().__init__(finish_after=finish_after, hold_back=hold_back)
        self.rule = rule

    @property
    def is_active(self) -> bool:
        return self._allowed() is not None

    def fill(self, words: NDArray[np.uint32]) -> None:
        words[:] = packed(self._allowed() or (), 32 * words.size)

    def forced(self) -> tuple[int, ...]:
        chain: list[int] = []
        while (allowed := self._allowed(*chain)) is not None and len(allowed) == 1:
            chain += allowed
        return tuple(chain)

    def failure(self) -> NInferError:
        return RequestError("constraint_dead_end", "nothing may come")

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        token_ids = [token.token_id for token in tokens]
        for index, token_id in enumerate(token_ids):
            allowed = self._allowed(*token_ids[:index])
            if allowed is not None and token_id not in allowed:
                raise AssertionError(f"{token_id} came, allowed were {allowed}")
        return super().preview(tokens, limit)

    def goes_on_after(self, token: GeneratedToken) -> bool:
        if self.is_active or self._allowed(token.token_id) is not None:
            return False
        return super().goes_on_after(token)

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        masks: list[TokenMask] = []
        for index, token_id in enumerate(token_ids):
            allowed = self._allowed(*token_ids[:index])
            behind = self._allowed(*token_ids[: index + 1])
            if (allowed is not None and token_id not in allowed) or len(behind or (0, 1)) == 1:
                break
            masks.append(FixedMask(behind or (), is_active=behind is not None))
        return masks

    def _allowed(self, *more: int) -> tuple[int, ...] | None:
        """Behind what is committed and `more`."""
        return self.rule.allows([*self.committed_ids, *more])
