"""The capacity of a run, solved once before anything is allocated.

    budget >= weights + slots + workspace + pages,    pages between one full context and
                                                      max_concurrency full contexts

What is not asked for yields: a default context shrinks to what the budget holds, an explicit one
that does not fit is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity, MemoryPlan
from ninfer.options import EngineOptions, flag_of
from ninfer.program.memory_costs import CpuCosts, MemoryCosts


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    *,
    weights_bytes: int,
    available_bytes: int,
    costs: MemoryCosts | None = None,
) -> MemoryPlan:
    """Solve the capacity within `options.memory_budget`, by default what `costs` makes of
    `available_bytes`. `costs` are the CPU executor's unless given.

    Raises OptionError: `--memory-budget` when not even one page of context fits or when the plan
    is larger than `available_bytes`; `--max-context` when an explicit context does not fit or is
    longer than the model's own.
    """
    if costs is None:
        costs = CpuCosts(config)
    budget = options.memory_budget
    if budget is None:
        budget = costs.default_budget_bytes(available_bytes)
    planner = _Planner(config, options, costs, weights_bytes, budget)
    plan = planner.solve(available_bytes)
    if plan.total_bytes > available_bytes:
        raise OptionError(
            flag_of("memory_budget"),
            f"the plan needs {plan.total_bytes:,} bytes and {available_bytes:,} bytes are free",
        )
    return plan


@dataclass(frozen=True, slots=True)
class _Planner:
    config: ModelConfig
    options: EngineOptions
    costs: MemoryCosts
    weights_bytes: int
    budget_bytes: int

    def solve(self, available_bytes: int) -> MemoryPlan:
        limit = self.config.max_position_embeddings
        self._require_minimum(min(limit, PAGE_TOKENS), available_bytes)
        wanted = self.options.max_context
        if wanted is not None:
            return self._solve_explicit(wanted, limit)
        max_context = self._longest_context(limit)
        if max_context < limit:
            return self._plan(max_context, _pages_of(max_context))
        return self._plan(limit, self._most_pages(limit))

    def _require_minimum(self, max_context: int, available_bytes: int) -> None:
        plan = self._plan(max_context, 1)
        if plan.total_bytes <= self.budget_bytes:
            return
        source = "" if self.options.memory_budget is not None else f", {self.costs.default_budget}"
        raise OptionError(
            flag_of("memory_budget"),
            f"the least that runs needs {plan.total_bytes:,} bytes (weights {plan.weights_bytes:,},"
            f" states {plan.state_bytes:,}, workspace {plan.workspace_bytes:,}, one page of KV"
            f" {plan.kv_bytes:,}); the budget is {self.budget_bytes:,} bytes{source}"
            f" ({available_bytes:,} bytes are free)",
        )

    def _solve_explicit(self, max_context: int, limit: int) -> MemoryPlan:
        if max_context > limit:
            raise OptionError(
                flag_of("max_context"), f"{max_context:,} tokens; the model has {limit:,} positions"
            )
        needed = self._plan(max_context, _pages_of(max_context)).total_bytes
        if needed > self.budget_bytes:
            raise OptionError(
                flag_of("max_context"),
                f"{max_context:,} tokens need {needed:,} bytes;"
                f" the memory budget is {self.budget_bytes:,} bytes",
            )
        return self._plan(max_context, self._most_pages(max_context))

    def _longest_context(self, limit: int) -> int:
        """The longest context whose single sequence fits, in whole pages below the limit."""
        fits, too_many = 1, _pages_of(limit) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            max_context = min(limit, middle * PAGE_TOKENS)
            if self._plan(max_context, middle).total_bytes <= self.budget_bytes:
                fits = middle
            else:
                too_many = middle
        return min(limit, fits * PAGE_TOKENS)

    def _most_pages(self, max_context: int) -> int:
        """As many as the lanes can use and the budget holds."""
        most = self.options.max_concurrency * _pages_of(max_context)
        page_bytes = self.costs.page_bytes()
        if page_bytes == 0:
            return most
        rest = self.budget_bytes - self._plan(max_context, 0).total_bytes
        return min(most, rest // page_bytes)

    @property
    def _num_slots(self) -> int:
        """The committed and the provisional StateImage of each lane, and the root."""
        return 2 * self.options.max_concurrency + 1

    def _plan(self, max_context: int, num_pages: int) -> MemoryPlan:
        chunk = self.options.prefill_chunk or self.costs.default_prefill_chunk
        capacity = Capacity(
            max_concurrency=self.options.max_concurrency,
            max_context=max_context,
            num_pages=num_pages,
            num_slots=self._num_slots,
            prefill_chunk=min(chunk, max_context),
        )
        page_bytes, slot_bytes = self.costs.page_bytes(), self.costs.slot_bytes()
        workspace = self.costs.workspace_bytes(capacity)
        return MemoryPlan(
            capacity=capacity,
            weights_bytes=self.weights_bytes,
            kv_bytes=num_pages * page_bytes,
            state_bytes=self._num_slots * slot_bytes,
            workspace_bytes=sum(workspace.values()),
            budget_bytes=self.budget_bytes,
            detail={"page_bytes": page_bytes, "slot_bytes": slot_bytes, **workspace},
        )


def _pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
