"""A schema as simple ones, any of which may hold: no references and combinations at their top.

What is nested deeper stays as it is. `oneOf` counts as `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from ninfer.frontend.constraints.schema_walk import resolve

Case: TypeAlias = dict[str, Any]

ALL_TYPES: Final = ("string", "integer", "number", "boolean", "null", "array", "object")
_MAX_CASES: Final = 64
_MAX_SCHEMAS: Final = 1_000
"""Looked at for one schema."""
_UNIONS: Final = ("anyOf", "oneOf")


class Unenforceable(Exception):
    """The text says what there is no grammar for, without a subject."""


def cases(root: Mapping[str, Any], schema: Any) -> list[Case]:
    """None at all when no value is allowed. In a case `type` and `pattern` are lists, and `const`
    is an `enum`. Raises Unenforceable."""
    return _Expansion(root).cases(schema, frozenset())


class _Expansion:
    """`references` are those that are being followed: one that comes back adds no value."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def cases(self, schema: Any, references: frozenset[str]) -> list[Case]:
        self._num_left -= 1
        if self._num_left < 0:
            raise Unenforceable("combines too many schemas")
        if not isinstance(schema, dict):
            return [] if schema is False else [{}]
        found = [_own(schema)]
        for union in self._unions(schema, references):
            found = _all_of(found, union)
        return [case for case in found if case.get("type") != [] and case.get("enum") != []]

    def _unions(
        self, schema: Mapping[str, Any], references: frozenset[str]
    ) -> Iterator[list[Case]]:
        """What must hold besides its own keywords."""
        reference = schema.get("$ref")
        if reference in references:
            yield []
        elif reference is not None:
            yield self.cases(resolve(self._root, reference), references | {reference})
        for item in schema.get("allOf", ()):
            yield self.cases(item, references)
        for key in _UNIONS:
            if key in schema:
                yield [case for item in schema[key] for case in self.cases(item, references)]


def case_types(case: Case) -> list[str]:
    """JSON types of its values; one that speaks of members or items alone means objects, lists."""
    if "type" in case:
        return list(case["type"])
    if "properties" in case:
        return ["object"]
    return ["array"] if "items" in case else list(ALL_TYPES)


def _own(schema: Mapping[str, Any]) -> Case:
    own = {key: schema[key] for key in _MERGES if key in schema}
    if "const" in schema:
        values = [schema["const"]]
        own["enum"] = _common(own["enum"], values) if "enum" in own else values
    for key in ("type", "pattern"):
        if isinstance(own.get(key), str):
            own[key] = [own[key]]
    return own


def _all_of(left: list[Case], right: list[Case]) -> list[Case]:
    if len(left) * len(right) > _MAX_CASES:
        raise Unenforceable("combines too many schemas")
    return [_both(one, other) for one in left for other in right]


def _both(one: Case, other: Case) -> Case:
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            merged[key] = _MERGES[key](one[key], other[key])
    if _closes(one, other) or _closes(other, one):
        raise Unenforceable("combines additionalProperties with properties of other schemas")
    return merged


def _closes(one: Case, other: Case) -> bool:
    """`one` says something of members that only `other` names."""
    rest = one.get("additionalProperties", True)
    named = other.get("properties", {}).keys() - one.get("properties", {}).keys()
    return rest not in (True, {}) and bool(named)


def _common(one: list[Any], other: list[Any]) -> list[Any]:
    texts = {json.dumps(value, sort_keys=True) for value in other}
    return [value for value in one if json.dumps(value, sort_keys=True) in texts]


def _common_types(one: list[str], other: list[str]) -> list[str]:
    both = [kind for kind in one if kind in other]
    if "integer" not in both and {"integer", "number"} <= {*one, *other}:
        both.append("integer")
    return both


def _joined(one: list[str], other: list[str]) -> list[str]:
    return [*one, *(item for item in other if item not in one)]


def _properties(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        merged[name] = {"allOf": [one[name], other[name]]}
    return merged


def _schemas(one: Any, other: Any) -> Any:
    return {"allOf": [one, other]}


def _neither(one: Any, other: Any) -> Any:
    raise Unenforceable("combines different values of a keyword")


_MERGES: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "type": _common_types,
    "enum": _common,
    "pattern": _joined,
    "required": _joined,
    "properties": _properties,
    "items": _schemas,
    "minLength": max,
    "maxLength": min,
    "minimum": max,
    "maximum": min,
    "exclusiveMinimum": max,
    "exclusiveMaximum": min,
    "minItems": max,
    "maxItems": min,
    "minProperties": max,
    "maxProperties": min,
    "format": _neither,
    "multipleOf": _neither,
    "prefixItems": _neither,
    "patternProperties": _neither,
    "additionalProperties": _neither,
}
"""The keywords that mean something here, and what two of them come to."""
