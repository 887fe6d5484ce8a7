"""TokenMask: which tokens may come next in one sequence, packed into bits while the model runs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import NInferError


class TokenMask(Protocol):
    """One request's restriction of its next token.

    The Program asks `is_active` when it launches a unit that draws a token. The executor calls
    `fill` once for such a unit, from any thread, after it has queued the forward pass. From the
    launch to the settlement of the unit nobody else touches what it is made from.
    """

    @property
    def is_active(self) -> bool:
        """Whether the next token is restricted."""

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Allow exactly the tokens that may come: bit id & 31 of word id >> 5. `words` has
        ceil(V / 32) of them; bits past V mean nothing. No bit at all is a dead end. Never raises.
        """

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, in this order, whatever the model computes; mostly none.
        Asked between units."""

    def failure(self) -> NInferError:
        """Why the last mask left no token to draw."""
