"""Engines one after another over an executor that stays open, where building one takes long.

setting -> executor of its draft length, built or kept -> Program over a part of it -> Engine
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import Capacity, Executor
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import MakeDrafter
from ninfer.program.draft_costs import measure
from ninfer.program.program import ModelProgram
from tests.helpers.lent_executor import LentExecutor
from tests.helpers.speculation_matrix import Setting


@dataclass(frozen=True, slots=True, eq=False)
class SizedExecutor:
    executor: Executor
    capacity: Capacity


BuildExecutor: TypeAlias = Callable[[int, bool], SizedExecutor]
"""With so many draft tokens, with the draft model or without."""


class KeptExecutors:
    """Keeps the newest executor alone. Used by one task; `engine` by one setting at a time."""

    def __init__(self, config: ModelConfig, build: BuildExecutor) -> None:
        self._config = config
        self._build = build
        self._kind: tuple[int, bool] | None = None
        self._kept: SizedExecutor | None = None

    @asynccontextmanager
    async def engine(self, setting: Setting, make_drafter: MakeDrafter) -> AsyncIterator[Engine]:
        """Implements OpenEngine. InvariantError when the executor is too small for the setting."""
        kept = self._executor_for(setting)
        capacity = part_of(kept.capacity, setting)
        executor = LentExecutor(kept.executor, capacity.num_host_blocks)
        if capacity.max_draft_tokens > 0:
            # Steps of nobody: behind them, none is left that an earlier engine started ahead.
            await measure(executor, capacity, self._config.vocab_size, longest_s=0.0)
        program = ModelProgram(self._config, executor, capacity)
        engine = Engine(program, max_pending=512, queue_timeout_s=600.0, make_drafter=make_drafter)
        await engine.start()
        try:
            yield engine
            program.check()
        finally:
            await engine.aclose()

    def close(self) -> None:
        kept, self._kept, self._kind = self._kept, None, None
        if kept is not None:
            kept.executor.close()

    def _executor_for(self, setting: Setting) -> SizedExecutor:
        kind = (setting.draft_tokens, setting.has_draft_model)
        if self._kept is None or self._kind != kind:
            self.close()
            self._kept, self._kind = self._build(*kind), kind
        return self._kept


def part_of(capacity: Capacity, setting: Setting) -> Capacity:
    """The first lanes, pages, slots and host blocks, as many as the setting has. InvariantError
    when there are fewer."""
    part = replace(
        capacity,
        max_concurrency=setting.lanes,
        num_pages=setting.num_pages,
        num_slots=2 * setting.lanes + 1,
        num_host_blocks=setting.host_blocks,
    )
    is_part = (
        part.max_concurrency <= capacity.max_concurrency
        and part.num_pages <= capacity.num_pages
        and part.num_slots <= capacity.num_slots
        and part.num_host_blocks <= capacity.num_host_blocks
    )
    if not is_part:
        raise InvariantError(f"{setting} is no part of {capacity}")
    return part
