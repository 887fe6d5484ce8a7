"""The capacity of a run, solved once before anything is allocated.

    budget >= weights + slots + workspace + pages,    pages at least one full context

What is not asked for yields: a default context shrinks to what the budget holds, an explicit one
that does not fit is an error. Pages beyond the lanes' contexts hold checkpoints. A model with
StateImages needs a slot for each checkpoint too: by default there is one for every seven times its
bytes of pages (an eighth of the memory that grows), unless an explicit context leaves less.

The host tier is memory of the host in any case and not part of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig
from ninfer.contract.units import PAGE_TOKENS, Capacity, MemoryPlan
from ninfer.options import EngineOptions, flag_of
from ninfer.program.draft_choice import draft_tokens, has_draft_model
from ninfer.program.memory_costs import CpuCosts, MemoryCosts

_PAGES_PER_SLOT_BYTES: Final = 7
_LEAST_PAGES_PER_SLOT: Final = 4
_MOST_CACHE_SLOTS: Final = 512
"""By default; far more checkpoints than are ever of use at one time."""


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    *,
    weights_bytes: int,
    available_bytes: int,
    host_bytes: int,
    costs: MemoryCosts | None = None,
) -> MemoryPlan:
    """Solve the capacity within `options.memory_budget`, by default what `costs` makes of
    `available_bytes`. `host_bytes` are free on the host, for the host tier; on the CPU executor
    they are the same bytes. `costs` are the CPU executor's unless given.

    Raises OptionError: `--memory-budget` when not even one page of context fits or when the plan
    is larger than `available_bytes`; `--max-context` when an explicit context does not fit or is
    longer than the model's own; `--host-cache-bytes` when it is larger than `host_bytes`.
    """
    if costs is None:
        costs = CpuCosts(config)
    budget = options.memory_budget
    if budget is None:
        budget = costs.default_budget_bytes(available_bytes)
    num_blocks = _host_blocks(options, costs, host_bytes)
    planner = _Planner(config, options, costs, weights_bytes, budget, num_blocks)
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
    num_host_blocks: int

    def solve(self, available_bytes: int) -> MemoryPlan:
        limit = self.config.max_position_embeddings
        self._require_minimum(min(limit, PAGE_TOKENS), available_bytes)
        wanted = self.options.max_context
        if wanted is not None:
            self._require_context(wanted, limit)
        if self.costs.page_bytes() == 0:
            return self._solve_without_pages(limit if wanted is None else wanted)
        return self._solve_pages(limit, wanted)

    def _require_minimum(self, max_context: int, available_bytes: int) -> None:
        plan = self._plan(max_context, 1, self._least_slots)
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

    def _require_context(self, max_context: int, limit: int) -> None:
        if max_context > limit:
            raise OptionError(
                flag_of("max_context"), f"{max_context:,} tokens; the model has {limit:,} positions"
            )
        plan = self._plan(max_context, _pages_of(max_context), self._least_slots)
        if plan.total_bytes > self.budget_bytes:
            raise OptionError(
                flag_of("max_context"),
                f"{max_context:,} tokens need {plan.total_bytes:,} bytes;"
                f" the memory budget is {self.budget_bytes:,} bytes",
            )

    def _solve_pages(self, limit: int, wanted: int | None) -> MemoryPlan:
        """As many pages as the budget holds with their slots; a context that was not asked for
        takes all of them until it is the model's own."""
        budget = self._useful_bytes(limit if wanted is None else wanted)

        def plan_of(num_pages: int) -> MemoryPlan:
            max_context = min(limit, num_pages * PAGE_TOKENS) if wanted is None else wanted
            return self._plan(max_context, num_pages, self._slots_beside(num_pages))

        fits = 1 if wanted is None else _pages_of(wanted)
        too_many = max(fits, budget // self.costs.page_bytes()) + 1
        least = plan_of(fits)
        if least.total_bytes > budget:
            return self._with_slots(least.capacity.max_context, fits, budget)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if plan_of(middle).total_bytes <= budget:
                fits = middle
            else:
                too_many = middle
        return plan_of(fits)

    def _solve_without_pages(self, max_context: int) -> MemoryPlan:
        """Pages cost nothing: every lane has its context, and slots take what is left."""
        num_pages = self.options.max_concurrency * _pages_of(max_context)
        least, fits = 0, max_context
        while fits - least > 1 and not self._fits(fits):
            middle = (least + fits) // 2
            if self._fits(middle):
                least = middle
            else:
                fits = middle
        fits = fits if self._fits(fits) else least
        return self._with_slots(fits, num_pages, self._useful_bytes(fits))

    def _fits(self, max_context: int) -> bool:
        plan = self._plan(max_context, _pages_of(max_context), self._least_slots)
        return plan.total_bytes <= self.budget_bytes

    def _with_slots(self, max_context: int, num_pages: int, budget: int) -> MemoryPlan:
        """These pages, and as many slots as the budget holds besides."""
        least = self._plan(max_context, num_pages, self._least_slots)
        slot_bytes = self.costs.slot_bytes()
        if self.options.cache_slots is not None or slot_bytes == 0:
            return least
        more = min(_MOST_CACHE_SLOTS, max(0, budget - least.total_bytes) // slot_bytes)
        return self._plan(max_context, num_pages, self._least_slots + more)

    def _useful_bytes(self, max_context: int) -> int:
        """The budget; one that nobody asked for only as far as the executor's default cache."""
        most = self.costs.default_cache_bytes
        if self.options.memory_budget is not None or most is None:
            return self.budget_bytes
        lanes = self.options.max_concurrency * _pages_of(max_context)
        return min(
            self.budget_bytes,
            self._plan(max_context, lanes, self._least_slots).total_bytes + most,
        )

    @property
    def _least_slots(self) -> int:
        """The committed and the provisional StateImage of each lane, the root, and the slots for
        checkpoints that were asked for."""
        return 2 * self.options.max_concurrency + 1 + (self.options.cache_slots or 0)

    def _slots_beside(self, num_pages: int) -> int:
        page_bytes, slot_bytes = self.costs.page_bytes(), self.costs.slot_bytes()
        if self.options.cache_slots is not None or slot_bytes == 0:
            return self._least_slots
        pages_per_slot = max(
            _LEAST_PAGES_PER_SLOT, -(-_PAGES_PER_SLOT_BYTES * slot_bytes // page_bytes)
        )
        return self._least_slots + min(_MOST_CACHE_SLOTS, num_pages // pages_per_slot)

    def _plan(self, max_context: int, num_pages: int, num_slots: int) -> MemoryPlan:
        chunk = self.options.prefill_chunk or self.costs.default_prefill_chunk
        capacity = Capacity(
            max_concurrency=self.options.max_concurrency,
            max_context=max_context,
            num_pages=num_pages,
            num_slots=num_slots,
            prefill_chunk=min(chunk, max_context),
            num_host_blocks=self.num_host_blocks,
            max_draft_tokens=draft_tokens(self.options),
            has_draft_model=has_draft_model(self.options),
        )
        page_bytes, slot_bytes = self.costs.page_bytes(), self.costs.slot_bytes()
        workspace = self.costs.workspace_bytes(capacity)
        return MemoryPlan(
            capacity=capacity,
            weights_bytes=self.weights_bytes,
            kv_bytes=num_pages * page_bytes,
            state_bytes=num_slots * slot_bytes,
            workspace_bytes=sum(workspace.values()),
            budget_bytes=self.budget_bytes,
            host_bytes=self.num_host_blocks * page_bytes,
            detail={"page_bytes": page_bytes, "slot_bytes": slot_bytes, **workspace},
        )


def _host_blocks(options: EngineOptions, costs: MemoryCosts, host_bytes: int) -> int:
    """Blocks of the host tier; a model without KV pages has none."""
    wanted = options.host_cache_bytes
    if wanted is not None and wanted > host_bytes:
        raise OptionError(
            flag_of("host_cache_bytes"), f"{wanted:,} bytes; {host_bytes:,} bytes are free"
        )
    if wanted is None:
        wanted = costs.default_host_bytes(host_bytes)
    page_bytes = costs.page_bytes()
    return 0 if page_bytes == 0 else wanted // page_bytes


def _pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
