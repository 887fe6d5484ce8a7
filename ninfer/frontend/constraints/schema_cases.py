"""A schema as simple ones, any of which may hold: no references and combinations at their top.

What is nested deeper stays as it is. `oneOf` counts as `anyOf`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Final, TypeAlias

from ninfer.frontend.constraints.library_schema import matches
from ninfer.frontend.constraints.schema_walk import resolve
from ninfer.frontend.constraints.unenforceable import Unenforceable

Case: TypeAlias = dict[str, Any]

ALL_TYPES: Final = ("string", "integer", "number", "boolean", "null", "array", "object")
_MAX_CASES: Final = 64
_MAX_SCHEMAS: Final = 4_000
"""Looked at for one schema."""
_MAX_REFERENCES: Final = 64
"""One behind another."""
_UNIONS: Final = ("anyOf", "oneOf")
_MEMBERS: Final = frozenset({"properties", "patternProperties", "additionalProperties"})
_ITEMS: Final = frozenset({"items", "prefixItems"})


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
        elif len(references) >= _MAX_REFERENCES:
            raise Unenforceable("combines too many references")
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
    own = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        values = [schema["const"]]
        own["enum"] = _common(own["enum"], values) if "enum" in own else values
    for key in ("type", "pattern"):
        if isinstance(own.get(key), str):
            own[key] = [own[key]]
    return own


def _all_of(left: list[Case], right: list[Case]) -> list[Case]:
    if len(left) * len(right) > _MAX_CASES and min(len(left), len(right)) > 1:
        raise Unenforceable("combines too many schemas")
    return [_both(one, other) for one in left for other in right]


def said_of(case: Mapping[str, Any], name: str) -> list[Any]:
    """The schemas that a case has for a member."""
    found = [case["properties"][name]] if name in case.get("properties", {}) else []
    for pattern, schema in case.get("patternProperties", {}).items():
        if matches(pattern, name):
            found.append(schema)
    return found or [case.get("additionalProperties", True)]


def all_of(schemas: Iterable[Any]) -> Any:
    """One schema that says what several say."""
    parts: list[Any] = []
    for schema in schemas:
        if schema is False:
            return False
        is_list = isinstance(schema, dict) and schema.keys() == {"allOf"}
        for part in schema["allOf"] if is_list else [schema]:
            if part not in (True, {}) and part not in parts:
                parts.append(part)
    if len(parts) < 2:
        return parts[0] if parts else True
    return {"allOf": parts}


def only(value: Any) -> Any:
    """The schema of one value."""
    if isinstance(value, list):
        size = len(value)
        items = [only(item) for item in value]
        return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: only(item) for name, item in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    return {"enum": [value]}


def _both(one: Case, other: Case) -> Case:
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if one[key] != other[key] and key in _MERGES:
            merged[key] = _MERGES[key](one[key], other[key])
    if _MEMBERS & one.keys() and _MEMBERS & other.keys():
        merged |= _members(one, other)
    if _ITEMS & one.keys() and _ITEMS & other.keys():
        merged |= _items(one, other)
    return merged


def _members(one: Case, other: Case) -> Case:
    names = dict.fromkeys([*one.get("properties", {}), *other.get("properties", {})])
    patterns = dict.fromkeys(
        [*one.get("patternProperties", {}), *other.get("patternProperties", {})]
    )
    found: Case = {}
    if names:
        both = {name: all_of([*said_of(one, name), *said_of(other, name)]) for name in names}
        found["properties"] = both
    if patterns:
        found["patternProperties"] = {
            pattern: all_of([_said_by(one, pattern), _said_by(other, pattern)])
            for pattern in patterns
        }
    if any("additionalProperties" in case for case in (one, other)):
        found["additionalProperties"] = all_of(
            [case.get("additionalProperties", True) for case in (one, other)]
        )
    return found


def _said_by(case: Case, pattern: str) -> Any:
    """What a case has for the members with a pattern that no other pattern of it shares."""
    patterns = case.get("patternProperties", {})
    return patterns.get(pattern, case.get("additionalProperties", True))


def _items(one: Case, other: Case) -> Case:
    size = max(len(case.get("prefixItems", [])) for case in (one, other))
    found: Case = {"items": all_of([case.get("items", True) for case in (one, other)])}
    if size:
        found["prefixItems"] = [
            all_of([_item(one, index), _item(other, index)]) for index in range(size)
        ]
    return found


def _item(case: Case, index: int) -> Any:
    prefix = case.get("prefixItems", [])
    return prefix[index] if index < len(prefix) else case.get("items", True)


def _multiple(one: float, other: float) -> float:
    """The least number that is a multiple of both."""
    first, second = Fraction(str(one)), Fraction(str(other))
    least = Fraction(
        math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator)
    )
    return least.numerator if least.denominator == 1 else float(least)


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


def _neither(one: Any, other: Any) -> Any:
    raise Unenforceable("combines different values of a keyword")


_MERGES: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "type": _common_types,
    "enum": _common,
    "pattern": _joined,
    "required": _joined,
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
    "multipleOf": _multiple,
}
"""What two keywords of one kind come to; those of members and items are merged together."""
KEYWORDS: Final = frozenset(
    {*_MERGES, *_MEMBERS, *_ITEMS, "const", "$ref", "anyOf", "oneOf", "allOf"}
)
"""All that mean something here."""
_KEPT: Final = (*_MERGES, *sorted(_MEMBERS), *sorted(_ITEMS))
