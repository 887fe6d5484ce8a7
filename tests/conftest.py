"""Settings all tests share, and how a run of them all is spread over processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

MAX_WORKERS: Final = 8
"""Each of them imports every test first."""

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")

IS_WORKER: Final = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    # Workers share the processors, so threads of a product would wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker a processor for the whole suite; none for tests that are named, or share a GPU."""
    from ninfer.program.executors.cuda_device import unusable_reason
    from ninfer.program.host_cpus import usable_cpus

    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    if is_named or unusable_reason() is None:
        return 0
    return min(usable_cpus(), MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that are slow come first, so that no worker is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The lines that all workers reached together, if SLIPCOVER_ENABLED had them counted."""
    folder = os.environ.get("SLIPCOVER_COVERAGE_DIR")
    if folder is None or IS_WORKER:
        return
    from slipcover import print_coverage

    merged = Path(folder) / "merged.json"
    if merged.is_file():
        terminalreporter.section("coverage")
        with merged.open() as file:
            print_coverage(
                json.load(file), outfile=terminalreporter, skip_covered=True, missing_width=60
            )
    shutil.rmtree(folder)
