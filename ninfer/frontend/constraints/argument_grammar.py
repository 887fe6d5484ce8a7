"""The parameters of a call in the XML form: names in the schema's order, required ones always."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.frontend.constraints.parameter_grammar import ParameterGrammar
from ninfer.frontend.constraints.rule_set import RuleSet
from ninfer.frontend.constraints.schema_cases import Case, case_types, cases
from ninfer.frontend.constraints.schema_errors import invalid, too_complex, unenforceable
from ninfer.frontend.constraints.schema_walk import path_of
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.constraints.vocabulary import quoted
from ninfer.frontend.tool_calls.call_format import XmlCallFormat
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools

_NAME: Final = re.compile(r"[^<>\n\s](?:[^<>\n]{0,254}[^<>\n\s])?")
_MAX_PLACES: Final = 2_000
"""Of rules that count parameters."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter's rule."""

    rule: str
    is_required: bool


class ArgumentGrammar:
    """Of one tool; `path` is its place for errors."""

    def __init__(
        self,
        rules: RuleSet,
        form: XmlCallFormat,
        tool: ToolSpec,
        prepared: Mapping[str, Any],
        path: str,
    ) -> None:
        self._rules = rules
        self._form = form
        self._tool = tool
        self._prepared = prepared
        self._path = path
        self._declared = DeclaredTools(ToolRules(tools=(tool,)))
        self._values = ParameterGrammar(rules, form, prepared, is_strict=tool.is_strict)

    def arguments(self) -> str:
        """Raises RequestError naming what cannot be written or enforced."""
        objects = [case for case in self._cases() if "object" in case_types(case)]
        forms = [form for case in objects if (form := self._object(case)) is not None]
        if not forms:
            raise invalid(self._path, "allows no object that can be written as parameters")
        return forms[0] if len(forms) == 1 else f"({' | '.join(dict.fromkeys(forms))})"

    def _cases(self) -> list[Case]:
        try:
            return cases(self._prepared, self._prepared)
        except Unenforceable as error:
            if self._tool.is_strict:
                raise unenforceable(error, self._tool.parameters, self._path) from None
            return [{key: self._prepared[key] for key in _OWN if key in self._prepared}]

    def _object(self, case: Case) -> str | None:
        """The parameters of one kind of object, None when there is none."""
        if self._tool.is_strict:
            for key in ("patternProperties", "enum"):
                if key in case:
                    raise invalid(self._place(key), "cannot be enforced for parameters")
        required = list(case.get("required", ()))
        properties = dict(case.get("properties", {}))
        for name in required:
            properties.setdefault(name, case.get("additionalProperties", True))
        parts = []
        for name, schema in properties.items():
            value = self._value(name, schema)
            if value is not None:
                head = quoted(f"{self._form.parameter_head}{name}{self._form.key_end}")
                parts.append(_Part(self._rules.rule(f"{head} {value}"), name in required))
            elif name in required:
                return None
        return self._sequence(parts, case)

    def _place(self, key: str) -> str:
        """Of a keyword as the client wrote it: patterns of names may have been `propertyNames`."""
        given = self._tool.parameters or {}
        is_rewritten = key == "patternProperties" and key not in given
        return path_of(self._path, "propertyNames" if is_rewritten else key)

    def _value(self, name: str, schema: Any) -> str | None:
        place = path_of(path_of(self._path, "properties"), name)
        if not _NAME.fullmatch(name):
            raise invalid(place, "is no name that this model can write")
        try:
            return self._values.value(schema, self._declared.types(self._tool.name, name))
        except Unenforceable as error:
            raise unenforceable(error, schema, place) from None

    def _sequence(self, parts: list[_Part], case: Case) -> str | None:
        least, most = case.get("minProperties", 0), case.get("maxProperties", len(parts))
        num_required = sum(part.is_required for part in parts)
        if least > len(parts) or most < num_required or least > most:
            return None
        if least <= num_required and most >= len(parts):
            return " ".join(part.rule if part.is_required else f"{part.rule}?" for part in parts)
        largest = least if most >= len(parts) else most + 1
        if len(parts) * largest > _MAX_PLACES:
            raise too_complex(self._path, "counts too many properties")
        return self._counted(parts, least, most, largest)

    def _counted(self, parts: list[_Part], least: int, most: int, largest: int) -> str | None:
        """A rule for each number of parameters so far, beyond `largest` one for all; from the
        last parameter to the first."""
        rest: list[str | None] = [
            '""' if least <= count <= most else None for count in range(largest + 1)
        ]
        for index in reversed(range(len(parts))):
            part = parts[index]
            for count in range(min(index, largest) + 1):
                taken, skipped = rest[min(count + 1, largest)], rest[count]
                ways = [] if taken is None else [f"{part.rule} {taken}"]
                if skipped is not None and not part.is_required:
                    ways.append(skipped)
                rest[count] = self._rules.rule(" | ".join(ways)) if ways else None
        return rest[0]


_OWN: Final = ("properties", "required", "minProperties", "maxProperties", "additionalProperties")
