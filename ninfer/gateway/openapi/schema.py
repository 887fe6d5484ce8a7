"""Small JSON Schema builders. A field that may be absent may be null: both mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]


def integer(
    minimum: int | None = None, maximum: int | None = None, *, about: str | None = None
) -> Schema:
    return _bounded("integer", minimum, maximum, about)


def number(
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    above: bool = False,
    about: str | None = None,
) -> Schema:
    """`above`: the minimum itself is excluded."""
    schema = _bounded("number", minimum, maximum, about)
    if above:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return schema


def string(
    *choices: str, longest: int | None = None, shortest: int | None = None, about: str | None = None
) -> Schema:
    """Any, or one of `choices`."""
    schema: Schema = {"type": "string"}
    if choices:
        schema["enum"] = list(choices)
    return _with(schema, minLength=shortest, maxLength=longest, description=about)


def boolean(about: str | None = None) -> Schema:
    return _with({"type": "boolean"}, description=about)


def array(items: Schema, *, longest: int | None = None, shortest: int | None = None) -> Schema:
    return _with({"type": "array", "items": items}, minItems=shortest, maxItems=longest)


def any_object(about: str | None = None) -> Schema:
    return _with({"type": "object"}, description=about)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*schemas: Schema, about: str | None = None) -> Schema:
    return _with({"anyOf": list(schemas)}, description=about)


def nullable(schema: Schema) -> Schema:
    """`schema`, or null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    changed = {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        changed["enum"] = [*schema["enum"], None]
    return changed


def request(
    required: Mapping[str, Schema],
    optional: Mapping[str, Schema],
    *,
    example: Mapping[str, Any],
    either: Sequence[str] = (),
) -> Schema:
    """A request body. Unknown fields are ignored; `either`: one of these fields is needed."""
    properties = {**required, **{name: nullable(schema) for name, schema in optional.items()}}
    schema: Schema = {"type": "object", "properties": properties, "examples": [dict(example)]}
    if required:
        schema["required"] = list(required)
    if either:
        schema["anyOf"] = [
            {"required": [name], "properties": {name: optional[name]}} for name in either
        ]
    return schema


def answer(**fields: Schema) -> Schema:
    """An object of an answer: at least these fields are in it."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _bounded(kind: str, minimum: float | None, maximum: float | None, about: str | None) -> Schema:
    return _with({"type": kind}, minimum=minimum, maximum=maximum, description=about)


def _with(schema: Schema, **more: Any) -> Schema:
    return schema | {name: value for name, value in more.items() if value is not None}
