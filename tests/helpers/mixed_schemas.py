"""Random JSON Schemas of any keywords side by side: many allow nothing, or cannot be enforced."""

from __future__ import annotations

import random
from typing import Any

_KEYWORDS = (
    "type", "properties", "items", "anyOf", "$ref", "enum", "minimum", "maximum", "maxLength",
    "minLength", "format", "required", "propertyNames", "exclusiveMinimum", "pattern", "const",
    "oneOf", "allOf", "not", "multipleOf", "patternProperties", "prefixItems", "maxProperties",
    "additionalProperties", "minItems", "maxItems",
)  # fmt: skip
_VALUES = ["a", "b", 1, 2.5, None, True, [], {"a": 1}, [1, "a"], -3, 1e20]
_CHOICES: dict[str, list[Any]] = {
    "type": ["string", "integer", "number", "object", "array", "null", ["string", "null"],
             ["integer", "object"], "boolean"],
    "propertyNames": [{"pattern": "^a"}, {"maxLength": 2}, {"enum": ["a", "b"]}],
    "$ref": ["#", "#/$defs/a", "#/$defs/b", "#/properties/a"],
    "const": ["a", 1, 1.0, None, {"a": {"b": [1]}}, []],
    "format": ["date", "uuid", "ipv4", "unknown"],
    "pattern": ["^a+$", "b", "^[a-c]{1,3}$", "\\d"],
    "multipleOf": [1, 2, 0.5, 3],
    "minimum": [-5, 0, 3, 2.5, -1e30],
    "maximum": [5, 0, 3, 2.5, 100, 10**20],
    "exclusiveMinimum": [-5, 0, 2.5, 7],
}  # fmt: skip


def mixed_root(rng: random.Random) -> dict[str, Any]:
    """Half of them have definitions."""
    schema = _schema(rng, 3)
    if rng.random() < 0.5:
        schema["$defs"] = {"a": _schema(rng, 2), "b": _schema(rng, 1)}
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    return {key: _value(rng, key, depth) for key in rng.sample(_KEYWORDS, rng.randrange(1, 5))}


def _value(rng: random.Random, key: str, depth: int) -> Any:
    if key in _CHOICES:
        return rng.choice(_CHOICES[key])
    match key:
        case "properties":
            return {name: _inner(rng, depth) for name in rng.sample("abcd", rng.randrange(3))}
        case "patternProperties":
            patterns = rng.sample(["^a", "b$", "^[cd]+$"], rng.randrange(3))
            return {pattern: _inner(rng, depth) for pattern in patterns}
        case "items" | "not" | "additionalProperties":
            return _inner(rng, depth)
        case "anyOf" | "oneOf" | "allOf" | "prefixItems":
            return [_inner(rng, depth) for _ in range(rng.randrange(1, 4))]
        case "enum":
            return rng.sample(_VALUES, rng.randrange(1, 5))
        case "required":
            return rng.sample("abcd", rng.randrange(3))
        case _:
            return rng.randrange(4)


def _inner(rng: random.Random, depth: int) -> Any:
    if depth <= 1 or rng.random() < 0.2:
        leaves: list[Any] = [True, False, {"type": "string"}, {"const": "a"}, {"$ref": "#"}]
        return rng.choice(leaves)
    return _schema(rng, depth - 1)
