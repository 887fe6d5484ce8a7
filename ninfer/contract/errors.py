"""Every error that crosses a folder.

    NInferError
      RequestError       the client's fault, local to one request: code, message, param
      Unavailable        not now: overload, timeout, draining, stopped: code, message, retry_after_s
      OptionError        a flag or environment value: option, message
      ModelFileError     a model file: path, field, message
      DeviceError        the executor's device failed; the engine stops
      InvariantError     our fault
        OpContractError  an Op was called outside its contract

`gateway/errors.py` maps `code` to a status in one table; `cli/exit_codes.py` maps types to exit
codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

REQUEST_CODES: Final = frozenset(
    {
        "context_length_exceeded",
        "invalid_json",
        "invalid_prompt",
        "invalid_template",
        "invalid_type",
        "invalid_value",
        "missing_required_parameter",
        "model_not_found",
        "tokenizer_unavailable",
        "unsupported_parameter",
        "unsupported_value",
    }
)
"""Codes of RequestError raised below the gateway; the gateway adds transport codes of its own."""

UNAVAILABLE_CODES: Final = frozenset(
    {
        "deadline_exceeded",
        "engine_unavailable",
        "model_loading",
        "request_queue_timeout",
        "server_draining",
        "server_overloaded",
    }
)


class NInferError(Exception):
    """Root of the tree. `str(error)` is one line fit for a user."""

    code: str = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(NInferError):
    """Bad input of one request. `param` is the JSON path of the field, or None."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Unavailable(NInferError):
    """The request was fine but cannot be served now. `retry_after_s` is an estimate or None."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class OptionError(NInferError):
    """A command-line flag or an environment variable has a bad value."""

    code = "invalid_option"

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class ModelFileError(NInferError):
    """A model file is missing, damaged or not what the configuration says.

    `field` names the tensor, the configuration key or the metadata entry, or is None when the
    file as a whole is meant.
    """

    code = "invalid_model_file"

    def __init__(self, path: Path | str, field: str | None, message: str) -> None:
        where = f"{path}: {field}" if field else f"{path}"
        super().__init__(f"{where}: {message}")
        self.path = Path(path)
        self.field = field


class DeviceError(NInferError):
    """The device failed; nothing on it can be trusted any more."""

    code = "device_error"


class NonFiniteLogits(NInferError):
    """The model's logits for one row were NaN or infinite; only that request ends."""

    code = "non_finite_logits"


class InvariantError(NInferError):
    """A broken promise inside the program."""

    code = "internal_error"


class OpContractError(InvariantError):
    """An Op was called with shapes, dtypes or values outside its contract."""
