"""The grammar of tool calls in the form that a model was taught.

    calls   one call or several, for a choice that demands them
    body    what follows the opening mark, for strict tools that may be called or not

Arguments follow their schema: names in the schema's order, required ones always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ninfer.contract.chat import ToolSpec
from ninfer.frontend.constraints.argument_grammar import ArgumentGrammar
from ninfer.frontend.constraints.grammar import Grammar
from ninfer.frontend.constraints.json_schema import prepare_schema
from ninfer.frontend.constraints.rule_set import RuleSet
from ninfer.frontend.constraints.schema_errors import invalid, unenforceable
from ninfer.frontend.constraints.schema_walk import path_of
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.constraints.vocabulary import GrammarVocabulary, quoted
from ninfer.frontend.tool_calls.call_format import (
    CALL_CLOSE,
    CALL_OPEN,
    CallFormat,
    JsonCallFormat,
)

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": False}
_MARKS: Final = re.compile(f"({re.escape(CALL_OPEN)}|{re.escape(CALL_CLOSE)})")
_ANY_TEXT: Final = "/(?s:.*)/"


class CallGrammars:
    """For one model's way of writing calls. `param` is the field the tools came in."""

    def __init__(self, form: CallFormat, vocabulary: GrammarVocabulary) -> None:
        self._form = form
        self._vocabulary = vocabulary

    def calls(
        self, tools: Sequence[ToolSpec], param: str, *, several: bool, answer: Grammar | None = None
    ) -> Grammar:
        """At least one call, or the `answer` instead. Raises RequestError for a schema."""
        rules = RuleSet()
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
        rules = RuleSet()
        bodies = [
            self._body(rules, tool, param) if tool.is_strict else self._free_body(rules, tool)
            for tool in tools
        ]
        return rules.grammar(" | ".join(bodies))

    def _free_body(self, rules: RuleSet, tool: ToolSpec) -> str:
        head = self._head(tool)
        return rules.rule(f"{head} {_ANY_TEXT} {self._literal(CALL_CLOSE)}")

    def _body(self, rules: RuleSet, tool: ToolSpec, param: str) -> str:
        path = tool.path or f"{param}.{tool.name}"
        prepared = _prepared(tool, path)
        if isinstance(self._form, JsonCallFormat):
            arguments = _json_arguments(rules, tool, prepared, path)
        else:
            arguments = ArgumentGrammar(rules, self._form, tool, prepared, path).arguments()
        return rules.rule(f"{self._head(tool)} {arguments} {self._literal(self._form.tail)}")

    def _head(self, tool: ToolSpec) -> str:
        head = self._form.head.removeprefix(CALL_OPEN)
        return self._literal(f"{head}{tool.name}{self._form.name_end}")

    def _literal(self, text: str) -> str:
        """Text and marks; a mark is its token where it is one."""
        parts = [part for part in _MARKS.split(text) if part]
        return " ".join(
            self._vocabulary.mark(part) if _MARKS.fullmatch(part) else quoted(part)
            for part in parts
        )


def _json_arguments(rules: RuleSet, tool: ToolSpec, prepared: Mapping[str, Any], path: str) -> str:
    """Raises RequestError when none can be enforced."""
    try:
        arguments = rules.schema(prepared, prepared)
    except Unenforceable as error:
        raise unenforceable(error, tool.parameters, path) from None
    if arguments is None:
        raise invalid(path, "allows no value that ends")
    return arguments


def _prepared(tool: ToolSpec, path: str) -> Mapping[str, Any]:
    """Raises RequestError, also when no object is allowed."""
    if tool.parameters is None:
        return _NO_ARGUMENTS
    prepared = prepare_schema(json.dumps(tool.parameters), path, is_strict=tool.is_strict)
    kinds = prepared.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise invalid(path_of(path, "type"), "must be object")
    return {**prepared, "type": "object"}
