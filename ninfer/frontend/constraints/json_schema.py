"""A client's JSON Schema -> the schema that the grammar library is given, or an error with a place.

    text -> parse, bounds -> references -> unsupported keywords -> rewriting -> can it end at all

Drafts 4 to 2020-12 as far as docs/structured-output.md says. What the library has no grammar for is
refused (strict) or left out; some keywords are first brought to others that mean the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from ninfer.frontend.constraints.schema_complement import denied
from ninfer.frontend.constraints.schema_ends import can_end, references
from ninfer.frontend.constraints.schema_errors import invalid, too_complex
from ninfer.frontend.constraints.schema_names import UNSUPPORTED, are_rewritable, rewrite_names
from ninfer.frontend.constraints.schema_shapes import COUNTS, check_shapes
from ninfer.frontend.constraints.schema_unions import exclusive
from ninfer.frontend.constraints.schema_walk import (
    all_schemas,
    children,
    path_of,
    resolve,
    rewritten,
)
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.control_text import strings_of
from ninfer.frontend.tokenizer import replace_surrogates

MAX_CHARACTERS: Final = 524_288
MAX_GRAMMAR_CHARACTERS: Final = 32_768
"""Of a regular expression or another grammar; of all patterns of a schema together."""
MAX_TEXT_CHARACTERS: Final = 8_192
"""Of a string that an answer must spell."""
MAX_PROPERTIES: Final = 3_000
MAX_DEPTH: Final = 64
MAX_LEVELS: Final = 4_000
"""Of nesting, when every reference is followed once: the grammar library recurses so deep."""

_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "propertyNames": (True,),
    "minContains": (0,),
}
"""Values that ask for nothing."""
_FORMATS: Final = frozenset({"duration", "uuid", "email", "hostname", "ipv4", "ipv6", "uri"})
_OTHER_FORMATS: Final = frozenset(
    {
        "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
        "relative-json-pointer", "uri-reference", "uri-template",
    }
)  # fmt: skip
"""Standard ones without a grammar; others are no part of the standard and only describe."""
_DROPPED: Final = frozenset(
    {
        *UNSUPPORTED, "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor",
        "$vocabulary", "additionalItems", "nullable",
    }
)  # fmt: skip
"""What the library is not given. A keyword of nobody's is an annotation and means nothing."""
_DATE: Final = (
    r"(?:(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_FORMAT_PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Exact but for leap seconds, which are left out: only real days from year 1 on."""


def prepare_schema(text: str, param: str, *, is_strict: bool) -> dict[str, Any]:
    """The schema for the library. Raises RequestError (`invalid_json_schema`,
    `schema_too_complex`) whose param names the place in the schema."""
    if len(text) > MAX_CHARACTERS:
        raise too_complex(param, f"has more than {MAX_CHARACTERS} characters")
    root = _parsed(text, param)
    _check_depth(root, param)
    if root is False:
        raise invalid(param, "allows no value at all")
    if root is True:
        root = {}
    if not isinstance(root, dict):
        raise invalid(param, "must be an object or a boolean")
    _check(root, root, param, is_strict)
    _check_amounts(root, param)
    stated = rewritten(root, param, lambda schema, path: _without_not(schema, root))
    prepared = rewritten(stated, param, lambda schema, path: _supported(schema))
    _check_kept(prepared, param)
    prepared = rewritten(
        prepared, param, lambda schema, path: _one_of(schema, path, prepared, is_strict)
    )
    if not can_end(prepared):
        raise invalid(param, "allows no value that ends")
    result: dict[str, Any] = prepared
    return result


def _parsed(text: str, param: str) -> Any:
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\ud" not in text.lower():
            return value
        return json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        raise too_complex(param, f"is nested deeper than {MAX_DEPTH}") from None
    except ValueError:
        raise invalid(param, "is not JSON") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


def _check_depth(value: Any, param: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    raise too_complex(param, f"is nested deeper than {MAX_DEPTH}")


def _check(root: dict[str, Any], schema: Any, path: str, is_strict: bool) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid(path, "must be an object or a boolean")
    if is_strict and schema is not root and isinstance(schema.get("$id"), str):
        raise invalid(path_of(path, "$id"), "is a keyword that cannot be enforced")
    check_shapes(schema, path)
    _check_reference(root, schema, path)
    for place, child in children(schema, path):
        _check(root, child, place, is_strict)
    if is_strict:
        _check_supported(schema, path, root)


def _check_reference(root: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
    if "$ref" not in schema:
        return
    reference, place = schema["$ref"], path_of(path, "$ref")
    if not isinstance(reference, str):
        raise invalid(place, "must be a string")
    if not reference.startswith("#"):
        raise invalid(place, "must stay inside the schema: nothing is fetched")
    try:
        target = resolve(root, reference)
    except LookupError:
        raise invalid(place, "names nothing in the schema") from None
    if not isinstance(target, dict | bool):
        raise invalid(place, "does not name a schema")


def _check_kept(prepared: dict[str, Any], param: str) -> None:
    """References into what was rewritten or left out."""
    for reference in sorted(references(prepared)):
        try:
            resolve(prepared, reference)
        except LookupError:
            raise invalid(param, f"refers to {reference}, which cannot be enforced") from None


def _check_supported(schema: Mapping[str, Any], path: str, root: Any) -> None:
    for key in UNSUPPORTED:
        if key not in schema or _means_nothing(schema, key):
            continue
        if not _is_rewritable(schema, key, root):
            raise invalid(path_of(path, key), "is a keyword that cannot be enforced")
    if schema.get("format") in _OTHER_FORMATS:
        raise invalid(path_of(path, "format"), "is a format that cannot be enforced")


def _means_nothing(schema: Mapping[str, Any], key: str) -> bool:
    value = schema[key]
    return any(
        value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
        for harmless in _HARMLESS.get(key, ())
    )


def _is_rewritable(schema: Mapping[str, Any], key: str, root: Any) -> bool:
    if key == "not":
        return denied(schema["not"], root) is not None
    return key == "propertyNames" and are_rewritable(schema)


def _without_not(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """`not` as what is left, where that can be said."""
    complement = denied(schema["not"], root) if "not" in schema else None
    if complement is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "not"}
    return {**rest, "allOf": [*rest.get("allOf", []), complement]}


def _supported(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema in the library's own keywords."""
    _old_bounds(schema)
    rewrite_names(schema)
    _rewrite_nullable(schema)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = schema.pop("additionalItems", True)
    schema.pop("additionalItems", None)
    _rewrite_format(schema)
    for key in COUNTS:
        if isinstance(schema.get(key), float):
            schema[key] = int(schema[key])
    return {key: value for key, value in schema.items() if key not in _DROPPED}


def _one_of(schema: dict[str, Any], path: str, root: Any, is_strict: bool) -> dict[str, Any]:
    """`oneOf` as `anyOf`, and where they differ and cannot be told apart, only if not strict."""
    if "oneOf" not in schema:
        return schema
    try:
        branches = exclusive(schema, root)
    except Unenforceable as error:
        if is_strict:
            raise invalid(path_of(path, "oneOf"), str(error)) from None
        branches = schema["oneOf"]
    rest = {key: value for key, value in schema.items() if key != "oneOf"}
    union = {"anyOf": branches}
    return {**rest, "allOf": [*rest.get("allOf", []), union]} if "anyOf" in rest else rest | union


def _rewrite_format(schema: dict[str, Any]) -> None:
    """Dates and times as patterns; formats that only describe go."""
    name = schema.get("format")
    if name not in _FORMATS:
        schema.pop("format", None)
    pattern = _FORMAT_PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    if "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
    else:
        schema["pattern"] = pattern


def _old_bounds(schema: dict[str, Any]) -> None:
    """Draft 4: `exclusiveMinimum: true` speaks of `minimum`."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        is_exclusive = schema.get(key)
        if isinstance(is_exclusive, bool):
            del schema[key]
            if is_exclusive and bound in schema:
                schema[key] = schema.pop(bound)


def _rewrite_nullable(schema: dict[str, Any]) -> None:
    """OpenAPI's `nullable: true`."""
    kind = schema.get("type")
    if schema.get("nullable") is not True or kind is None:
        return
    kinds = [kind] if isinstance(kind, str) else list(kind)
    if "null" not in kinds:
        schema["type"] = [*kinds, "null"]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]


def _check_amounts(root: dict[str, Any], param: str) -> None:
    """What the library would take too long for."""
    if _num_levels(root) > MAX_LEVELS:
        raise too_complex(param, f"is nested deeper than {MAX_LEVELS} through its references")
    num_properties, num_characters = 0, 0
    for schema in all_schemas(root):
        patterns = schema.get("patternProperties", {})
        num_properties += len(schema.get("properties", {})) + len(patterns)
        num_characters += len(schema.get("pattern", "")) + sum(map(len, patterns))
        values = [schema.get("const"), schema.get("enum")]
        if any(len(text) > MAX_TEXT_CHARACTERS for text in strings_of(values)):
            raise too_complex(param, f"has a value of more than {MAX_TEXT_CHARACTERS} characters")
    if num_properties > MAX_PROPERTIES:
        raise too_complex(param, f"has more than {MAX_PROPERTIES} properties")
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise too_complex(
            param, f"has patterns of more than {MAX_GRAMMAR_CHARACTERS} characters together"
        )


def _num_levels(root: dict[str, Any]) -> int:
    """Levels of the schema and of all that is referred to, one behind another."""
    return _depth(root) + sum(_depth(resolve(root, name)) for name in references(root))


def _depth(schema: Any) -> int:
    level, depth = [schema], 0
    while level:
        depth += 1
        level = [
            child for node in level if isinstance(node, dict) for _, child in children(node, "")
        ]
    return depth
