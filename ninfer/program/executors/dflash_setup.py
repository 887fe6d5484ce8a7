"""DflashSetup: a DFlash draft model as an executor is told of it, before its weights are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.model import ModelObject
from ninfer.models.dflash_config import DflashConfig


@dataclass(frozen=True, slots=True, eq=False)
class DflashSetup:
    """The model and what its rows and ids mean.

    objects        its weights, in order of use
    token_ids      [Vd] int64 the tokens of the rows of its own head; None: rows are tokens
    num_token_ids  ids from here on are no tokens and never guessed
    """

    config: DflashConfig
    objects: tuple[ModelObject, ...]
    token_ids: NDArray[np.int64] | None
    num_token_ids: int

    @property
    def has_embedding(self) -> bool:
        """Of its own; else its target's."""
        return any(item.name == "embed_tokens" for item in self.objects)

    @property
    def has_head(self) -> bool:
        """Of its own; else its target's."""
        return any(item.name == "lm_head" for item in self.objects)
