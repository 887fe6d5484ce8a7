"""Models on a real device for tests marked gpu, or a skip with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ninfer.contract.model import ModelSource
from ninfer.options import EngineOptions
from ninfer.program.cuda_loader import load_cuda
from ninfer.program.dflash_loading import DflashDraft, open_dflash_draft
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_device import unusable_reason
from tests.helpers.executor_driver import MAX_SEQUENCES, PAGES_PER_SEQUENCE

SMALL_OPTIONS = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=MAX_SEQUENCES,
    max_context=64 * PAGES_PER_SEQUENCE,
    memory_budget=4 << 30,
    host_cache_bytes=256 << 20,
    prefill_chunk=512,
)
"""What the executor driver's sequences need."""


def require_device() -> None:
    """Skips without a device, or fails when NINFER_REQUIRE_GPU=1 promises one."""
    reason = unusable_reason()
    if reason is None:
        return
    if os.environ.get("NINFER_REQUIRE_GPU") == "1":
        pytest.fail(f"NINFER_REQUIRE_GPU=1, but {reason}")
    pytest.skip(reason)


@contextmanager
def cuda_executor(
    source: ModelSource, options: EngineOptions = SMALL_OPTIONS, draft: DflashDraft | None = None
) -> Iterator[CudaExecutor]:
    """`draft` by default what the options name."""
    require_device()
    draft = draft or open_dflash_draft(source, options)
    executor = load_cuda(source, options, lambda *_: None, draft).executor
    try:
        yield executor
    finally:
        executor.close()
