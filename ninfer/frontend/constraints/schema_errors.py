"""Errors of a client's schema, each with a place in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.schema_walk import children, path_of
from ninfer.frontend.constraints.unenforceable import Unenforceable


def invalid(path: str, rule: str) -> RequestError:
    return RequestError("invalid_json_schema", f"'{path}' {rule}.", path)


def too_complex(path: str, rule: str) -> RequestError:
    return RequestError("schema_too_complex", f"'{path}' {rule}.", path)


def unenforceable(error: Unenforceable, schema: Any, path: str) -> RequestError:
    """`schema` stands at `path`, as the client wrote it."""
    place = path
    if error.keyword is not None:
        place = next(_places(schema, path, *error.keyword), path)
    return invalid(place, f"cannot be enforced: it {error}")


def _places(schema: Any, path: str, key: str, value: Any) -> Iterator[str]:
    """Where a keyword has a value."""
    waiting = [(path, schema)]
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, dict):
            if node.get(key) == value:
                yield path_of(place, key)
            waiting += list(children(node, place))[::-1]
