"""One JSON file a benchmark run: what was measured, on what, by which command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ninfer import __version__

_FOLDER_OPTIONS: Final = ("--out", "--folder", "--kernels")


def environment(cp: Any) -> dict[str, Any]:
    """Device, driver, versions, commit, date and command of this run.

    NINFER_BENCH_COMMIT names the commit where the tree is not a checkout.
    """
    device = cp.cuda.runtime.getDeviceProperties(0)
    return {
        "device": device["name"].decode(),
        "driver": cp.cuda.runtime.driverGetVersion(),
        "cuda_runtime": cp.cuda.runtime.runtimeGetVersion(),
        "cupy": cp.__version__,
        "python": platform.python_version(),
        "ninfer": __version__,
        "commit": os.environ.get("NINFER_BENCH_COMMIT") or commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(_command(sys.argv)),
    }


def host() -> dict[str, Any]:
    """Processor, versions, commit and date of a run without a device."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ninfer": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _command(arguments: list[str]) -> list[str]:
    """The command line; folders of this machine are no part of how the results came about."""
    shown = [Path(arguments[0]).name, *arguments[1:]]
    for index, option in enumerate(shown[:-1]):
        if option in _FOLDER_OPTIONS:
            shown[index + 1] = option.removeprefix("--").upper()
    return shown


def commit() -> str | None:
    """The checked-out commit, or None outside a checkout."""
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else None


def write_record(path: Path, record: dict[str, Any]) -> None:
    """JSON; a list under `rows` is written last, a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in record.items() if key != "rows"}
    text = json.dumps(head, indent=1)
    if "rows" in record:
        lines = ",\n".join("  " + json.dumps(row) for row in record["rows"])
        text = text.removesuffix("\n}") + f',\n "rows": [\n{lines}\n ]\n}}'
    path.write_text(text + "\n")
