"""Which JSON types a declared parameter may have, from the tool's JSON Schema.

Only types are looked at: whether a value meets the rest of its schema is for the client to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from ninfer.contract.chat import ToolRules

Types: TypeAlias = frozenset[str] | None
"""Names of JSON types; None when any type may come."""

STRING_ONLY: Final = frozenset({"string"})
_MAX_SCHEMAS: Final = 64
"""Most schemas looked at for one parameter: references may go in circles."""

_COMBINED: Final = ("allOf", "anyOf", "oneOf")


class DeclaredTools:
    """The functions that may be called; the types of their parameters are found when needed."""

    def __init__(self, rules: ToolRules) -> None:
        allowed = None if rules.allowed is None else frozenset(rules.allowed)
        self._schemas: dict[str, Mapping[str, Any]] = {
            tool.name: tool.parameters or {}
            for tool in rules.tools
            if allowed is None or tool.name in allowed
        }
        self._types: dict[tuple[str, str], Types] = {}
        self._texts: dict[tuple[str, str], frozenset[str]] = {}

    def declares(self, name: str) -> bool:
        return name in self._schemas

    def types(self, name: str, parameter: str) -> Types:
        """Of a parameter of a declared function; None for one it does not declare."""
        key = (name, parameter)
        if key not in self._types:
            self._types[key] = _parameter_types(self._schemas[name], parameter)
        return self._types[key]

    def texts(self, name: str, parameter: str) -> frozenset[str]:
        """Strings that the parameter's schema lists (`enum`, `const`)."""
        key = (name, parameter)
        if key not in self._texts:
            self._texts[key] = _parameter_texts(self._schemas[name], parameter)
        return self._texts[key]


def _parameter_types(schema: Mapping[str, Any], parameter: str) -> Types:
    reader = _Reader(schema)
    declared = reader.declared(schema, parameter)
    return reader.any_types(declared) if declared else None


def _parameter_texts(schema: Mapping[str, Any], parameter: str) -> frozenset[str]:
    reader = _Reader(schema)
    return frozenset(
        text for declared in reader.declared(schema, parameter) for text in reader.texts(declared)
    )


class _Reader:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def declared(self, schema: object, parameter: str) -> list[object]:
        """Schemas of a parameter, wherever the tool's schema is put together from."""
        own = schema.get("properties") if isinstance(schema, Mapping) else None
        found = [own[parameter]] if isinstance(own, Mapping) and parameter in own else []
        for part in self._parts(schema):
            found += self.declared(part, parameter)
        return found

    def texts(self, schema: object) -> list[str]:
        """Strings that it lists."""
        if not isinstance(schema, Mapping):
            return []
        values = schema.get("enum")
        listed = list(values) if isinstance(values, list | tuple) else []
        found = [value for value in [*listed, schema.get("const")] if isinstance(value, str)]
        for part in self._parts(schema):
            found += self.texts(part)
        return found

    def _parts(self, schema: object) -> list[object]:
        """What it refers to and combines, as far as the bound goes."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return []
        parts = [part for key in _COMBINED for part in _listed(schema.get(key))]
        if isinstance(schema.get("$ref"), str):
            parts.append(self._target(schema["$ref"]))
        return parts

    def types(self, schema: object) -> Types:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return None
        types = self._own_types(schema)
        if types is not None and schema.get("nullable") is True:
            types |= {"null"}
        return types

    def _own_types(self, schema: Mapping[str, Any]) -> Types:
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset({given})
        if isinstance(given, Sequence):
            return frozenset(item for item in given if isinstance(item, str))
        if "const" in schema:
            return frozenset({type_name(schema["const"])})
        values = schema.get("enum")
        if isinstance(values, Sequence) and not isinstance(values, str):
            return frozenset(type_name(value) for value in values)
        if isinstance(schema.get("$ref"), str):
            return self.types(self._target(schema["$ref"]))
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), Sequence):
                return self.any_types(schema[name])
        if isinstance(schema.get("allOf"), Sequence):
            return self._all(schema["allOf"])
        if "properties" in schema:
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else None

    def any_types(self, schemas: Iterable[object]) -> Types:
        result: set[str] = set()
        for schema in schemas:
            types = self.types(schema)
            if types is None:
                return None
            result |= types
        return frozenset(result)

    def _all(self, schemas: Iterable[object]) -> Types:
        known = [types for schema in schemas if (types := self.types(schema)) is not None]
        return frozenset.intersection(*known) if known else None

    def _target(self, reference: str) -> object:
        """What a reference within the tool's own schema points to, None for any other."""
        if not reference.startswith("#"):
            return None
        target: Any = self._root
        for token in unquote(reference[1:]).split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                return None
            target = target[name]
        return target


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def type_name(value: object) -> str:
    """The JSON type of a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"
