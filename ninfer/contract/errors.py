"""Every error that crosses a folder.

    NInferError
      RequestError       the client's fault, local to one request: code, message, param
        ContextLengthError  a prompt that does not fit
      Unavailable        not now: overload, timeout, draining, stopped: code, message, retry_after_s
      OptionError        a flag or environment value: option, message
      ModelFileError     a model file: path, field, message
      OutputError        a file or stdout that cannot be written: target, message
      DeviceError        the executor's device failed; the engine stops
      NonFiniteLogits    the model computes NaN or infinity for one request: place
      InvariantError     our fault
        OpContractError  an Op was called outside its contract

`gateway/errors.py` maps `code` to a status in one table; `cli/exit_codes.py` maps types to exit
codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ninfer.contract.printable import printable

REQUEST_CODES: Final = frozenset(
    {
        "constraint_dead_end",
        "context_length_exceeded",
        "invalid_grammar",
        "invalid_json",
        "invalid_json_schema",
        "invalid_prompt",
        "invalid_template",
        "invalid_type",
        "invalid_value",
        "missing_required_parameter",
        "model_not_found",
        "schema_too_complex",
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


class ContextLengthError(RequestError):
    """A prompt that does not fit. Client libraries recognise an overflow by its text, and each API
    family by its own beginning; both are made here, so this is their only source.

    overflow   what is too long, in a few words; stands inside `message`
    advice     the rest of `message`, without them
    """

    def __init__(self, head: str, overflow: str, advice: str, param: str) -> None:
        super().__init__("context_length_exceeded", f"{head} ({overflow}). {advice}", param)
        self.overflow = overflow
        self.advice = f"{head}. {advice}"


def context_length_error(
    num_tokens: int, max_context: int, param: str, *, is_lower_bound: bool = False
) -> ContextLengthError:
    """A prompt that does not fit `max_context` tokens, or fills them and leaves none for output.

    param            the field the prompt came in
    is_lower_bound   the prompt has at least so many tokens
    """
    limit, reason = max_context, ""
    if num_tokens == max_context:
        limit, reason = max_context - 1, ", which leave no room for a token of output"
    count = f"at least {num_tokens}" if is_lower_bound else f"{num_tokens}"
    noun = "messages" if param == "messages" else "prompt"
    return ContextLengthError(
        f"This model's maximum context length is {max_context} tokens. However, your request has"
        f" {count} prompt tokens{reason}",
        f"prompt is too long: {num_tokens} tokens > {limit} maximum",
        f"Please reduce the length of the {noun}. [context_length_exceeded]",
        param,
    )


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
    file as a whole is meant. Names come from the file: in the message, unprintable characters of
    all three parts are escapes.
    """

    code = "invalid_model_file"

    def __init__(self, path: Path | str, field: str | None, message: str) -> None:
        where = f"{path}: {field}" if field else f"{path}"
        super().__init__(printable(f"{where}: {message}"))
        self.path = Path(path)
        self.field = field


class OutputError(NInferError):
    """The system refuses what is written: a full disk, a missing directory, a closed stdout.

    `target` is the option that names the file, the file itself, or `stdout`.
    """

    code = "output_error"

    def __init__(self, target: Path | str, message: str) -> None:
        super().__init__(printable(f"{target}: {message}"))
        self.target = target


class DeviceError(NInferError):
    """The device failed; nothing on it can be trusted any more."""

    code = "device_error"


class NonFiniteLogits(NInferError):
    """The model's logits for one row were NaN or infinite; only that request ends.

    All weights were finite when they were loaded, so products of them have left float32. `place`
    says where (`after token 5`).
    """

    code = "non_finite_logits"

    def __init__(self, place: str) -> None:
        super().__init__(
            f"the model's logits are NaN or infinite {place}: its weights overflow, or they do not"
            " belong to its configuration"
        )
        self.place = place


class InvariantError(NInferError):
    """A broken promise inside the program."""

    code = "internal_error"


class OpContractError(InvariantError):
    """An Op was called with shapes, dtypes or values outside its contract."""
