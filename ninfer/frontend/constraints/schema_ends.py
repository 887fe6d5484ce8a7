"""Which schemas have a value that ends: one that must contain itself has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ninfer.frontend.constraints.schema_walk import all_schemas, resolve

_EMBEDDED: Final = re.compile(r"%json\s*")
_MAX_ROUNDS: Final = 64
"""Of the search; what is nested deeper is taken to have an end."""


def references(schema: Any) -> set[str]:
    """All that a schema refers to."""
    found = (node.get("$ref") for node in all_schemas(schema))
    return {name for name in found if isinstance(name, str)}


def ending_references(root: Any) -> set[str]:
    """References to schemas with a finite value. A round finds what ends given what was found."""
    targets = {name: resolve(root, name) for name in references(root)}
    ending: set[str] = set()
    for _ in range(_MAX_ROUNDS):
        found = {
            name for name, target in targets.items() if name not in ending and _ends(target, ending)
        }
        if not found:
            return ending
        ending |= found
    return set(targets)


def can_end(root: Any) -> bool:
    """Whether some value of the schema is finite."""
    return _ends(root, ending_references(root))


def has_endless_schema(lark: str) -> bool:
    """Whether a Lark grammar has a schema without a finite value; what cannot be read is left to
    the grammar library."""
    decoder = json.JSONDecoder()
    for mark in _EMBEDDED.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, mark.end())
            if isinstance(schema, dict) and not can_end(schema):
                return True
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
    return False


def _ends(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_ends(item, ending) for item in schema[key]):
            return False
    if not all(_ends(item, ending) for item in schema.get("allOf", ())):
        return False
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties", {})
        return all(
            _ends(properties.get(name, True), ending)
            for name in schema.get("required", ())
            if isinstance(properties.get(name, True), dict)
        )
    if schema.get("type") in ("array", ["array"]):
        return _items_end(schema, ending)
    return True


def _items_end(schema: Mapping[str, Any], ending: set[str]) -> bool:
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not all(_ends(item, ending) for item in prefix[: int(least)]):
        return False
    return least <= len(prefix) or _ends(schema.get("items", True), ending)
