"""Paths to handlers: a table, with and without the `/v1` prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ninfer.contract.errors import RequestError
from ninfer.gateway.errors import RoutingError
from ninfer.gateway.exchange import Handler

_PREFIX: Final = "/v1"
Methods = Mapping[str, Handler]


def normalise_path(path: str) -> str:
    """The path without its `/v1` prefix and trailing slash."""
    if path == _PREFIX or path.startswith(_PREFIX + "/"):
        path = path[len(_PREFIX) :]
    return path.rstrip("/") or "/"


class Router:
    """`exact` by whole path; `prefixes` (ending in a slash) take every longer path."""

    def __init__(self, exact: Mapping[str, Methods], prefixes: Mapping[str, Methods]) -> None:
        self._exact = exact
        self._prefixes = prefixes

    def resolve(self, method: str, path: str) -> Handler:
        """The handler of a normalised path; HEAD is answered where GET is.

        Raises RequestError `not_found` and RoutingError `method_not_allowed`.
        """
        methods = self._methods_of(path)
        if methods is None:
            raise _not_found(path)
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = [*methods, "HEAD"] if "GET" in methods else list(methods)
            raise RoutingError(
                "method_not_allowed",
                f"This path does not take {method}; allowed: {', '.join(allowed)}.",
                {"Allow": ", ".join(allowed)},
            )
        return handler

    def _methods_of(self, path: str) -> Methods | None:
        if path in self._exact:
            return self._exact[path]
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return None


def _not_found(path: str) -> RequestError:
    if path.startswith(_PREFIX + "/"):
        hint = "Unknown path: the base URL has one /v1 too many."
        return RequestError("not_found", hint)
    return RequestError("not_found", "Unknown path.")
