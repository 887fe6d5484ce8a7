"""MaskAhead: what would restrict the next token at a place that an answer may reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import NInferError
from ninfer.frontend.constraints.guide import Guide, GuideState


@dataclass(frozen=True, slots=True, eq=False)
class MaskAhead:
    """Implements contract TokenMask; valid until the guide's next commit."""

    guide: Guide
    state: GuideState

    @property
    def is_active(self) -> bool:
        return self.guide.restricts_at(self.state)

    def fill(self, words: NDArray[np.uint32]) -> None:
        self.guide.fill_at(self.state, words)

    def forced(self) -> tuple[int, ...]:
        return self.guide.forced_at(self.state)

    def failure(self) -> NInferError:
        return self.guide.failure()
