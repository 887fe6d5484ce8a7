"""The grammar of tool calls in the form that a model was taught.

    calls   one call or several, for a choice that demands them
    body    what follows the opening mark, for strict tools that may be called or not

Arguments follow their schema: names in the schema's order, required ones always. A string of the
XML form is free text, bound by `enum`, `const` and its lengths alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ninfer.contract.chat import ToolSpec
from ninfer.frontend.constraints.grammar import Grammar, with_layout
from ninfer.frontend.constraints.json_schema import prepare_schema
from ninfer.frontend.constraints.schema_walk import resolve
from ninfer.frontend.constraints.vocabulary import GrammarVocabulary, quoted
from ninfer.frontend.tool_calls.call_format import (
    CALL_CLOSE,
    CALL_OPEN,
    CallFormat,
    JsonCallFormat,
    XmlCallFormat,
)

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": False}
_MARKS: Final = re.compile(f"({re.escape(CALL_OPEN)}|{re.escape(CALL_CLOSE)})")
_DEFINITIONS: Final = ("$defs", "definitions")
_ANY_TEXT: Final = "/(?s:.*)/"


@dataclass(slots=True)
class _Rules:
    """Lark rules so far, and the schemas that they name."""

    lines: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)

    def schema(self, prepared: Mapping[str, Any]) -> str:
        """A reference to the values of a prepared schema."""
        name = f"json{len(self.schemas)}"
        self.schemas.append({"name": name, "json_schema": with_layout(dict(prepared))})
        return f"@{name}"

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def grammar(self, start: str, others: Sequence[Mapping[str, Any]] = ()) -> Grammar:
        lark = "\n".join([f"start: {start}", *self.lines]) + "\n"
        grammars = [{"lark_grammar": lark}, *self.schemas, *others]
        return Grammar(json.dumps({"grammars": grammars}), bool(self.schemas))


class CallGrammars:
    """For one model's way of writing calls. `param` is the field the tools came in."""

    def __init__(self, form: CallFormat, vocabulary: GrammarVocabulary) -> None:
        self._form = form
        self._vocabulary = vocabulary

    def calls(
        self, tools: Sequence[ToolSpec], param: str, *, several: bool, answer: Grammar | None = None
    ) -> Grammar:
        """At least one call, or the `answer` instead. Raises RequestError for a schema."""
        rules = _Rules()
        bodies = [self._body(rules, tool, param) for tool in tools]
        call = rules.rule(f"{self._literal(CALL_OPEN)} ({' | '.join(bodies)})")
        separator = self._literal(self._form.separator)
        start = f"{call} ({separator} {call})*" if several else call
        if answer is None:
            return rules.grammar(start)
        others = json.loads(answer.text)["grammars"]
        others[0]["name"] = "answer"
        return rules.grammar(f"@answer | {start}", others)

    def body(self, tools: Sequence[ToolSpec], param: str) -> Grammar:
        """A call behind its opening mark. Tools that are not strict have any arguments."""
        rules = _Rules()
        bodies = [
            self._body(rules, tool, param) if tool.is_strict else self._free_body(rules, tool)
            for tool in tools
        ]
        return rules.grammar(" | ".join(bodies))

    def _free_body(self, rules: _Rules, tool: ToolSpec) -> str:
        head = self._head(tool)
        return rules.rule(f"{head} {_ANY_TEXT} {self._literal(CALL_CLOSE)}")

    def _body(self, rules: _Rules, tool: ToolSpec, param: str) -> str:
        prepared = _prepared(tool, param)
        if isinstance(self._form, JsonCallFormat):
            arguments = rules.schema(prepared)
        else:
            arguments = self._parameters(rules, self._form, prepared)
        return rules.rule(f"{self._head(tool)} {arguments} {self._literal(self._form.tail)}")

    def _head(self, tool: ToolSpec) -> str:
        head = self._form.head.removeprefix(CALL_OPEN)
        return self._literal(f"{head}{tool.name}{self._form.name_end}")

    def _parameters(self, rules: _Rules, form: XmlCallFormat, prepared: Mapping[str, Any]) -> str:
        required = set(prepared.get("required", ()))
        parts = []
        for name, schema in prepared.get("properties", {}).items():
            if schema is False:
                continue
            value = _value(rules, form, prepared, schema)
            head = self._literal(f"{form.parameter_head}{name}{form.key_end}")
            part = rules.rule(f"{head} {value}")
            parts.append(part if name in required else f"{part}?")
        return " ".join(parts)

    def _literal(self, text: str) -> str:
        """Text and marks; a mark is its token where it is one."""
        parts = [part for part in _MARKS.split(text) if part]
        return " ".join(
            self._vocabulary.mark(part) if _MARKS.fullmatch(part) else quoted(part)
            for part in parts
        )


def _prepared(tool: ToolSpec, param: str) -> Mapping[str, Any]:
    if tool.parameters is None:
        return _NO_ARGUMENTS
    text = json.dumps(tool.parameters)
    prepared = prepare_schema(text, f"{param}.{tool.name}", is_strict=tool.is_strict)
    return prepared if prepared.get("type") == "object" else {**prepared, "type": "object"}


def _value(rules: _Rules, form: XmlCallFormat, root: Mapping[str, Any], schema: Any) -> str:
    """A value of the XML form and what ends it."""
    target = _target(root, schema)
    end = quoted(form.parameter_end)
    texts = _texts(target)
    if texts is not None:
        return f"({' | '.join(map(quoted, texts))}) {end}"
    if _may_be_text(target):
        least, most = target.get("minLength", 0), target.get("maxLength", "")
        text = f"/(?s:.{{{least},{most}}})/" if least or most != "" else _ANY_TEXT
        return rules.rule(text, f"[suffix={end}]")
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    return f"{rules.schema({**definitions, **schema})} {end}"


def _target(root: Mapping[str, Any], schema: Any) -> Mapping[str, Any]:
    """The schema that a chain of references names; {} for what is no object."""
    for _ in range(8):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """All values, when they are listed and all of them are strings."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None or not all(isinstance(value, str) for value in values):
        return None
    return list(values)


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a string is among the values, so that there is no telling text from JSON."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    if isinstance(kind, list):
        return "string" in kind
    return not ("enum" in schema or "const" in schema)
