"""AssumedCosts: what rounds cost where nobody has measured it."""

from __future__ import annotations

from typing import Final

COLUMN_COST: Final = 0.08
"""What one more input adds to a step, as a share of it."""
PROPOSAL_COST: Final = 0.1
"""The same of one more proposal for all rows."""


class AssumedCosts:
    """Implements DraftCosts: a plain step is 1, whatever its rows."""

    def step(self, num_rows: int, num_columns: int, width: int) -> float:
        return 1.0 + COLUMN_COST * (num_columns - num_rows)

    def proposals(self, num_rows: int, num_tokens: int) -> float:
        return PROPOSAL_COST * num_tokens
