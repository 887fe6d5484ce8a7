"""`kernels build` and `bench` where there is nothing for them to do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.main import main
from ninfer.program.executors.cuda_device import unusable_reason
from tests.helpers.command import PATIENCE_S, start_ninfer

NO_GPU = pytest.mark.skipif(unusable_reason() is None, reason="a GPU can be used here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "build"], "--out: the folder to fill is needed"),
        (["kernels", "build", "--out", "{}", "--arch", "sm_1"], "--arch: 'sm_1' is not one of"),
        (["kernels"], "arguments are required: action"),
        (["kernels", "clean", "--out", "{}"], "invalid choice: 'clean'"),
        (["bench", "--cases", "12x"], "--cases: '' is not a whole number"),
        (["bench", "--cases", "0x1"], "--cases: 0 is out of range"),
        (["bench", "--synthetic", "gpt"], "--synthetic: 'gpt' is not one of"),
        (["bench", "model", "--synthetic", "qwen3-8b"], "MODEL: goes without --synthetic"),
    ],
)
def test_wrong_usage_names_the_argument(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([argument.format(tmp_path) for argument in arguments])
    assert code == ExitCode.USAGE
    assert message in capsys.readouterr().err


def children_of(pid: int) -> list[int]:
    return [int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid: int) -> bool:
    """Gone, or a zombie that waits for somebody to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_build_that_is_stopped_takes_its_compilers_with_it(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    flags = ["--arch", "sm_80", "--jobs", "2", "--out", str(tmp_path)]
    with start_ninfer("kernels", "build", *flags) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"compiled ")
        workers = children_of(process.pid)
        assert len(workers) >= 2
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code
        lines = process.stderr.read().splitlines()
    assert all(line.startswith(b"compiled ") for line in lines)
    end_s = time.monotonic() + PATIENCE_S
    while not all(has_ended(worker) for worker in workers):
        assert time.monotonic() < end_s, "a compiler goes on"
        time.sleep(0.01)
    files = list(tmp_path.iterdir())
    assert files
    assert all(file.suffix == ".cubin" for file in files)


@NO_GPU
def test_bench_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--synthetic", "qwen3.5-0.8b"]) == ExitCode.USAGE
    assert "--executor: bench needs a GPU: " in capsys.readouterr().err
