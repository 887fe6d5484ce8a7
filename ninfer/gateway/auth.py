"""Authentication by API keys, checked from the headers before a body is read.

Without keys everybody is let in, whatever they send: clients always send something.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from aiohttp import web

from ninfer.contract.errors import OptionError
from ninfer.gateway.errors import RoutingError
from ninfer.option_values import parse_keys
from ninfer.options import ServeOptions, flag_of

_KEY_HEADERS: Final = ("x-api-key", "api-key")
_BEARER: Final = "bearer"
_MAX_FILE_BYTES: Final = 1 << 20
_FILE_FLAG: Final = flag_of("api_key_file")


class Authentication:
    """The keys of one server. Only hashes are kept: nothing here can show a key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key) for key in dict.fromkeys(keys))

    @property
    def is_required(self) -> bool:
        return bool(self._digests)

    def check(self, request: web.BaseRequest) -> None:
        """Raises RoutingError `invalid_api_key` (401) unless one of the credentials is a key."""
        if self._digests and not any(self._is_known(key) for key in _credentials(request)):
            raise RoutingError(
                "invalid_api_key",
                "An API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                {"WWW-Authenticate": "Bearer"},
            )

    def _is_known(self, key: str) -> bool:
        """Takes as long for a wrong key as for a right one."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def read_authentication(options: ServeOptions) -> Authentication:
    """The keys of the options and of the file they name. Raises OptionError."""
    keys = list(options.api_key)
    if options.api_key_file is not None:
        keys += _keys_of_file(options.api_key_file)
    return Authentication(keys)


def _keys_of_file(name: str) -> list[str]:
    """Raises OptionError; a file without a key is one, for it would let everybody in."""
    try:
        with Path(name).open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1).decode("ascii")
    except UnicodeDecodeError:
        raise OptionError(_FILE_FLAG, f"{name} is not an ASCII text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise OptionError(_FILE_FLAG, f"cannot read {name}: {reason or error}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise OptionError(_FILE_FLAG, f"{name} is larger than {_MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in text.splitlines()]
    keys = [key for line in lines if line and not line.startswith("#") for key in _keys_of(line)]
    if not keys:
        raise OptionError(_FILE_FLAG, f"{name} has no key in it")
    return keys


def _keys_of(line: str) -> Sequence[str]:
    try:
        return parse_keys(line)
    except ValueError as error:
        raise OptionError(_FILE_FLAG, str(error)) from None


def _credentials(request: web.BaseRequest) -> Iterator[str]:
    """Every key that the headers bring; one right one suffices."""
    for value in request.headers.getall("Authorization", ()):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == _BEARER:
            yield key.strip()
    for name in _KEY_HEADERS:
        for value in request.headers.getall(name, ()):
            yield value.strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
