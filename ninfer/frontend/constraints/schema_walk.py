"""Where a JSON Schema has schemas inside, and how their places are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

SCHEMA_KEYS: Final = (
    "additionalProperties", "items", "propertyNames", "additionalItems", "contains", "not", "if",
    "then", "else", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""Keywords whose value is a schema (`items` and `additionalItems` of old drafts: also a list)."""
LIST_KEYS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
MAP_KEYS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""

Rewrite: TypeAlias = Callable[[dict[str, Any], str], Any]


def path_of(path: str, key: str | int) -> str:
    """The place of a member; "" is the schema itself."""
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"


def children(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(place, schema) of all schemas right inside."""
    for key in SCHEMA_KEYS:
        if isinstance(schema.get(key), dict | bool):
            yield path_of(path, key), schema[key]
    for key in LIST_KEYS:
        if isinstance(schema.get(key), list):
            for index, item in enumerate(schema[key]):
                yield path_of(path_of(path, key), index), item
    for key in MAP_KEYS:
        if isinstance(schema.get(key), dict):
            for name, item in schema[key].items():
                yield path_of(path_of(path, key), name), item


def all_schemas(root: Any) -> Iterator[dict[str, Any]]:
    """Every object schema, the root first."""
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += [child for _, child in children(node, "")]


def rewritten(schema: Any, path: str, rewrite: Rewrite) -> Any:
    """A copy in which every object schema is `rewrite(copy, place)`, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in SCHEMA_KEYS:
        if isinstance(copy.get(key), dict):
            copy[key] = rewritten(copy[key], path_of(path, key), rewrite)
    for key in LIST_KEYS:
        if isinstance(copy.get(key), list):
            place = path_of(path, key)
            copy[key] = [
                rewritten(item, path_of(place, index), rewrite)
                for index, item in enumerate(copy[key])
            ]
    for key in MAP_KEYS:
        if isinstance(copy.get(key), dict):
            place = path_of(path, key)
            copy[key] = {
                name: rewritten(item, path_of(place, name), rewrite)
                for name, item in copy[key].items()
            }
    return rewrite(copy, path)


def resolve(root: Any, reference: str) -> Any:
    """What a reference inside the document (`#`, `#/...`) names. LookupError when nothing does."""
    node = root
    for part in _parts(reference):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and _is_index(part, node):
            node = node[int(part)]
        else:
            raise LookupError(reference)
    return node


def _is_index(part: str, node: list[Any]) -> bool:
    return part.isdecimal() and len(part) < 10 and int(part) < len(node)


def _parts(reference: str) -> list[str]:
    pointer = unquote(reference.removeprefix("#"))
    if not pointer:
        return []
    if not pointer.startswith("/"):
        raise LookupError(reference)
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]
