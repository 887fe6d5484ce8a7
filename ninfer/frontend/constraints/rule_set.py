"""Lark rules while they are put together, and the schemas that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer.frontend.constraints.grammar import Grammar, with_layout


@dataclass(slots=True)
class RuleSet:
    """Every method but `grammar` adds something and returns its name."""

    lines: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)

    def schema(self, prepared: Mapping[str, Any]) -> str:
        """The values of a prepared schema."""
        name = f"json{len(self.schemas)}"
        self.schemas.append({"name": name, "json_schema": with_layout(dict(prepared))})
        return f"@{name}"

    def rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """One unit of the lexer: a regular expression."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def grammar(self, start: str, others: Sequence[Mapping[str, Any]] = ()) -> Grammar:
        lark = "\n".join([f"start: {start}", *self.lines]) + "\n"
        grammars = [{"lark_grammar": lark}, *self.schemas, *others]
        is_schema = bool(self.schemas) or not others
        return Grammar(json.dumps({"grammars": grammars}), is_schema)
