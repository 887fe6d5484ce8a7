"""A constraint as the text that the grammar library compiles.

json_object, json_schema   rules of their JSON texts (json_grammar), white space bounded
regex, choice, gbnf, lark  its Lark dialect
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from llguidance import LLMatcher

from ninfer.contract.chat import Constraint
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.gbnf import GbnfError, to_lark
from ninfer.frontend.constraints.json_grammar import json_lark
from ninfer.frontend.constraints.json_schema import (
    MAX_CHARACTERS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    prepare_schema,
)
from ninfer.frontend.constraints.library_schema import cause_of
from ninfer.frontend.constraints.schema_ends import has_endless_schema
from ninfer.frontend.constraints.schema_errors import invalid, too_complex, unenforceable
from ninfer.frontend.constraints.unenforceable import Unenforceable
from ninfer.frontend.constraints.vocabulary import quoted

MAX_COLONS: Final = 4_000
_TOO_LARGE: Final = re.compile(r"too (?:big|large|complex|many)|limit|fuel|exceed", re.IGNORECASE)
_LITERAL: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#).*')
_ATTRIBUTE: Final = re.compile(r"\[[^\[\]]*?\b(max_tokens|stop)\s*=")
_TOO_MANY_SYMBOLS: Final = "symbols.len()"


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is for the library. `is_schema` says what its complaints are about."""

    text: str
    is_schema: bool = False

    def error(self, param: str, message: str) -> RequestError:
        """What the library says against it."""
        cause = "too many rules" if _TOO_MANY_SYMBOLS in message else cause_of(message)
        if _TOO_LARGE.search(cause):
            return RequestError("schema_too_complex", f"'{param}' is too complex: {cause}.", param)
        if self.is_schema:
            return invalid(param, f"cannot be enforced: {cause}")
        return invalid_grammar(param, f"is not understood: {cause}")


def invalid_grammar(param: str, rule: str) -> RequestError:
    return RequestError("invalid_grammar", f"'{param}' {rule}.", param)


def build_grammar(constraint: Constraint) -> Grammar:
    """Raises RequestError: `invalid_json_schema`, `invalid_grammar`, `schema_too_complex`, each
    with the field or the place in the schema."""
    text, param = constraint.text, constraint.param
    is_json = constraint.kind in ("json_schema", "choice")
    most = MAX_CHARACTERS if is_json else MAX_GRAMMAR_CHARACTERS
    if len(text) > most:
        raise too_complex(param, f"has more than {most} characters")
    match constraint.kind:
        case "json_object":
            return _schema_grammar({"type": "object"}, "{}", param)
        case "json_schema":
            prepared = prepare_schema(text, param, is_strict=constraint.is_strict)
            return _schema_grammar(prepared, text, param)
        case "regex":
            return Grammar(LLMatcher.grammar_from_regex(text))
        case "choice":
            choices = " | ".join(map(quoted, _choices(text, param)))
            return lark_grammar(f"start: CHOICE\nCHOICE: {choices}")
        case "gbnf":
            _check_num_rules(text, param)
            try:
                return lark_grammar(to_lark(text))
            except GbnfError as error:
                raise invalid_grammar(param, f"is no GBNF grammar: {error}") from None
        case "lark":
            _check_num_rules(text, param)
            _check_attributes(text, param)
            if has_endless_schema(text):
                raise invalid_grammar(param, "has a schema that allows no value that ends")
            return lark_grammar(text)


def _check_num_rules(text: str, param: str) -> None:
    """Every rule, and every member of a schema in a Lark grammar, has a colon."""
    if text.count(":") > MAX_COLONS:
        raise too_complex(param, f"has more than {MAX_COLONS} colons, so too many rules")


def _check_attributes(text: str, param: str) -> None:
    """A text is looked at before it is accepted, and the library has no way back over some."""
    found = _ATTRIBUTE.search(_LITERAL.sub("", text))
    if found is not None:
        raise invalid_grammar(
            param, f"has the attribute '{found[1]}', which is not supported; 'suffix' is"
        )


def lark_grammar(text: str) -> Grammar:
    return Grammar(json.dumps({"grammars": [{"lark_grammar": text}]}))


def _schema_grammar(prepared: dict[str, Any], text: str, param: str) -> Grammar:
    """`text`: the schema as the client wrote it."""
    try:
        lark = json_lark(prepared, prepared)
    except Unenforceable as error:
        raise unenforceable(error, json.loads(text), param) from None
    if lark is None:
        raise invalid(param, "allows no value that ends")
    return replace(lark_grammar(lark), is_schema=True)


def _choices(text: str, param: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices:
        raise invalid_grammar(param, "must be a list of at least one string")
    if not all(isinstance(choice, str) for choice in choices):
        raise invalid_grammar(param, "must be a list of strings")
    if max(map(len, choices)) > MAX_TEXT_CHARACTERS:
        raise too_complex(param, f"has a string of more than {MAX_TEXT_CHARACTERS} characters")
    return choices
