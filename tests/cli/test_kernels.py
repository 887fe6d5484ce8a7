"""`kernels build` and `bench` where there is nothing for them to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.main import main
from ninfer.program.executors.cuda_device import unusable_reason

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


@NO_GPU
def test_bench_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--synthetic", "qwen3.5-0.8b"]) == ExitCode.USAGE
    assert "--executor: bench needs a GPU: " in capsys.readouterr().err
