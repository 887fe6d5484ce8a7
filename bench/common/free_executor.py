"""FreeExecutor: a device that takes no time, or a set time a step, and says the same text for ever.

What remains of a server over it is the host: Scheduler, Program, output sessions, protocol, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ninfer.contract.arrays import ByteArray, Float32Array
from ninfer.contract.errors import OpContractError
from ninfer.contract.sampling import GeneratedToken
from ninfer.contract.units import Capacity, Move, RowOutput, UnitRow


class FreeExecutor:
    """Implements the contract's Executor; the token behind cache ordinal n is text[n % len(text)].

    text     token ids that are said in turn
    step_s   time of a unit; the loop is free meanwhile. 0: units end with the next turn of the loop
    """

    def __init__(self, capacity: Capacity, text: Sequence[int], step_s: float = 0.0) -> None:
        self._tokens = [RowOutput(GeneratedToken(token_id)) for token_id in text]
        self._step_s = step_s
        self._blocks: ByteArray = np.zeros((capacity.num_host_blocks, self.page_bytes), np.uint8)

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def device_name(self) -> str:
        return "none"

    @property
    def page_bytes(self) -> int:
        return 1

    @property
    def slot_bytes(self) -> int:
        return 1

    @property
    def host_blocks(self) -> ByteArray:
        return self._blocks

    async def prefill(self, row: UnitRow) -> RowOutput:
        await self._wait()
        return self._output(row)

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        await self._wait()
        return tuple(self._output(row) for row in rows)

    @property
    def max_draft_tokens(self) -> int:
        return 0

    @property
    def has_draft_model(self) -> bool:
        return False

    @property
    def pads_rows(self) -> bool:
        return False

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        raise OpContractError("this executor verifies no drafts")

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        raise OpContractError("this executor verifies no drafts")

    async def score(self, row: UnitRow) -> Float32Array:
        raise OpContractError("this executor has no logits")

    async def save(self, move: Move) -> None:
        """There is nothing to save."""

    async def load(self, move: Move) -> None:
        """There is nothing to load."""

    def close(self) -> None:
        """There is nothing to close."""

    def _output(self, row: UnitRow) -> RowOutput:
        if row.sample is None:
            return RowOutput(None)
        place: int = row.start + row.token_ids.shape[0]
        return self._tokens[place % len(self._tokens)]

    async def _wait(self) -> None:
        await asyncio.sleep(self._step_s)
