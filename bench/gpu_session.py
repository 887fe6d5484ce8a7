"""One GPU session: every gpu test, then the model benchmarks, each in a process of its own.

    python -m bench.gpu_session --out DIR [--minutes 8] [--skip-tests] [--models NAME,NAME]

Writes DIR/gpu_session.json (versions, results of the tests, what was run) and a record for each
benchmark, DIR/model_*.json. What does not fit into the time is left out and named. The exit code is
1 when a test or a benchmark failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.common.record import environment, write_record

TEST_PATHS: Final = (
    "tests/ops",
    "tests/kernels",
    "tests/program",
    "tests/e2e",
)
LEAST_SECONDS: Final = 20.0
"""Nothing is started with less time left."""


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One `ninfer bench`; `needed_s` a guess, for what is left out."""

    synthetic: str
    weights: str
    arguments: tuple[str, ...]
    needed_s: float

    @property
    def name(self) -> str:
        short = self.synthetic.replace(".", "_").replace("-", "_")
        cases = "_".join(part for part in self.arguments if part[0].isdigit()).replace(",", "-")
        return f"model_{short}_{self.weights}_{cases}"


RUNS: Final = (
    ModelRun("qwen3.5-4b", "bf16", ("--prompts", "1024,8192", "--batches", "1,8"), 30),
    ModelRun("qwen3.5-27b", "fp8", ("--prompts", "1024,8192", "--batches", "1,8"), 50),
    ModelRun("qwen3.5-27b", "bf16", ("--prompts", "1024,8192", "--batches", "1"), 50),
    ModelRun("qwen3.5-27b", "nvfp4", ("--prompts", "1024", "--batches", "1"), 40),
    ModelRun("qwen3.5-35b-a3b", "bf16", ("--prompts", "1024,8192", "--batches", "1,8"), 60),
    ModelRun("qwen3.5-27b", "fp8", ("--prompts", "131072", "--batches", "1"), 60),
    ModelRun("qwen3.5-0.8b", "bf16", ("--prompts", "1024", "--batches", "1,8"), 25),
    ModelRun("qwen3.5-9b", "bf16", ("--prompts", "1024", "--batches", "1"), 30),
    ModelRun("qwen3-8b", "bf16", ("--prompts", "1024", "--batches", "1"), 30),
    ModelRun("qwen3.5-2b", "bf16", ("--prompts", "1024", "--batches", "1"), 25),
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
        (self._out_dir / f"{name}.log").write_text(output)
        return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--tests", default=",".join(TEST_PATHS))
    parser.add_argument("--models", default="")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    session = Session(arguments.out, arguments.minutes)
    tests: dict[str, int] = {}
    if not arguments.skip_tests:
        tests = run_tests(session, [path for path in arguments.tests.split(",") if path])
    chosen = [name for name in arguments.models.split(",") if name]
    for item in RUNS:
        if not chosen or item.synthetic in chosen:
            run_model(session, arguments.out, item)
    import cupy

    write_record(
        arguments.out / "gpu_session.json",
        {**environment(cupy), "tests": tests, "steps": session.steps,
         "runs": [asdict(item) for item in RUNS]},
    )  # fmt: skip
    return int(session.has_failed)


def run_tests(session: Session, paths: list[str]) -> dict[str, int]:
    """Counts by outcome of everything marked gpu."""
    command = [
        sys.executable, "-m", "pytest", "-m", "gpu", "-q",
        "--maxfail=25", "-p", "no:cacheprovider", *paths,
    ]  # fmt: skip
    output = session.run("tests", command, needed_s=60.0)
    print("\n".join(output.splitlines()[-40:]), flush=True)
    counts = re.findall(r"(\d+) (passed|failed|error|errors|skipped|deselected)", output)
    return {what: int(count) for count, what in counts}


def run_model(session: Session, out_dir: Path, item: ModelRun) -> None:
    command = [
        sys.executable, "-m", "ninfer", "bench", "--executor", "cuda",
        "--synthetic", item.synthetic, "--weights", item.weights, *item.arguments,
        "--record", str(out_dir / f"{item.name}.json"),
    ]  # fmt: skip
    output = session.run(item.name, command, needed_s=item.needed_s)
    print(output[-4000:], flush=True)


def _text(output: str | bytes | None) -> str:
    if output is None:
        return ""
    return output.decode(errors="replace") if isinstance(output, bytes) else output


if __name__ == "__main__":
    sys.exit(main())
