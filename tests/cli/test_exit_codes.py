from __future__ import annotations

import inspect
from typing import Any

import pytest

from ninfer.cli.exit_codes import ExitCode, UsageError, exit_code_of
from ninfer.contract import errors
from ninfer.contract.errors import (
    ContextLengthError,
    DeviceError,
    ModelFileError,
    NInferError,
    OpContractError,
    OptionError,
    OutputError,
    RequestError,
    Unavailable,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (OptionError("--port", "x"), 2),
        (ModelFileError("a/b", "c", "x"), 3),
        (RequestError("invalid_value", "x"), 4),
        (Unavailable("deadline_exceeded", "x"), 5),
        (DeviceError("x"), 5),
        (OutputError("stdout", "x"), 6),
        (OpContractError("x"), 70),
        (ZeroDivisionError(), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_failure_has_its_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_every_typed_error_is_mapped_on_purpose() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, NInferError) and kind is not NInferError
    ]
    arguments: dict[type[NInferError], tuple[Any, ...]] = {
        RequestError: ("invalid_value", "x"),
        ContextLengthError: ("x", "x", "x", "prompt"),
        Unavailable: ("model_loading", "x"),
        OptionError: ("--x", "x"),
        ModelFileError: ("p", None, "x"),
        OutputError: ("p", "x"),
    }
    internal = {
        kind for kind in kinds if "InvariantError" in [base.__name__ for base in kind.__mro__]
    }
    assert len(kinds) >= 8
    for kind in kinds:
        error = kind(*arguments.get(kind, ("x",)))
        assert (exit_code_of(error) is ExitCode.INTERNAL) == (kind in internal), kind
