"""`propertyNames` in keywords that a grammar can be made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

UNSUPPORTED: Final = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "propertyNames", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_NAME_RULES: Final = ("pattern", "enum", "const", "minLength", "maxLength")


_MAX_MEMBERS: Final = 500
"""Of listed names that become members each."""


def are_rewritable(schema: Mapping[str, Any]) -> bool:
    """Whether `rewrite_names` has other words for the schema's `propertyNames`."""
    return _listed(schema) is not None or _pattern(schema) is not None


def rewrite_names(schema: dict[str, Any]) -> None:
    """`propertyNames` as members where they are listed, else as `patternProperties`."""
    if "propertyNames" not in schema:
        return
    listed, pattern = _listed(schema), _pattern(schema)
    others = schema.get("additionalProperties", True)
    if listed is not None and len(listed) <= _MAX_MEMBERS:
        schema["properties"] = dict.fromkeys(listed, others)
    elif listed is not None:
        schema["patternProperties"] = {f"^({'|'.join(map(re.escape, listed))})$": others}
    elif pattern is not None:
        schema["patternProperties"] = {pattern: others}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _rules(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of names, empty when there is more than rules for text or other names."""
    names = schema["propertyNames"]
    if not isinstance(names, dict) or "patternProperties" in schema or schema.get("properties"):
        return {}
    if any(key in names for key in (*UNSUPPORTED, "format", "$ref", "anyOf", "oneOf", "allOf")):
        return {}
    return {key: value for key, value in names.items() if key in _NAME_RULES}


def _listed(schema: Mapping[str, Any]) -> list[str] | None:
    """The names, when they are listed."""
    rules = _rules(schema)
    if rules.keys() not in ({"enum"}, {"const"}):
        return None
    names = rules["enum"] if "enum" in rules else [rules["const"]]
    return [name for name in names if isinstance(name, str)]


def _pattern(schema: Mapping[str, Any]) -> str | None:
    """A pattern of all names that are allowed, when that is all there is to say of names."""
    rules = _rules(schema)
    if rules.keys() == {"pattern"}:
        return str(rules["pattern"])
    if rules and rules.keys() <= {"minLength", "maxLength"}:
        longest = rules.get("maxLength", "")
        return f"^[\\s\\S]{{{rules.get('minLength', 0)},{longest}}}$"
    return None
