"""JSON Schema -> Lark rules of exactly the JSON texts that keep to it, as far as it is enforced.

    schema -> boolean, one reference, one union -> that
           -> anything else -> cases (schema_cases) -> a rule for each type of each case

What cannot hold is left out where it may be: a member, a branch, a type. A reference is a rule of
its own, so schemas may contain themselves. Strings with patterns and formats are the library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ninfer.frontend.constraints.json_numbers import (
    NUMBER,
    decimal_places,
    has_few_remainders,
    has_numbers,
    integer_bounds,
    integers,
    is_within,
    listed_multiples,
    numbers,
    powers_of_ten,
)
from ninfer.frontend.constraints.json_objects import Member, MemberSequence, WayBudget
from ninfer.frontend.constraints.json_strings import (
    NAME,
    STRING,
    other_name,
    pattern_name,
    spelled,
    string_schema,
)
from ninfer.frontend.constraints.lark_rules import LarkRules
from ninfer.frontend.constraints.library_schema import (
    WHITE_SPACE,
    library_values,
    matches,
    overlap,
)
from ninfer.frontend.constraints.schema_cases import (
    ALL_TYPES,
    KEYWORDS,
    Case,
    all_of,
    cases,
    only,
    said_of,
)
from ninfer.frontend.constraints.schema_ends import ending_references, references
from ninfer.frontend.constraints.schema_walk import resolve
from ninfer.frontend.constraints.text_patterns import slashed
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.tool_calls.parameter_types import type_name

_HEADER: Final = f'%llguidance {{"ignore_once": true}}\n%ignore /{WHITE_SPACE}/\n'
_MAX_RULES: Final = 200_000
_MAX_PATTERNS: Final = 32
"""Of names, in one object."""
_MAX_MATCHES: Final = 2_000
"""Of patterns and names that are held against each other."""
_MAX_ROUNDS: Final = 64
"""Of finding references without a value."""
_UNIONS: Final = ("anyOf", "oneOf")
_OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties", "patternProperties", "additionalProperties", "required", "minProperties",
        "maxProperties",
    ),
}  # fmt: skip
_STEPPED_LIMIT: Final = 10**15
"""Bound of multiples: the library reads bounds as floats, which are exact up to here."""


def json_lark(schema: Any, root: Any, ways: WayBudget | None = None) -> str | None:
    """A Lark grammar of the values of a prepared schema whose references lie in `root`; None when
    there are none. `ways` is shared by the grammars of one request. Raises Unenforceable."""
    ways = WayBudget() if ways is None else ways
    empty = {_key({"$ref": name}) for name in references(root) - ending_references(root)}
    for _ in range(_MAX_ROUNDS):
        writer = _Writer(root, frozenset(empty), ways)
        start = writer.start(schema)
        if writer.found_empty <= empty:
            return None if start is None else _HEADER + writer.rules.text(start)
        empty |= writer.found_empty
    raise Unenforceable("refers to too many schemas without a value")


class _Writer:
    """A method returns a rule's name or body, None when no value is allowed.

    Schemas that refer to others are rules of their own, written one after the other: `empty` ones,
    by their keys, are taken for false, `found_empty` turned out to be.
    """

    def __init__(self, root: Any, empty: frozenset[str], ways: WayBudget) -> None:
        self.rules = LarkRules()
        self.found_empty: set[str] = set()
        self._root = root
        self._empty = empty
        self._ways = ways
        self._known: dict[str, str | None] = {}
        self._named: dict[str, str] = {}
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def start(self, schema: Any) -> str | None:
        start = self.value(schema)
        while self._waiting:
            key, waiting = self._waiting.pop()
            body = self._value(waiting)
            if body is None:
                self.found_empty.add(key)
            else:
                self.rules.define(self._named[key], body)
            if len(self.rules.lines) > _MAX_RULES:
                raise Unenforceable("needs too many rules")
        return start

    def value(self, schema: Any) -> str | None:
        if not isinstance(schema, dict):
            return None if schema is False else self._any()
        used = {key: value for key, value in schema.items() if key in KEYWORDS}
        if not used:
            return self._any()
        key = _key(used)
        if '"$ref"' in key:
            return None if key in self._empty else self._later(key, used)
        if key not in self._known:
            self._known[key] = self._value(used)
        return self._known[key]

    def _later(self, key: str, schema: dict[str, Any]) -> str:
        if key not in self._named:
            self._named[key] = self.rules.reserve()
            self._waiting.append((key, schema))
        return self._named[key]

    def _value(self, schema: Mapping[str, Any]) -> str | None:
        if schema.keys() == {"$ref"}:
            return self.value(resolve(self._root, schema["$ref"]))
        if len(schema) == 1 and (union := next(iter(schema))) in _UNIONS:
            return self._either([self.value(item) for item in schema[union]])
        found = cases(self._root, schema)
        return self._either([self._case(case) for case in found])

    def _either(self, ways: list[str | None]) -> str | None:
        kept = list(dict.fromkeys(way for way in ways if way is not None))
        if len(kept) < 2:
            return kept[0] if kept else None
        return self.rules.rule(" | ".join(kept))

    def _case(self, case: Case) -> str | None:
        if "enum" in case:
            return self._listed(case)
        kinds = list(case.get("type", ALL_TYPES))
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        return self._either([self._of_type(kind, case) for kind in dict.fromkeys(kinds)])

    def _of_type(self, kind: str, case: Case) -> str | None:
        said = {key: case[key] for key in _OF_TYPE.get(kind, ()) if key in case}
        match kind:
            case "null":
                return self.rules.rule('"null"')
            case "boolean":
                return self._terminal('"true" | "false"')
            case "integer":
                return self._integer(said)
            case "number":
                return self._number(said)
            case "string":
                return self._library(string_schema(said)) if said else self._terminal(STRING)
            case "array":
                return self._array(said)
            case "object":
                return self._object(said)
            case _:
                raise Unenforceable(f"has the type {kind}, which is none")

    def _integer(self, case: Case) -> str | None:
        low, high = integer_bounds(case)
        if "multipleOf" in case:
            return self._multiples(case, low, high)
        expression = integers(low, high)
        return None if expression is None else self._terminal(slashed(expression))

    def _number(self, case: Case) -> str | None:
        if not has_numbers(case):
            return None
        expressions = numbers(case)
        if "multipleOf" in case:
            step = case["multipleOf"]
            places = decimal_places(step)
            if places is None:
                is_whole = float(step).is_integer()
                return self._integer(case) if is_whole else self._stepped("number", case)
            expressions.append(places)
        return self._terminal(" & ".join(f"({slashed(part)})" for part in expressions))

    def _multiples(self, case: Case, low: int, high: int) -> str | None:
        low, high = max(low, -_STEPPED_LIMIT), min(high, _STEPPED_LIMIT)
        if low > high:
            return None
        if not float(case["multipleOf"]).is_integer():
            return self._stepped("integer", {**case, "minimum": low, "maximum": high})
        step = int(case["multipleOf"])
        listed = listed_multiples(step, low, high)
        if listed is not None:
            return self._terminal(" | ".join(f'"{value}"' for value in listed)) if listed else None
        round_numbers, within = powers_of_ten(step), integers(low, high)
        if round_numbers is None or within is None:
            schema = {"multipleOf": step, "minimum": low, "maximum": high}
            return self._stepped("integer", schema)
        return self._terminal(f"({slashed(within)}) & ({slashed(round_numbers)})")

    def _stepped(self, kind: str, case: Case) -> str | None:
        """Multiples that the library finds. Raises Unenforceable for too many remainders."""
        if not has_few_remainders(case["multipleOf"]):
            raise Unenforceable(
                "has more remainders than a grammar has room for",
                ("multipleOf", case["multipleOf"]),
            )
        schema: dict[str, Any] = {"type": kind, **case}
        if not {"minimum", "exclusiveMinimum"} & case.keys():
            schema["minimum"] = -_STEPPED_LIMIT
        if not {"maximum", "exclusiveMaximum"} & case.keys():
            schema["maximum"] = _STEPPED_LIMIT
        return self._library(schema)

    def _library(self, schema: dict[str, Any]) -> str | None:
        body = library_values(schema)
        return None if body is None else self.rules.rule(body)

    def _terminal(self, body: str) -> str:
        return self.rules.terminal(body)

    def _listed(self, case: Case) -> str | None:
        kinds = case.get("type", ALL_TYPES)
        values = [value for value in case["enum"] if _has_type(value, kinds)]
        texts = [value for value in values if isinstance(value, str)]
        ways: list[str | None] = [self._texts(texts, case)] if texts else []
        scalars = [
            json.dumps(value)
            for value in values
            if not isinstance(value, str | list | dict) and _is_allowed(case, value)
        ]
        if scalars:
            ways.append(self._terminal(" | ".join(f'"{text}"' for text in dict.fromkeys(scalars))))
        ways += [self._structure(v, case) for v in values if isinstance(v, list | dict)]
        return self._either(ways)

    def _texts(self, texts: list[str], case: Case) -> str | None:
        if "pattern" in case or "format" in case:
            return self._library(string_schema({**case, "enum": texts}))
        least, most = case.get("minLength", 0), case.get("maxLength")
        fitting = [t for t in texts if len(t) >= least and (most is None or len(t) <= most)]
        if not fitting:
            return None
        return self._terminal(" | ".join(map(spelled, dict.fromkeys(fitting))))

    def _structure(self, value: Any, case: Case) -> str | None:
        """A list or an object that is listed."""
        others = {key: rule for key, rule in case.items() if key not in ("enum", "type")}
        kind = type_name(value)
        others = {key: rule for key, rule in others.items() if key in _OF_TYPE[kind]}
        return self.value(all_of([only(value), *([others] if others else [])]))

    def _array(self, case: Case) -> str | None:
        least, most = case.get("minItems", 0), case.get("maxItems")
        if most is not None and least > most:
            return None
        prefix: list[str] = []
        for schema in case.get("prefixItems", [])[:most]:
            item = self.value(schema)
            if item is None:
                most = len(prefix)
                break
            prefix.append(item)
        room = None if most is None else most - len(prefix)
        item = None if room == 0 else self.value(case.get("items", True))
        if (room == 0 or item is None) and least > len(prefix):
            return None
        body = self._items(prefix, item, least, room)
        return self.rules.rule(f'"[" {body} "]"' if body else '"[" "]"')

    def _items(self, prefix: list[str], item: str | None, least: int, room: int | None) -> str:
        """What is between the brackets, from the last item to the first."""
        body = ""
        if item is not None:
            fewest = max(least - len(prefix), 1)
            repeat = _repeat(fewest - 1, None if room is None else room - 1)
            body = f'{item} ("," {item}){repeat}' if repeat else item
            if len(prefix) >= least:
                body = f"({body})?" if not prefix else self.rules.rule(body)
        for index in reversed(range(len(prefix))):
            tail = ""
            if body:
                tail = f'("," {body})?' if index + 1 >= least else f'"," {body}'
            body = self.rules.rule(f"{prefix[index]} {tail}".rstrip())
        return f"{body}?" if prefix and least == 0 else body

    def _object(self, case: Case) -> str | None:
        required = dict.fromkeys(case.get("required", ()))
        names = list(dict.fromkeys([*case.get("properties", {}), *required]))
        patterns = case.get("patternProperties", {})
        _check_patterns(list(patterns), len(names))
        members = []
        for name in names:
            value = self.value(all_of(said_of(case, name)))
            if value is not None:
                members.append(Member(f'{spelled(name)} ":" {value}', name in required))
            elif name in required:
                return None
        others = self._other_members(case, names, patterns)
        body = MemberSequence(self.rules, members, others, case, self._ways).braced()
        return None if body is None else self.rules.rule(body)

    def _other_members(
        self, case: Case, names: list[str], patterns: Mapping[str, Any]
    ) -> str | None:
        ways: list[str | None] = []
        for pattern, schema in patterns.items():
            value = self.value(schema)
            if value is not None:
                taken = [name for name in names if matches(pattern, name)]
                ways.append(self._member(self._pattern_name(pattern, taken), value))
        value = self.value(case.get("additionalProperties", True))
        if value is not None:
            name = self._terminal(other_name(names, patterns))
            ways.append(self._member(name, value))
        return self._either(ways)

    def _pattern_name(self, pattern: str, taken: list[str]) -> str:
        if taken:
            return self._terminal(pattern_name(pattern, taken))
        name = self._library({"type": "string", "pattern": pattern})
        return self._terminal(pattern_name(pattern, ())) if name is None else name

    def _member(self, name: str, value: str) -> str:
        return self.rules.rule(f'{name} ":" {value}')

    def _any(self) -> str:
        """Any value at all."""
        if "any" not in self._named:
            self._named["any"] = rule = self.rules.reserve()
            number, text = self._terminal(slashed(NUMBER)), self._terminal(STRING)
            name, scalar = self._terminal(NAME), self._terminal('"true" | "false" | "null"')
            items = self.rules.rule(f'"[" ({rule} ("," {rule})*)? "]"')
            member = self._member(name, rule)
            members = self.rules.rule(f'"{{" ({member} ("," {member})*)? "}}"')
            self.rules.define(rule, f"{scalar} | {number} | {text} | {items} | {members}")
        return self._named["any"]


def _key(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema)


def _repeat(least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _has_type(value: Any, kinds: list[str] | tuple[str, ...]) -> bool:
    kind = type_name(value)
    if kind == "number" and "integer" in kinds and float(value).is_integer():
        return True
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _is_allowed(case: Case, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_within(case, value) if is_number else True


def _check_patterns(patterns: list[str], num_names: int) -> None:
    if len(patterns) > _MAX_PATTERNS or len(patterns) * num_names > _MAX_MATCHES:
        raise Unenforceable("has too many patternProperties")
    for index, pattern in enumerate(patterns):
        if any(overlap(pattern, other) for other in patterns[:index]):
            raise Unenforceable("has patternProperties whose patterns overlap")
