"""Structured output as clients ask for it, in all spellings of the field -> Constraint.

    response_format     OpenAI: text, json_object (with llama.cpp's schema), json_schema
    structured_outputs  vLLM, one of json, regex, choice, grammar, json_object
    guided_*            vLLM's older names
    json_schema, regex, ebnf, grammar   SGLang, llama.cpp

One of them at most. Null is none, and so is llama.cpp's empty `grammar`; other empty texts
are errors. Schemas are checked where they are compiled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from ninfer.contract.chat import Constraint, ConstraintKind
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import (
    Fields,
    as_string,
    invalid_type,
    invalid_value,
    missing,
    unsupported_value,
)

FORMATS: Final = ("text", "json_object", "json_schema")
_GBNF_SIGN: Final = "::="

_ANY_WHITE_SPACE: Final = frozenset(
    {
        r"\s*",
        *(
            f"[{''.join(order)}]*"
            for size in (2, 3, 4)
            for order in itertools.permutations((" ", r"\n", r"\t", r"\r"), size)
            if {" ", r"\n"} <= {*order}
        ),
    }
)
"""Patterns that what JSON is laid out with keeps to."""

Reader: TypeAlias = Callable[[Fields, str], Constraint | None]


def parse_constraint(fields: Fields) -> Constraint | None:
    """None for any text. Raises RequestError naming the field."""
    constraint = _only(fields, _READERS)
    _check_layout(fields, "guided_whitespace_pattern", constraint)
    return constraint


def _only(fields: Fields, readers: Mapping[str, Reader]) -> Constraint | None:
    given = [constraint for name, read in readers.items() if (constraint := read(fields, name))]
    if len(given) > 1:
        raise invalid_value(given[1].param, f"cannot be combined with '{given[0].param}'")
    return given[0] if given else None


def _response_format(fields: Fields, name: str) -> Constraint | None:
    form = fields.child(name)
    if form is None:
        return None
    path, kind = form.path_of("type"), form.string("type")
    if kind is None:
        raise missing(path)
    if kind == "structural_tag":
        raise unsupported_value(path, "it must be text, json_object or json_schema")
    if kind not in FORMATS:
        raise invalid_value(path, f"must be one of {', '.join(FORMATS)}")
    if kind == "json_object":
        return _schema_of(form) or Constraint("json_object", "", path)
    if kind == "json_schema":
        return _named_schema(form)
    return None


def _named_schema(form: Fields) -> Constraint:
    """`json_schema: {name, schema, strict}`, or the schema right beside the type."""
    inner = form.child("json_schema")
    if inner is None and form.has("schema"):
        inner = form
    if inner is None:
        raise missing(form.path_of("json_schema"))
    for key in ("name", "description"):
        inner.string(key)
    constraint = _schema_of(inner)
    if constraint is None:
        raise missing(inner.path_of("schema"))
    return constraint


def _schema_of(fields: Fields) -> Constraint | None:
    return _schema(fields, "schema", is_strict=fields.flag("strict"))


def _schema(fields: Fields, name: str, *, is_strict: bool = False) -> Constraint | None:
    """A schema as an object or a boolean, or as its JSON text."""
    value, path = fields.get(name), fields.path_of(name)
    if value is None:
        return None
    if not isinstance(value, dict | bool | str):
        raise invalid_type(path, "a JSON Schema", value)
    if value == "":
        raise _empty(path)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Constraint("json_schema", text, path, is_strict)


def _regex(fields: Fields, name: str) -> Constraint | None:
    text = _text(fields, name)
    return None if text is None else Constraint("regex", text, fields.path_of(name))


def _text(fields: Fields, name: str) -> str | None:
    """None when it is absent; an empty one would bind nothing."""
    text = fields.string(name)
    if text == "":
        raise _empty(fields.path_of(name))
    return text


def _empty(path: str) -> RequestError:
    return invalid_value(path, "must not be empty: leave it out to ask for nothing")


def _choice(fields: Fields, name: str) -> Constraint | None:
    values, path = fields.sequence(name), fields.path_of(name)
    if values is None:
        return None
    if not values:
        raise invalid_value(path, "must have at least one string")
    texts = [as_string(value, f"{path}[{index}]") for index, value in enumerate(values)]
    return Constraint("choice", json.dumps(texts, ensure_ascii=False), path)


def _grammar(fields: Fields, name: str) -> Constraint | None:
    """GBNF where its sign of a definition occurs, else Lark."""
    text = _text(fields, name)
    if text is None:
        return None
    kind: ConstraintKind = "gbnf" if _GBNF_SIGN in text else "lark"
    return Constraint(kind, text, fields.path_of(name))


def _llama_grammar(fields: Fields, name: str) -> Constraint | None:
    """llama.cpp's own field: its clients send "", the default there, for none."""
    return None if fields.get(name) == "" else _grammar(fields, name)


def _json_object(fields: Fields, name: str) -> Constraint | None:
    return Constraint("json_object", "", fields.path_of(name)) if fields.flag(name) else None


def _structured_outputs(fields: Fields, name: str) -> Constraint | None:
    inner = fields.child(name)
    if inner is None:
        return None
    if inner.has("structural_tag"):
        raise unsupported_value(inner.path_of("structural_tag"), "use tools instead")
    if inner.first_of(tuple(_STRUCTURED)) is None:
        raise invalid_value(inner.path, f"must have one of {', '.join(_STRUCTURED)}")
    constraint = _only(inner, _STRUCTURED)
    _check_layout(inner, "whitespace_pattern", constraint)
    for key in ("disable_any_whitespace", "disable_additional_properties"):
        if inner.flag(key) and _is_json(constraint):
            raise unsupported_value(
                inner.path_of(key), "white space and other members are as JSON and the schema say"
            )
    return constraint


def _check_layout(fields: Fields, name: str, constraint: Constraint | None) -> None:
    """White space of JSON is bounded; a pattern that allows any has ours among it."""
    pattern = fields.string(name)
    if pattern is None or not _is_json(constraint):
        return
    if pattern not in _ANY_WHITE_SPACE:
        raise unsupported_value(fields.path_of(name), "white space cannot be laid out otherwise")


def _is_json(constraint: Constraint | None) -> bool:
    return constraint is not None and constraint.kind in ("json_object", "json_schema")


_STRUCTURED: Final[Mapping[str, Reader]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_READERS: Final[Mapping[str, Reader]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _llama_grammar,
}
