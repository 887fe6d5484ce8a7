"""Paths to handlers: a table, with and without the `/v1` prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ninfer.contract.errors import RequestError
from ninfer.gateway.errors import RoutingError
from ninfer.gateway.exchange import Handler

_PREFIX: Final = "/v1"
ANY_SEGMENT: Final = "{id}"
"""Stands in a pattern for any one segment of a path."""
REST: Final = "{path}"
"""Stands for whatever follows a prefix."""
NO_ROUTE: Final = "none"
Methods = Mapping[str, Handler]


def normalise_path(path: str) -> str:
    """The path without its `/v1` prefix and trailing slash."""
    if path == _PREFIX or path.startswith(_PREFIX + "/"):
        path = path[len(_PREFIX) :]
    return path.rstrip("/") or "/"


class Router:
    """`exact` by whole path; `prefixes` (ending in a slash) take every longer path; `patterns`
    take any one segment where they have `{id}`. What is more exact wins."""

    def __init__(
        self,
        exact: Mapping[str, Methods],
        prefixes: Mapping[str, Methods],
        patterns: Mapping[str, Methods] | None = None,
    ) -> None:
        self._exact = exact
        self._prefixes = prefixes
        self._patterns = patterns or {}

    def resolve(self, method: str, path: str) -> Handler:
        """The handler of a normalised path; HEAD is answered where GET is.

        Raises RequestError `not_found` and RoutingError `method_not_allowed`.
        """
        methods = self._methods_of(path) or {}
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise self.refusal(path)
        return handler

    def refusal(self, path: str | None) -> RequestError:
        """What a method that the path does not take is told: `method_not_allowed`, or `not_found`
        for a path that nothing stands at. None: the path is not known."""
        if path is None:
            return _not_allowed(self._every_method())
        methods = self._methods_of(path)
        return _not_found(path) if methods is None else _not_allowed(list(methods))

    def allowed(self, path: str) -> str:
        """The methods a path takes, with commas; those of any path for `*`, which stands for the
        server. Raises RequestError `not_found`."""
        if path == "*":
            return _listed(self._every_method())
        methods = self._methods_of(path)
        if methods is None:
            raise _not_found(path)
        return _listed(methods)

    def route_of(self, path: str) -> str:
        """The route a path takes, as `routes` names it; `NO_ROUTE` where nothing stands."""
        found = self._find(path)
        return NO_ROUTE if found is None else found[0]

    def routes(self) -> Iterator[tuple[str, Methods]]:
        """Every route there is, without `/v1`; `{id}` and `{path}` stand for what varies."""
        yield from self._exact.items()
        yield from self._patterns.items()
        for prefix, methods in self._prefixes.items():
            yield prefix + REST, methods

    def _every_method(self) -> list[str]:
        return sorted({method for _, methods in self.routes() for method in methods})

    def _methods_of(self, path: str) -> Methods | None:
        found = self._find(path)
        return None if found is None else found[1]

    def _find(self, path: str) -> tuple[str, Methods] | None:
        if path in self._exact:
            return path, self._exact[path]
        for pattern, methods in self._patterns.items():
            if _matches(pattern, path):
                return pattern, methods
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return prefix + REST, methods
        return None


def _matches(pattern: str, path: str) -> bool:
    wanted, given = pattern.split("/"), path.split("/")
    return len(wanted) == len(given) and all(
        part == own or (part == ANY_SEGMENT and own != "")
        for part, own in zip(wanted, given, strict=True)
    )


def _listed(methods: Iterable[str]) -> str:
    names = list(methods)
    return ", ".join([*names, "HEAD"] if "GET" in names else names)


def _not_allowed(methods: list[str]) -> RoutingError:
    allowed = _listed(methods)
    return RoutingError(
        "method_not_allowed",
        f"This method is not allowed here; allowed: {allowed}.",
        {"Allow": allowed},
    )


def _not_found(path: str) -> RequestError:
    if path.startswith(_PREFIX + "/"):
        hint = "Unknown path: the base URL has one /v1 too many."
        return RequestError("not_found", hint)
    if "//" in path:
        hint = "Unknown path: it has two slashes in a row; the base URL may end in one too many."
        return RequestError("not_found", hint)
    return RequestError("not_found", "Unknown path.")
