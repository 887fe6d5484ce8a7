"""Random JSON Schemas within what can be enforced exactly, satisfiable by construction."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6")
_PATTERNS = ("^[a-c]{1,4}$", "^\\d{2}-[xyz]+$", "b", "^(foo|bar)?$", "^é*z$")
_NAMES = ("a", "b", "name", "size", "größe", "x-y", "with space", 'quo"te', "ключ")


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]]
    makers = [_integer, _number, _text, _enum, _simple]
    if depth > 0:
        makers += [_object, _object, _array, _tuple, _any_of, _all_of, _union, _map]
    return rng.choice(makers)(rng, depth)


def random_root(rng: random.Random) -> Schema:
    """Some have definitions, one of them recursive."""
    if rng.random() < 0.25:
        node: Schema = {
            "type": "object",
            "properties": {
                "value": random_schema(rng, 1),
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n~1o%25de"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"n/o%de": node}, "$ref": "#/$defs/n~1o%25de"}
    return random_schema(rng)


def bounded(schema: Schema) -> Schema:
    """What keeps to a schema and is short: no long strings, lists and objects."""
    copy = {key: _bounded_inner(key, value) for key, value in schema.items()}
    if "allOf" in copy:
        copy["maxProperties"] = 2
    kinds = copy.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "string" in kinds and "format" not in copy:
        copy.setdefault("maxLength", 12)
    if "array" in kinds:
        copy.setdefault("maxItems", 3)
        copy.setdefault("items", {"type": "null"})
    if "object" in kinds:
        _bound_names(copy)
        copy.setdefault("maxProperties", len(copy.get("properties", {})) + 2)
    return copy


def _bound_names(schema: Schema) -> None:
    """Members that are not named have short names."""
    others = schema.get("additionalProperties", {"type": "boolean"})
    if "propertyNames" in schema:
        schema["propertyNames"] = {"maxLength": 4}
    elif "patternProperties" in schema:
        patterns = schema["patternProperties"].items()
        schema["patternProperties"] = {
            f"{pattern.rstrip('$')}[a-z]{{0,3}}$": item for pattern, item in patterns
        }
    elif others is not False:
        schema["patternProperties"] = {"^[A-Z]{1,4}$": others}
        schema["additionalProperties"] = False


def _bounded_inner(key: str, value: Any) -> Any:
    if key in ("properties", "patternProperties", "$defs"):
        return {name: bounded(item) for name, item in value.items()}
    if key in ("anyOf", "prefixItems"):
        return [bounded(item) for item in value]
    if key == "allOf":
        # What they say of members is merged, so none of them may be closed alone.
        return [{**part, "properties": bounded(part)["properties"]} for part in value]
    if key in ("items", "additionalProperties") and isinstance(value, dict):
        return bounded(value)
    return value


def _integer(rng: random.Random, _: int) -> Schema:
    low = rng.choice([None, -123, -5, 0, 3, 2**33])
    schema: Schema = {"type": "integer"}
    if low is not None:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.5:
        high = (0 if low is None else low) + rng.choice([2, 9, 1000, 20_000_000_000])
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    if rng.random() < 0.1:
        return {"type": "integer", "multipleOf": rng.choice([2, 3, 10])}
    return schema


def _number(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "number"}
    if rng.random() < 0.6:
        low = rng.choice([-10.25, -1, 0, 0.5, 3])
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.6:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([0.25, 1, 99.5])
    return schema


def _text(rng: random.Random, _: int) -> Schema:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case 2:
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(9)}
        case _:
            return {"type": "string"}


def _enum(rng: random.Random, _: int) -> Schema:
    values = ["red", "é\n", "", 1, -2.5, None, True, {"k": [1]}, []]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _simple(rng: random.Random, _: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    choice = rng.random()
    if choice < 0.5:
        schema["additionalProperties"] = False
    elif choice < 0.8:
        schema["additionalProperties"] = random_schema(rng, 0)
    return schema


def _map(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        names: Schema = rng.choice([{"pattern": "^[a-z]{1,3}$"}, {"maxLength": 4}])
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": random_schema(rng, 0),
        }
    return {
        "type": "object",
        "patternProperties": {"^x": random_schema(rng, 0), "^y[0-9]$": random_schema(rng, 0)},
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(3)
    schema: Schema = {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low}
    if rng.random() < 0.7:
        schema["maxItems"] = low + rng.randrange(3)
    return schema


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return {
        "type": "array",
        "prefixItems": items,
        "items": rng.choice([False, {"type": "null"}]),
        "minItems": rng.randrange(len(items) + 1),
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    return {
        "allOf": [
            {
                "type": "object",
                "properties": {"left": random_schema(rng, depth - 1)},
                "required": ["left"],
            },
            {"properties": {"right": random_schema(rng, 0)}, "required": ["right"]},
        ]
    }


def _union(rng: random.Random, _: int) -> Schema:
    return {"type": rng.choice([["string", "null"], ["integer", "boolean"], ["number", "null"]])}
