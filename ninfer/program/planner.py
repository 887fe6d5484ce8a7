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
from ninfer.program import memory_costs


def plan_memory(
    config: ModelConfig, options: EngineOptions, *, weights_bytes: int, available_bytes: int
) -> MemoryPlan:
    """Solve the capacity within `options.memory_budget`, by default half of `available_bytes`.

    Raises OptionError: `--memory-budget` when not even one page of context fits or when the plan
    is larger than `available_bytes`; `--max-context` when an explicit context does not fit or is
    longer than the model's own.
    """
    budget = options.memory_budget
    if budget is None:
        budget = available_bytes // 2
    planner = _Planner(config, options, weights_bytes, budget)
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
        source = "" if self.options.memory_budget is not None else ", half of what is free"
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
        page_bytes = memory_costs.page_bytes(self.config)
        if page_bytes == 0:
            return most
        rest = self.budget_bytes - self._plan(max_context, 0).total_bytes
        return min(most, rest // page_bytes)

    @property
    def _num_slots(self) -> int:
        """The committed and the provisional StateImage of each lane, and the root."""
        return 2 * self.options.max_concurrency + 1

    def _plan(self, max_context: int, num_pages: int) -> MemoryPlan:
        lanes = self.options.max_concurrency
        prefill_chunk = min(self.options.prefill_chunk, max_context)
        page_bytes = memory_costs.page_bytes(self.config)
        slot_bytes = memory_costs.slot_bytes(self.config)
        logits_bytes = memory_costs.logits_bytes(
            self.config, prefill_chunk=prefill_chunk, max_concurrency=lanes
        )
        activation_bytes = memory_costs.activation_bytes(
            self.config,
            prefill_chunk=prefill_chunk,
            max_concurrency=lanes,
            max_context=max_context,
        )
        return MemoryPlan(
            capacity=Capacity(
                max_concurrency=lanes,
                max_context=max_context,
                num_pages=num_pages,
                num_slots=self._num_slots,
                prefill_chunk=prefill_chunk,
            ),
            weights_bytes=self.weights_bytes,
            kv_bytes=num_pages * page_bytes,
            state_bytes=self._num_slots * slot_bytes,
            workspace_bytes=logits_bytes + activation_bytes,
            budget_bytes=self.budget_bytes,
            detail={
                "page_bytes": page_bytes,
                "slot_bytes": slot_bytes,
                "logits_bytes": logits_bytes,
                "activation_bytes": activation_bytes,
            },
        )


def _pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
