"""Keywords of a schema have values of the right kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ninfer.frontend.constraints.schema_cases import ALL_TYPES
from ninfer.frontend.constraints.schema_errors import invalid
from ninfer.frontend.constraints.schema_walk import MAP_KEYS, SCHEMA_KEYS, path_of

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip


def check_shapes(schema: Mapping[str, Any], path: str) -> None:
    """What the library would report without a place, or take for something else."""
    for key in MAP_KEYS:
        if not isinstance(schema.get(key, {}), dict):
            raise invalid(path_of(path, key), "must be an object of schemas")
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema and not (isinstance(schema[key], list) and schema[key]):
            raise invalid(path_of(path, key), "must be a list of at least one schema")
    if not isinstance(schema.get("prefixItems", []), list):
        raise invalid(path_of(path, "prefixItems"), "must be a list of schemas")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise invalid(path_of(path, "enum"), "must be a list of at least one value")
    for key in SCHEMA_KEYS:
        value = schema.get(key, {})
        is_list = key == "items" and isinstance(value, list)
        if not isinstance(value, dict | bool) and not is_list:
            raise invalid(path_of(path, key), "must be a schema")
    if not isinstance(schema.get("nullable", False), bool):
        raise invalid(path_of(path, "nullable"), "must be a boolean")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid(path_of(path, "required"), "must be a list of names")
    for key in COUNTS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_count(value):
            raise invalid(path_of(path, key), "must be a whole number of at least 0")
    for key in _BOUNDS:
        is_flag = isinstance(schema.get(key), bool) and not key.startswith("exclusive")
        if is_flag or not isinstance(schema.get(key, 0), int | float):
            raise invalid(path_of(path, key), "must be a number")
    step = schema.get("multipleOf", 1)
    if isinstance(step, bool) or not isinstance(step, int | float) or step <= 0:
        raise invalid(path_of(path, "multipleOf"), "must be a number above 0")
    kinds = schema.get("type", [])
    if not isinstance(kinds, str | list) or not all(isinstance(kind, str) for kind in kinds):
        raise invalid(path_of(path, "type"), "must be the name of a type or a list of names")
    if not {*([kinds] if isinstance(kinds, str) else kinds)} <= {*ALL_TYPES}:
        raise invalid(path_of(path, "type"), f"must be one of {', '.join(ALL_TYPES)}")
    for name, pattern in _patterns(schema, path):
        if not isinstance(pattern, str):
            raise invalid(name, "must be a string")


def _is_count(value: int | float) -> bool:
    return value >= 0 and (isinstance(value, int) or value.is_integer())


def _patterns(schema: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    return [(path_of(path, key), schema[key]) for key in ("pattern", "format") if key in schema]
