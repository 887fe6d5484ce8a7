"""The complement of a schema, where other keywords can say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ninfer.frontend.constraints.schema_cases import ALL_TYPES, KEYWORDS
from ninfer.frontend.constraints.schema_walk import SCHEMA_KEYS, resolve

_MEANINGFUL: Final = frozenset(
    {
        *KEYWORDS, *SCHEMA_KEYS, "nullable", "minContains", "maxContains", "dependentRequired",
        "dependentSchemas", "dependencies", "uniqueItems", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_MAX_DEPTH: Final = 12
_OPPOSITES: Final[Mapping[str, tuple[str, str, float]]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""A bound -> the type that it speaks of, and the bound that a value beyond it keeps to."""


def denied(schema: Any, root: Any, depth: int = 0) -> Any:
    """A schema of what another one excludes, None when there is no telling. `depth` counts schemas
    round it."""
    if depth > _MAX_DEPTH:
        return None
    schema = followed(schema, root)
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    ways = []
    for key, value in schema.items():
        if key not in _MEANINGFUL:
            continue
        way = _denied_keyword(key, value, root, depth + 1)
        if way is None:
            return None
        ways.append(way)
    kept = [way for way in ways if way is not False]
    if len(kept) < 2:
        return kept[0] if kept else False
    return {"anyOf": kept}


def followed(schema: Any, root: Any) -> Any:
    """What a schema that is one reference refers to, a step at most; itself if that is nothing."""
    if not isinstance(schema, dict) or (schema.keys() & _MEANINGFUL) != {"$ref"}:
        return schema
    try:
        return resolve(root, schema["$ref"])
    except LookupError:
        return schema


def _denied_keyword(key: str, value: Any, root: Any, depth: int) -> Any:
    if key in _OPPOSITES:
        return _beyond(key, value)
    rule = _RULES.get(key)
    return None if rule is None else rule(value, root, depth)


def _beyond(key: str, bound: Any) -> Any:
    kind, opposite, step = _OPPOSITES[key]
    if isinstance(bound, bool):
        return None
    if key in ("minLength", "minItems") and bound == 0:
        return False
    return {"type": kind, opposite: bound + step}


def _other_types(kinds: str | Sequence[str], *_: Any) -> Any:
    excluded = [kinds] if isinstance(kinds, str) else kinds
    if "integer" in excluded and "number" not in excluded:
        return None
    left = [kind for kind in ALL_TYPES if kind not in (*excluded, "integer")]
    return {"type": left} if left else False


def _lacking(names: Sequence[str], *_: Any) -> Any:
    ways = [{"type": "object", "properties": {name: False}} for name in names]
    return {"anyOf": ways} if ways else False


def _some_other_member(properties: Mapping[str, Any], root: Any, depth: int) -> Any:
    ways = []
    for name, schema in properties.items():
        value = denied(schema, root, depth)
        if value is None:
            return None
        if value is not False:
            ways.append({"type": "object", "properties": {name: value}, "required": [name]})
    return {"anyOf": ways} if ways else False


def _all_denied(schemas: Sequence[Any], root: Any, depth: int) -> Any:
    ways = [denied(schema, root, depth) for schema in schemas]
    return None if None in ways else {"allOf": ways}


def _some_denied(schemas: Sequence[Any], root: Any, depth: int) -> Any:
    ways = [denied(schema, root, depth) for schema in schemas]
    return None if None in ways else {"anyOf": ways}


_RULES: Final[Mapping[str, Callable[[Any, Any, int], Any]]] = {
    "type": _other_types,
    "required": _lacking,
    "properties": _some_other_member,
    "anyOf": _all_denied,
    "allOf": _some_denied,
    "not": lambda schema, *_: schema,
}
