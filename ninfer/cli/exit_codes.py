"""Exit codes of the command line and the errors they stand for; docs/user-guide.md lists them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from ninfer.contract.errors import (
    DeviceError,
    InvariantError,
    ModelFileError,
    NInferError,
    NonFiniteLogits,
    OptionError,
    OutputError,
    RequestError,
    Unavailable,
)


class ExitCode(IntEnum):
    OK = 0
    USAGE = 2
    MODEL_FILE = 3
    REQUEST = 4
    UNAVAILABLE = 5
    OUTPUT = 6
    INTERNAL = 70
    INTERRUPTED = 130


class UsageError(NInferError):
    """The command line as a whole makes no sense: an unknown flag, a missing value."""

    code = "usage"


_CODES: Final[tuple[tuple[type[NInferError], ExitCode], ...]] = (
    (UsageError, ExitCode.USAGE),
    (OptionError, ExitCode.USAGE),
    (ModelFileError, ExitCode.MODEL_FILE),
    (RequestError, ExitCode.REQUEST),
    (Unavailable, ExitCode.UNAVAILABLE),
    (DeviceError, ExitCode.UNAVAILABLE),
    (OutputError, ExitCode.OUTPUT),
    (NonFiniteLogits, ExitCode.MODEL_FILE),
    (InvariantError, ExitCode.INTERNAL),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """The code for what ended the program; INTERNAL for what nobody expected."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.INTERNAL
