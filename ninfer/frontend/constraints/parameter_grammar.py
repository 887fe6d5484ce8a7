"""The grammar of one value of the XML form: whatever it allows is read back as the schema says.

A value that may be a string is one regular expression together with the mark that ends it, since
there is no telling text from JSON before the end: strings without what is read as JSON of another
type, other scalars, listed values. Lists and objects begin with their bracket, no such string does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ninfer.frontend.constraints.json_numbers import NUMBER
from ninfer.frontend.constraints.json_strings import string_schema
from ninfer.frontend.constraints.library_schema import has_strings
from ninfer.frontend.constraints.rule_set import RuleSet
from ninfer.frontend.constraints.schema_cases import (
    ALL_TYPES,
    Case,
    case_types,
    cases,
)
from ninfer.frontend.constraints.text_patterns import slashed, string_patterns
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.constraints.vocabulary import quoted
from ninfer.frontend.tool_calls.call_format import (
    CALL_CLOSE,
    FUNCTION_CLOSE,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
    XmlCallFormat,
)
from ninfer.frontend.tool_calls.parameter_types import Types, type_name

_SPACE: Final = r"[\s\x1c-\x1f]"
_FOLLOWS: Final = f"(?:{PARAMETER_OPEN}|{FUNCTION_CLOSE}|{CALL_CLOSE})"
_CLOSES: Final = f"{PARAMETER_CLOSE}{_SPACE}*{_FOLLOWS}"
"""What a reader takes for the end of a value."""
_ANY_BYTES: Final = "~/[a&&b]/"
"""The complement of nothing. Unlike `(?s:.*)`, which is characters only, the library knows at once
that nothing is left without it; else it would count through a bounded text to find out."""
_END_MARK: Final = slashed(rf"\n{PARAMETER_CLOSE}|{_CLOSES}")
_NO_TEXT: Final = f"{_ANY_BYTES} {_END_MARK} {_ANY_BYTES}"
_SCALARS: Final[Mapping[str, str]] = {
    "integer": "-?(?:0|[1-9][0-9]{0,17})",
    "number": NUMBER,
    "boolean": "true|false",
    "null": "null",
}
_READ_AS: Final[Mapping[str, str]] = {
    "integer": r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
    "number": r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
    "boolean": "(?i:true|false)",
    "null": "(?i:null|none)",
}
"""Text that may be read as a value of the type."""
_BEGUN_BY: Final[Mapping[str, str]] = {"array": r"\[", "object": r"\{"}
"""How text begins that may be read as a value of the type."""
_QUOTE: Final = '"'
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_HELD: Final = ("minProperties", "multipleOf")
"""Keywords that tools without `strict` are held to as well."""
_STRUCTURED: Final = ("array", "object")


class ParameterGrammar:
    """Values of the parameters of one tool; `root` is its prepared schema."""

    def __init__(
        self, rules: RuleSet, form: XmlCallFormat, root: Mapping[str, Any], *, is_strict: bool
    ) -> None:
        self._rules = rules
        self._end = form.parameter_end
        self._root = root
        self._is_strict = is_strict
        self._known: dict[str, str | None] = {}

    def value(self, schema: Any, types: Types) -> str | None:
        """A value and the mark that ends it, for a parameter that is read as one of `types`; None
        when no value is allowed. Raises Unenforceable for a strict tool, and for some
        keywords; for other tools strings that cannot be enforced are any text."""
        key = json.dumps([schema, None if types is None else sorted(types)])
        if key not in self._known:
            try:
                self._known[key] = self._value(schema, types)
            except Unenforceable as error:
                if self._is_strict or (error.keyword and error.keyword[0] in _HELD):
                    raise
                self._known[key] = self._text(["/(?s:.*)/"], _NO_TEXT)
        return self._known[key]

    def _value(self, schema: Any, types: Types) -> str | None:
        found = cases(self._root, schema)
        usable = [(case, _usable_types(case, types)) for case in found]
        usable = [(case, kinds) for case, kinds in usable if kinds]
        if not usable:
            if found:
                raise Unenforceable("has other types than its type says")
            return None
        if not any("string" in kinds for _, kinds in usable):
            if any(_is_free_number(case, kinds) for case, kinds in usable):
                return self._mixed(usable, types)
            return self._json(schema, types)
        if all("enum" in case for case, _ in usable):
            return self._listed([text for case, kinds in usable for text in _texts(case, kinds)])
        return self._mixed(usable, types)

    def _json(self, schema: Any, types: Types) -> str | None:
        whole = dict(schema) if isinstance(schema, dict) else {}
        if types is not None and "type" not in whole:
            whole["type"] = sorted(types - {"string"})
        values = self._rules.schema(whole, self._root)
        return None if values is None else f"{values} {quoted(self._end)}"

    def _listed(self, texts: list[str]) -> str | None:
        if not texts:
            return None
        return f"({' | '.join(map(quoted, dict.fromkeys(texts)))}) {quoted(self._end)}"

    def _mixed(self, usable: list[tuple[Case, list[str]]], types: Types) -> str | None:
        strings: list[str] = []
        others: list[str] = []
        structured: list[str] = []
        is_text = any("string" in kinds for _, kinds in usable)
        for case, kinds in usable:
            if "enum" in case:
                others += map(quoted, _texts(case, kinds))
                continue
            if "string" in kinds and self._has_strings(case):
                patterns = [slashed(pattern) for pattern in string_patterns(case)]
                strings.append(" & ".join(f"({text})" for text in patterns) or "/(?s:.*)/")
            held = [kind for kind in kinds if kind in _STRUCTURED]
            if is_text or not _is_bound(case):
                others += [slashed(text) for text in self._scalars(case, kinds)]
            else:
                held = kinds
            values = self._json({**_json_case(case), "type": held}, None) if held else None
            structured += [] if values is None else [values]
        is_free = any(not case and len(kinds) == len(ALL_TYPES) for case, kinds in usable)
        if is_free:
            return self._text(["/(?s:.*)/"], _NO_TEXT)
        texts = [self._text(strings, _not_strings(types), others)] if strings or others else []
        return f"({' | '.join([*texts, *structured])})" if texts or structured else None

    def _has_strings(self, case: Case) -> bool:
        try:
            return has_strings(string_schema(case))
        except Unenforceable:
            if self._is_strict:
                raise
            return True

    def _scalars(self, case: Case, kinds: list[str]) -> list[str]:
        is_number = "integer" in kinds or "number" in kinds
        if is_number and self._is_strict and _is_bound(case):
            raise Unenforceable("has bounds of a number beside strings")
        return [_SCALARS[kind] for kind in kinds if kind in _SCALARS]

    def _text(self, strings: list[str], excluded: str, others: list[str] | None = None) -> str:
        allowed = f"(({' | '.join(strings)}) & ~({excluded}))" if strings else ""
        parts = [part for part in (allowed, *(others or [])) if part]
        return self._rules.terminal(f"({' | '.join(parts)}) {quoted(self._end)}")


def _usable_types(case: Case, types: Types) -> list[str]:
    kinds = case_types(case)
    if types is None:
        return kinds
    read = types | {"integer"} if "number" in types else types
    narrowed = [kind for kind in kinds if kind in read]
    if "number" in kinds and "integer" in read and not {"number", "integer"} & set(narrowed):
        narrowed.append("integer")
    return narrowed


def _texts(case: Case, kinds: list[str]) -> list[str]:
    """How the listed values are written. Raises Unenforceable for one that cannot be."""
    texts = []
    for value in case["enum"]:
        kind = type_name(value)
        if kind not in kinds and not (kind == "integer" and "number" in kinds):
            continue
        if not isinstance(value, str):
            texts.append(json.dumps(value, ensure_ascii=False))
        elif re.search(_CLOSES, value):
            raise Unenforceable("lists a string with the mark-up of calls")
        elif _has_length(case, value):
            texts.append(value)
    return texts


def _has_length(case: Case, text: str) -> bool:
    least, most = case.get("minLength", 0), case.get("maxLength", len(text))
    return bool(least <= len(text) <= most)


def _not_strings(types: Types) -> str:
    """What no string may look like: the end of the value, and JSON of other types."""
    if types is not None and types <= {"string"}:
        return _NO_TEXT
    kinds = sorted(ALL_TYPES if types is None else types)
    looks = dict.fromkeys(_READ_AS[kind] for kind in kinds if kind in _READ_AS)
    starts = [_BEGUN_BY[kind] for kind in kinds if kind in _BEGUN_BY]
    if types is None:
        starts.append(_QUOTE)
    excluded = [_NO_TEXT]
    if looks:
        excluded.append(slashed(f"{_SPACE}*(?:{'|'.join(looks)}){_SPACE}*"))
    if starts:
        begun = slashed(f"{_SPACE}*(?:{'|'.join(starts)})")
        excluded.append(f"{begun} {_ANY_BYTES}")
    return " | ".join(excluded)


def _is_free_number(case: Case, kinds: list[str]) -> bool:
    return "number" in kinds and "enum" not in case and not _is_bound(case)


def _is_bound(case: Case) -> bool:
    return any(key in case for key in _BOUNDS)


def _json_case(case: Case) -> dict[str, Any]:
    """A case as a schema of its lists and objects."""
    return {key: value for key, value in case.items() if key not in ("pattern", "format")}
