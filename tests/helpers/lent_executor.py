"""LentExecutor: an executor that outlives the Program it is lent to."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer.contract.arrays import ByteArray, Float32Array
from ninfer.contract.units import Executor, Move, RowOutput, UnitRow


class LentExecutor:
    """Implements the contract's Executor with another one, of which it shows the first
    `num_host_blocks` host blocks. Closing it leaves the other open."""

    def __init__(self, executor: Executor, num_host_blocks: int) -> None:
        self._executor = executor
        self._num_host_blocks = num_host_blocks

    @property
    def name(self) -> str:
        return self._executor.name

    @property
    def device_name(self) -> str:
        return self._executor.device_name

    @property
    def max_draft_tokens(self) -> int:
        return self._executor.max_draft_tokens

    @property
    def has_draft_model(self) -> bool:
        return self._executor.has_draft_model

    @property
    def pads_rows(self) -> bool:
        return self._executor.pads_rows

    @property
    def page_bytes(self) -> int:
        return self._executor.page_bytes

    @property
    def slot_bytes(self) -> int:
        return self._executor.slot_bytes

    @property
    def host_blocks(self) -> ByteArray:
        return self._executor.host_blocks[: self._num_host_blocks]

    async def prefill(self, row: UnitRow) -> RowOutput:
        return await self._executor.prefill(row)

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        return await self._executor.decode(rows, goes_on=goes_on)

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        return await self._executor.verify(rows)

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        await self._executor.rewind(rows, counts)

    async def score(self, row: UnitRow) -> Float32Array:
        return await self._executor.score(row)

    async def save(self, move: Move) -> None:
        await self._executor.save(move)

    async def load(self, move: Move) -> None:
        await self._executor.load(move)

    def close(self) -> None:
        """The lender closes."""
