"""Where one answer is in its grammar. Not for concurrent use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

_LEXER_ERROR: Final = "lexer error"


@dataclass(slots=True)
class _Lexer:
    """What a grammar's matchers share: the library keeps one lexer for all of them, and none of
    them goes on once it is broken."""

    is_broken: bool = False


class Matcher:
    """A place in a compiled grammar; starts at its beginning."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, _lexer: _Lexer | None = None) -> None:
        self._matcher = matcher
        self._lexer = _Lexer() if _lexer is None else _lexer
        # The library's vocabulary has one token more.
        self._words: NDArray[np.uint32] = np.zeros(-(-(vocab_size + 1) // 32), np.uint32)
        self._vocab_size = vocab_size

    def copy(self) -> Matcher:
        """Another one at this place."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size, self._lexer)

    @property
    def is_accepting(self) -> bool:
        """The answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Nothing more may come."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_failed(self) -> bool:
        """A bound of the library was exceeded, here or at another place of the same grammar;
        nothing can come any more."""
        return self._lexer.is_broken or bool(self._matcher.is_error())

    def fails(self) -> bool:
        """`is_failed`, looked at closely: once the lexer is broken, the library may take nothing
        without saying why."""
        if not self.is_failed:
            self.copy().fill(np.zeros_like(self._words))
        return self.is_failed

    @property
    def complaint(self) -> str:
        """What the library says of a failure; empty when there is none."""
        return str(self._matcher.get_error())

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Whether all of these may come next."""
        return self._matcher.validate_tokens(list(token_ids)) == len(token_ids)

    def completes_with(self, token_ids: Sequence[int]) -> bool | None:
        """`is_complete` behind these, None when not all of them may come. Changes nothing."""
        num_taken = self._matcher.try_consume_tokens(list(token_ids))
        self._note_failure()
        is_complete = self.is_complete if num_taken == len(token_ids) else None
        if num_taken:
            self._matcher.rollback(num_taken)
        return is_complete

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Go on behind these; False when they are not accepted, and then it has failed."""
        is_taken = not token_ids or bool(self._matcher.consume_tokens(list(token_ids)))
        self._note_failure()
        return is_taken

    def forced(self) -> list[int]:
        """Tokens that must come next, as the model would write them; often none."""
        return list(self._matcher.compute_ff_tokens())

    def fill(self, words: NDArray[np.uint32]) -> None:
        """The tokens that may come next, ends of the answer not among them."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._note_failure()
        if self.is_failed:
            words[:] = 0
            return
        words[:] = self._words[: words.size]
        if self._vocab_size % 32:
            words[-1] &= (1 << self._vocab_size % 32) - 1

    def _note_failure(self) -> None:
        if self._matcher.is_error() and _LEXER_ERROR in self._matcher.get_error():
            self._lexer.is_broken = True
