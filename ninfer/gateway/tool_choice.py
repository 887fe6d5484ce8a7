"""`tool_choice`, or the older `function_call`: which calls may or must come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields, invalid_type, invalid_value, missing, unsupported_value

Choice: TypeAlias = Literal["auto", "none", "required"]
_WORDS: Final[Mapping[str, Choice]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",
}
CALLABLE: Final = ("function", "custom")
_MODES: Final = ("auto", "required")
Finder: TypeAlias = Callable[[Fields], Sequence[str] | None]
"""What the model calls the tools that an entry names; None for a type that is never called."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """As in ToolRules; `path` is the field it came in."""

    path: str
    choice: Choice = "auto"
    allowed: tuple[str, ...] | None = None

    def allows(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


def parse_tool_choice(
    fields: Fields, names: Sequence[str], find: Finder | None = None
) -> ToolChoice:
    """`names`: of the tools that can be called; `find`: where entries do not simply use them.
    Raises RequestError naming the field."""
    find = find or partial(_find, names)
    choices = {
        name: _choice(fields, name, names, find) for name in ("tool_choice", "function_call")
    }
    choice = choices[fields.first_of(tuple(choices)) or "tool_choice"]
    if choice.choice == "required" and not names:
        raise invalid_value(choice.path, "needs tools to choose from")
    return choice


def entry_name(entry: Fields) -> Fields:
    """The object of an entry that has its name. Raises RequestError without one."""
    inner = entry.child("function") or entry.child("custom") or entry
    if not inner.string("name"):
        raise missing(inner.path_of("name"))
    return inner


def unknown_tool(named: Fields) -> RequestError:
    return invalid_value(named.path_of("name"), "must be the name of one of the tools")


def _choice(fields: Fields, field: str, names: Sequence[str], find: Finder) -> ToolChoice:
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
        return _allowed(choice, find)
    if kind not in (None, *CALLABLE):
        raise unsupported_value(choice.path_of("type"), "only functions and custom tools are run")
    if not names:
        raise invalid_value(path, "needs tools to choose from")
    return ToolChoice(path, "required", tuple(find(choice) or ()))


def _allowed(choice: Fields, find: Finder) -> ToolChoice:
    """Hosted tools among the allowed ones are skipped as they are in `tools`."""
    inner = choice.child("allowed_tools") or choice
    mode = inner.choice("mode", _MODES) or "auto"
    if not inner.has("tools"):
        raise missing(inner.path_of("tools"))
    allowed = [name for entry in inner.children("tools") for name in find(entry) or ()]
    if allowed:
        return ToolChoice(
            choice.path,
            "required" if mode == "required" else "auto",
            tuple(dict.fromkeys(allowed)),
        )
    if mode == "required":
        raise invalid_value(inner.path_of("tools"), "must name a tool that can be called")
    return ToolChoice(choice.path, "none", ())


def _find(names: Sequence[str], entry: Fields) -> Sequence[str] | None:
    if entry.string("type") not in (None, *CALLABLE):
        return None
    named = entry_name(entry)
    name = named.string("name") or ""
    if name not in names:
        raise unknown_tool(named)
    return (name,)
