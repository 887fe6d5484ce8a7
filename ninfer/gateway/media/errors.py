"""The three ways in which media of a request can be refused."""

from __future__ import annotations

from ninfer.contract.errors import RequestError


def invalid_media(path: str, rule: str) -> RequestError:
    """`rule` completes "'path' ...", as in "is no picture"."""
    return RequestError("invalid_media", f"'{path}' {rule}.", path)


def media_budget_exceeded(path: str, rule: str) -> RequestError:
    return RequestError("media_budget_exceeded", f"'{path}' {rule}.", path)


def remote_media_disabled(path: str) -> RequestError:
    return RequestError(
        "remote_media_disabled",
        f"'{path}' is a remote address and this server fetches none; send a data: URL.",
        path,
    )


def fetch_failed(path: str) -> RequestError:
    """One text for all reasons: a telling one would let clients explore the server's network."""
    return invalid_media(path, "could not be fetched")
