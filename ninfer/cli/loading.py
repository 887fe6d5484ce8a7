"""From a path to a running engine: the one place where the command line wires the parts.

    open_model -> ModelFrontend -> load_program -> LoadedModel -> running_engine -> Engine

The Frontend comes before the weights: a bad template or tokenizer shows at once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Final, TypeAlias

from ninfer.cli.console import Console
from ninfer.cli.fingerprint import fingerprint_of
from ninfer.cli.progress import ProgressLine
from ninfer.contract.drafting import DraftCosts
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import ModelCard, ModelSource
from ninfer.contract.program import Program
from ninfer.contract.units import MemoryPlan
from ninfer.convert.source import open_model
from ninfer.engine.context.limits import CacheMemory
from ninfer.engine.context_cache import ContextCache
from ninfer.engine.core import Engine
from ninfer.engine.speculation.row_drafter import CommonRates, RowDrafter
from ninfer.frontend.frontend import ModelFrontend
from ninfer.options import EngineOptions, SamplingOptions
from ninfer.program.loader import load_program

LoadProgress: TypeAlias = Callable[[str, int, int], None]

_PENDING_PER_LANE: Final = 4
_LEAST_PENDING: Final = 16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `program` belongs to whoever runs an engine or scorer on it; `device` says
    where it is."""

    source: ModelSource
    frontend: ModelFrontend
    program: Program
    plan: MemoryPlan
    card: ModelCard
    device: str


def open_named_model(path: Path | None) -> ModelSource:
    """The model at `path`, or the embedded demo model. Raises ModelFileError."""
    if path is None:
        return open_model(embedded_model_path())
    if _is_missing(path):
        raise ModelFileError(path, None, "no such model directory, .ninfer file or command")
    return open_model(path)


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:
        # open_model says what is wrong with such a name.
        return False


def embedded_model_path() -> Path:
    return Path(str(files("ninfer"))) / "data" / "demo_model"


def load_model(
    source: ModelSource,
    engine_options: EngineOptions,
    sampling: SamplingOptions,
    progress: LoadProgress,
    *,
    name: str | None = None,
) -> LoadedModel:
    """Blocking. Raises ModelFileError and OptionError; nothing stays behind then."""
    frontend = ModelFrontend(source.config, source.resources, sampling)
    program, plan = load_program(source, engine_options, progress)
    card = ModelCard(
        name=name or source.name,
        architecture=source.config.architecture,
        max_context=plan.capacity.max_context,
        created_s=int(time.time()),
        fingerprint=fingerprint_of(source, engine_options),
    )
    fitted = frontend.for_context(card.max_context)
    return LoadedModel(source, fitted, program, plan, card, program.device)


def load_with_progress(
    path: Path | None,
    engine_options: EngineOptions,
    sampling: SamplingOptions,
    console: Console,
) -> LoadedModel:
    """`load_model` of a named model behind a progress line."""
    with ProgressLine(console, "loading") as line:
        return load_model(open_named_model(path), engine_options, sampling, line)


@asynccontextmanager
async def running_engine(model: LoadedModel, options: EngineOptions) -> AsyncIterator[Engine]:
    """An engine over the model's Program; leaving ends what runs and closes the Program."""
    costs = await measured_costs(model)
    engine = make_engine(model, options, make_cache(model, options), costs)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


async def measured_costs(model: LoadedModel) -> DraftCosts | None:
    """What drafts cost here, None where there are none. On an error the Program is closed."""
    program = model.program
    if program.capacity.max_draft_tokens == 0:
        return None
    with ExitStack() as undo:
        undo.callback(program.close)
        costs = await program.measure_drafts()
        undo.pop_all()
    return costs


def make_cache(model: LoadedModel, options: EngineOptions) -> ContextCache:
    """The context cache of the model's Program; for one engine."""
    return ContextCache(model.program, cache_memory_of(model.plan, options))


def make_engine(
    model: LoadedModel,
    options: EngineOptions,
    cache: ContextCache,
    draft_costs: DraftCosts | None = None,
) -> Engine:
    lanes = model.plan.capacity.max_concurrency
    max_pending = options.max_pending
    if max_pending is None:
        max_pending = max(_LEAST_PENDING, _PENDING_PER_LANE * lanes)
    gap_ms = options.max_decode_gap_ms
    return Engine(
        model.program,
        max_pending=max_pending,
        queue_timeout_s=options.queue_timeout,
        policy=cache,
        max_decode_gap_s=gap_ms / 1000.0 if gap_ms > 0 else None,
        make_drafter=partial(RowDrafter, common=CommonRates()),
        draft_costs=draft_costs,
    )


def cache_memory_of(plan: MemoryPlan, options: EngineOptions) -> CacheMemory:
    """What the context cache must know of the memory it works with."""
    capacity = plan.capacity
    return CacheMemory(
        page_bytes=plan.kv_bytes // capacity.num_pages,
        slot_bytes=plan.state_bytes // capacity.num_slots,
        has_disk=options.cache_dir is not None and capacity.num_host_blocks > 0,
    )
