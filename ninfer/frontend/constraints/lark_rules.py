"""Rules and terminals of a Lark grammar while they are put together."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LarkRules:
    """Every method but `text` adds a line for a body, or finds the one it has, and returns its
    name."""

    lines: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def rule(self, body: str) -> str:
        return self._add("r", body)

    def terminal(self, body: str) -> str:
        """One unit of the lexer: regular expressions and what is made of them."""
        return self._add("T", body)

    def reserve(self) -> str:
        """A name for a rule that `define` gives its body later."""
        self.lines.append("")
        return f"r{len(self.lines) - 1}"

    def define(self, name: str, body: str) -> None:
        self.lines[int(name[1:])] = f"{name}: {body}"

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *filter(None, self.lines)]) + "\n"

    def _add(self, kind: str, body: str) -> str:
        key = f"{kind}: {body}"
        if key not in self._names:
            name = f"{kind}{len(self.lines)}"
            self.lines.append(f"{name}: {body}")
            self._names[key] = name
        return self._names[key]
