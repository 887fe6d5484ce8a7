"""One GPU session: every gpu test, then the model benchmarks, each in a process of its own.

    python -m bench.gpu_session --out DIR [--minutes 8] [--tests PATH,PATH|none] [--runs N]
                                [--only MODEL,MODEL]

Kernels are compiled first, for all of it. Writes DIR/gpu_session.json (versions, outcomes of the
tests, steps, the record of every benchmark) and DIR/gpu_session.log (all output), and prints a
table last. What does not fit into the time is left out and named. The exit code is 1 when a test
or a benchmark failed. `bench.sanitize` runs the tests of the Ops under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common.record import environment, write_record

TEST_PATHS: Final = (
    "tests/ops",
    "tests/kernels",
    "tests/program",
    "tests/e2e",
)
ALONE: Final = ("test_memory_does_not_grow",)
"""Tests that watch the device's free memory."""
JOBS: Final = 14
_FAILED: Final = re.compile("(FAILED|ERROR) ")
LEAST_SECONDS: Final = 20.0
"""Nothing is started with less time left."""


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One `ninfer bench`; `needed_s` a guess, for what is left out."""

    synthetic: str
    weights: str
    cases: str
    needed_s: float

    @property
    def name(self) -> str:
        return f"model_{self.synthetic}_{self.weights}_{self.cases.replace(',', '_')}"


RUNS: Final = (
    ModelRun("qwen3.5-4b", "bf16", "1024x1,8192x1,1024x8", 20),
    ModelRun("qwen3.5-27b", "fp8", "1024x1,8192x1,1024x8", 30),
    ModelRun("qwen3.5-27b", "bf16", "1024x1,8192x1", 30),
    ModelRun("qwen3.5-27b", "nvfp4", "1024x1", 25),
    ModelRun("qwen3.5-35b-a3b", "bf16", "1024x1,8192x1,1024x8", 40),
    ModelRun("qwen3.5-27b", "fp8", "131072x1", 60),
    ModelRun("qwen3.5-0.8b", "bf16", "1024x1,1024x8", 20),
    ModelRun("qwen3.5-2b", "bf16", "1024x1", 20),
    ModelRun("qwen3.5-9b", "bf16", "1024x1,8192x1", 20),
    ModelRun("qwen3-8b", "bf16", "1024x1,8192x1", 20),
)


PYTEST: Final = (
    sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider",
    "-o", "addopts=-ra --import-mode=importlib",
)  # fmt: skip
HEADING: Final = (
    "model weights tokens x batch | decode tok/s, step us, device us, % of floor (device) | gap us"
    " | prefill tok/s, % of 790 TFLOP/s | kernels | slowest families"
)


class Session:
    """Runs steps while there is time, and keeps what came of them."""

    def __init__(self, out_dir: Path, minutes: float) -> None:
        self._out_dir = out_dir
        self._end = time.monotonic() + 60.0 * minutes
        self.steps: list[dict[str, Any]] = []
        self.has_failed = False

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def run(self, name: str, command: list[str], *, needed_s: float = LEAST_SECONDS) -> str:
        """Output of one step; empty when there was no time for it."""
        if self.seconds_left < needed_s:
            print(f"== {name}: left out, {self.seconds_left:.0f} s left", flush=True)
            self.steps.append({"name": name, "left_out": True})
            return ""
        started = time.monotonic()
        environ = {**os.environ, "NINFER_REQUIRE_GPU": "1", "PYTHONUNBUFFERED": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environ,
                timeout=self.seconds_left,
            )  # fmt: skip
            code, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            code, output = -1, f"{_text(expired.stdout)}{_text(expired.stderr)}\ntime is up\n"
        elapsed_s = time.monotonic() - started
        self.has_failed |= code != 0
        self.steps.append({"name": name, "code": code, "elapsed_s": elapsed_s, "command": command})
        print(f"== {name}: code {code}, {elapsed_s:.1f} s", flush=True)
        with (self._out_dir / "gpu_session.log").open("a") as log:
            log.write(f"== {name}\n{output}\n")
        return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tests", default=",".join(TEST_PATHS), help="none: no tests")
    parser.add_argument("--runs", type=int, default=len(RUNS), help="the first N benchmarks")
    parser.add_argument("--only", type=chosen_runs, help="benchmarks of these models alone")
    arguments = parser.parse_args()
    runs = (RUNS if arguments.only is None else arguments.only)[: arguments.runs]
    arguments.out.mkdir(parents=True, exist_ok=True)
    session = Session(arguments.out, arguments.minutes)
    with tempfile.TemporaryDirectory() as folder:
        tests, records = run_all(session, Path(folder), arguments.tests, runs)
    import cupy

    write_record(
        arguments.out / "gpu_session.json",
        {
            **environment(cupy),
            "tests": tests,
            "steps": session.steps,
            "records": records,
        },
    )
    rows = [_line(record, case) for record in records.values() for case in record["cases"]]
    print("\n".join([HEADING, *rows]))
    return int(session.has_failed)


def chosen_runs(names: str) -> tuple[ModelRun, ...]:
    """The benchmarks of the models `names` lists, in their usual order."""
    wanted = frozenset(names.split(","))
    unknown = wanted - {item.synthetic for item in RUNS}
    if unknown:
        raise argparse.ArgumentTypeError(f"no benchmark of {', '.join(sorted(unknown))}")
    return tuple(item for item in RUNS if item.synthetic in wanted)


def run_all(
    session: Session, folder: Path, tests: str, runs: Sequence[ModelRun]
) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Outcomes of the tests, and the records of the benchmarks by name."""
    command = [
        sys.executable, "-m", "ninfer", "kernels", "build", "--arch", "sm_90a",
        "--out", str(folder / "kernels"),
    ]  # fmt: skip
    session.run("kernels", command)
    outcomes = {} if tests == "none" else run_tests(session, tests.split(","))
    records = {}
    for item in runs:
        record = run_model(session, folder, item)
        if record is not None:
            records[item.name] = record
    return outcomes, records


def run_tests(session: Session, paths: list[str]) -> dict[str, int]:
    """Counts by outcome of everything marked gpu: first what must be alone on the device, then the
    other tests, a process a file, many at once."""
    listed = session.run("list of tests", [*PYTEST, "--collect-only", *paths])
    nodes = [line for line in listed.splitlines() if "::" in line]
    alone = [node for node in nodes if node.endswith(ALONE)]
    outputs = [session.run(node, [*PYTEST, "-rfE", node], needed_s=90.0) for node in alone]
    files = list(dict.fromkeys(node.partition("::")[0] for node in nodes))
    excluded = [word for node in alone for word in ("--deselect", node)]

    def run_file(path: str) -> str:
        return session.run(path, [*PYTEST, "-rfE", "--maxfail=5", *excluded, path], needed_s=60.0)

    with ThreadPoolExecutor(JOBS) as pool:
        outputs += pool.map(run_file, files)
    counts: Counter[str] = Counter()
    for output in outputs:
        counts.update(_outcomes(output))
    failures = [line for output in outputs for line in output.splitlines() if _FAILED.match(line)]
    print("\n".join([*failures, str(dict(counts))]), flush=True)
    return dict(counts)


def _outcomes(output: str) -> dict[str, int]:
    counts = re.findall(r"(\d+) (passed|failed|error|errors|skipped|deselected)", output)
    return {what: int(count) for count, what in counts}


def run_model(session: Session, folder: Path, item: ModelRun) -> dict[str, Any] | None:
    path = folder / f"{item.name}.json"
    command = [
        sys.executable, "-m", "ninfer", "bench", "--executor", "cuda", "--kernels",
        str(folder / "kernels"), "--synthetic", item.synthetic, "--weights", item.weights,
        "--cases", item.cases, "--prefill-chunk", "8192", "--record", str(path),
    ]  # fmt: skip
    output = session.run(item.name, command, needed_s=item.needed_s)
    if not path.is_file():
        print(output[-2000:], flush=True)
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _line(record: dict[str, Any], case: dict[str, Any]) -> str:
    families = sorted(case["family_s"].items(), key=lambda pair: -pair[1])[:5]
    slowest = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in families)
    size = f"{case['case']['prompt_tokens']}x{case['case']['batch']}"
    return (
        f"{record['model']} {record['weights']} {size}"
        f" | {case['tokens_s']:.1f}, {1e6 * case['step_s']['median']:.0f},"
        f" {1e6 * case['device_step_s']['median']:.0f}, {100 * case['fraction']:.0f}"
        f" ({100 * case['device_fraction']:.0f}) | {1e6 * case['host_gap_s']:.0f}"
        f" | {case['prefill_tokens_s']:.0f}, {100 * case['prefill_flop_s'] / 790e12:.0f}"
        f" | {case['kernels_a_step']} | {slowest}"
    )


def _text(output: str | bytes | None) -> str:
    if output is None:
        return ""
    return output.decode(errors="replace") if isinstance(output, bytes) else output


if __name__ == "__main__":
    sys.exit(main())
