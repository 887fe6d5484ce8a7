"""`tool_choice` of chat requests, or the older `function_call`: which calls may or must come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ninfer.gateway.fields import Fields, invalid_type, invalid_value, missing, unsupported_value

Choice: TypeAlias = Literal["auto", "none", "required"]
_WORDS: Final[Mapping[str, Choice]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",
}
_CALLABLE: Final = ("function", "custom")
_MODES: Final = ("auto", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """As in ToolRules; `path` is the field it came in."""

    path: str
    choice: Choice = "auto"
    allowed: tuple[str, ...] | None = None

    def allows(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


def parse_tool_choice(fields: Fields, names: Sequence[str]) -> ToolChoice:
    """`names`: of the tools that can be called. Raises RequestError naming the field."""
    choices = {name: _choice(fields, name, names) for name in ("tool_choice", "function_call")}
    choice = choices[fields.first_of(tuple(choices)) or "tool_choice"]
    if choice.choice == "required" and not names:
        raise invalid_value(choice.path, "needs tools to choose from")
    return choice


def _choice(fields: Fields, field: str, names: Sequence[str]) -> ToolChoice:
    value, path = fields.get(field), fields.path_of(field)
    if value is None:
        return ToolChoice(path)
    if isinstance(value, str):
        return ToolChoice(path, _WORDS[fields.choice(field, tuple(_WORDS)) or "auto"])
    if not isinstance(value, dict):
        raise invalid_type(path, "a string or an object", value)
    choice = Fields(value, path)
    kind = choice.string("type")
    if kind == "allowed_tools":
        return _allowed(choice, names)
    if kind not in (None, *_CALLABLE):
        raise unsupported_value(choice.path_of("type"), "only functions and custom tools are run")
    if not names:
        raise invalid_value(path, "needs tools to choose from")
    return ToolChoice(path, "required", (_named(choice, names),))


def _allowed(choice: Fields, names: Sequence[str]) -> ToolChoice:
    """Hosted tools among the allowed ones are skipped as they are in `tools`."""
    inner = choice.child("allowed_tools") or choice
    mode = inner.choice("mode", _MODES) or "auto"
    allowed = [
        _named(entry, names)
        for entry in inner.children("tools")
        if entry.string("type") in (None, *_CALLABLE)
    ]
    if allowed:
        return ToolChoice(
            choice.path,
            "required" if mode == "required" else "auto",
            tuple(dict.fromkeys(allowed)),
        )
    if mode == "required":
        raise invalid_value(inner.path_of("tools"), "must name a tool that can be called")
    return ToolChoice(choice.path, "none", ())


def _named(entry: Fields, names: Sequence[str]) -> str:
    inner = entry.child("function") or entry.child("custom") or entry
    name = inner.string("name")
    if not name:
        raise missing(inner.path_of("name"))
    if name not in names:
        raise invalid_value(inner.path_of("name"), "must be the name of one of the tools")
    return name
