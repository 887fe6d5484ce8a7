"""compute-sanitizer over the device tests of the Ops, every test in a process of its own.

    python -m bench.sanitize --out DIR [--minutes 5] [--sets 1] [--jobs 14] [--tools memcheck,...]
                             [--only TEXT]

Runs N parameter sets of every test under each tool, many processes at once: the tools are slow on
the host, not on the device. Writes DIR/sanitizer.json: by tool and test the sets, the errors found
and whether the test ended in time. --only keeps the tests whose name contains the text. The exit
code is 1 when a tool found an error or a test failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.common.record import environment, write_record

TOOLS: Final = ("racecheck", "memcheck")
_TESTS: Final = "tests/ops"
_LEAST_SECONDS: Final = 15.0
_FOUND_EXIT_CODE: Final = 9
PYTEST: Final = (
    sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider",
    "-o", "addopts=--import-mode=importlib", "--timeout=0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SanitizedTest:
    """`errors` None: the test did not end in time, or was not begun."""

    tool: str
    test: str
    sets: tuple[str, ...]
    errors: int | None
    has_failed: bool
    elapsed_s: float
    output: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--sets", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    end = time.monotonic() + 60.0 * arguments.minutes
    chosen = choose_sets(list_tests(), arguments.sets)
    jobs = [
        (tool, name, sets)
        for tool in arguments.tools.split(",")
        for name, sets in chosen.items()
        if arguments.only in name
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda job: run_test(*job, end=end), jobs))
    import cupy

    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {**environment(cupy), "tests": [asdict(item) for item in done]}
    write_record(arguments.out / "sanitizer.json", record)
    for item in done:
        if item.errors or item.has_failed or item.errors is None:
            print(f"{item.tool} {item.test}: {_outcome(item)}\n{item.output}")
    for tool in arguments.tools.split(","):
        mine = [item for item in done if item.tool == tool]
        ended = [item for item in mine if item.errors is not None]
        errors = sum(item.errors or 0 for item in ended)
        print(f"{tool}: {len(ended)} of {len(mine)} tests ended, {errors} errors")
    return int(any(item.errors or item.has_failed for item in done))


def list_tests() -> list[str]:
    """Node ids of all device tests of the Ops."""
    command = [*PYTEST, "--collect-only", _TESTS]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in listed.splitlines() if "::" in line]


def choose_sets(nodes: Sequence[str], sets_a_test: int) -> dict[str, tuple[str, ...]]:
    """So many parameter sets of every test, spread over all of its sets."""
    tests: dict[str, list[str]] = {}
    for node in nodes:
        tests.setdefault(node.partition("[")[0], []).append(node)
    return {
        name: tuple(
            sets[index * len(sets) // sets_a_test] for index in range(min(sets_a_test, len(sets)))
        )
        for name, sets in tests.items()
    }


def run_test(tool: str, name: str, sets: tuple[str, ...], *, end: float) -> SanitizedTest:
    """Run one test under a tool until it ends or time is up."""
    started = time.monotonic()
    if end - started < _LEAST_SECONDS:
        return SanitizedTest(tool, name, sets, None, False, 0.0)
    # What the driver's Python package asks for and does not find is no error of ours.
    command = [
        "compute-sanitizer", "--tool", tool, "--report-api-errors", "no",
        "--error-exitcode", str(_FOUND_EXIT_CODE), *PYTEST, *sets,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=end - started
        )
    except subprocess.TimeoutExpired:
        return SanitizedTest(tool, name, sets, None, False, time.monotonic() - started)
    output = done.stdout + done.stderr
    found = [int(count) for count in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)]
    has_failed = done.returncode != 0 or not found
    return SanitizedTest(
        tool, name, sets, sum(found), has_failed, time.monotonic() - started,
        output[-2000:] if has_failed else "",
    )  # fmt: skip


def _outcome(item: SanitizedTest) -> str:
    if item.errors is None:
        return "not ended in time"
    return f"{item.errors} errors" + (", failed" if item.has_failed else "")


if __name__ == "__main__":
    sys.exit(main())
