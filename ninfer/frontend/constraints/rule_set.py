"""The grammar of calls while it is put together: Lark rules, and the schemas that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.frontend.constraints.grammar import Grammar
from ninfer.frontend.constraints.json_grammar import json_lark
from ninfer.frontend.constraints.json_objects import WayBudget
from ninfer.frontend.constraints.lark_rules import LarkRules


class RuleSet(LarkRules):
    """Besides rules it has grammars of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._grammars: list[dict[str, Any]] = []
        self._ways = WayBudget()

    def schema(self, schema: Any, root: Any) -> str | None:
        """A name for the values of a prepared schema whose references lie in `root`; None when
        there are none. Raises Unenforceable."""
        lark = json_lark(schema, root, self._ways)
        if lark is None:
            return None
        name = f"json{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def grammar(self, start: str, others: Sequence[Mapping[str, Any]] = ()) -> Grammar:
        grammars = [{"lark_grammar": self.text(start)}, *self._grammars, *others]
        is_schema = bool(self._grammars) or not others
        return Grammar(json.dumps({"grammars": grammars}), is_schema)
