"""`tool_choice` and `parallel_tool_calls` -> which calls the answer may have."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from ninfer.contract.chat import ToolRules
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields, invalid_type, invalid_value, missing, unsupported_value
from ninfer.gateway.responses.tools import DeclaredTool, ToolSet

Choice: TypeAlias = Literal["auto", "none", "required"]
_WORDS: Final[dict[str, Choice]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}
_CALLABLE: Final = ("function", "custom")
_MODES: Final = ("auto", "required")


def parse_tool_rules(fields: Fields, tools: ToolSet) -> ToolRules | None:
    """None when there is nothing to call. Raises RequestError naming the field."""
    parallel = fields.boolean("parallel_tool_calls")
    choice, allowed = _choice(fields, tools)
    path = fields.path_of("tool_choice")
    if not tools.tools:
        if choice == "required":
            raise invalid_value(path, "needs tools to choose from")
        return None
    if choice == "required":
        _check_forced(tools, allowed, path)
    return ToolRules(
        tools=tools.specs(), choice=choice, allowed=allowed, parallel=parallel is not False
    )


def _choice(fields: Fields, tools: ToolSet) -> tuple[Choice, tuple[str, ...] | None]:
    value, path = fields.get("tool_choice"), fields.path_of("tool_choice")
    if value is None:
        return "auto", None
    if isinstance(value, str):
        return _WORDS[fields.choice("tool_choice", tuple(_WORDS)) or "auto"], None
    if not isinstance(value, dict):
        raise invalid_type(path, "a string or an object", value)
    choice = Fields(value, path)
    kind = choice.string("type")
    if kind is None:
        raise missing(choice.path_of("type"))
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    if kind not in _CALLABLE:
        raise unsupported_value(choice.path_of("type"), "only functions and custom tools are run")
    return "required", tuple(_named(choice, tools))


def _allowed(choice: Fields, tools: ToolSet) -> tuple[Choice, tuple[str, ...]]:
    """Hosted tools among the allowed ones are skipped as they are in `tools`."""
    mode = choice.choice("mode", _MODES) or "auto"
    allowed: list[str] = []
    for entry in choice.children("tools"):
        kind = entry.string("type")
        if kind == "namespace":
            allowed += _members(entry, tools)
        elif kind in (None, *_CALLABLE):
            allowed += _named(entry, tools)
    if allowed:
        return ("required" if mode == "required" else "auto"), tuple(dict.fromkeys(allowed))
    if mode == "required":
        raise invalid_value(choice.path_of("tools"), "must name a tool that can be called")
    return "none", ()


def _named(entry: Fields, tools: ToolSet) -> list[str]:
    """The tool an entry names; without its namespace when no other has that name."""
    inner = entry.child("function") or entry
    name, namespace = inner.string("name"), inner.string("namespace")
    if not name:
        raise missing(inner.path_of("name"))
    matching = [tool for tool in tools.tools if tool.name == name]
    exact = [tool for tool in matching if tool.namespace == namespace]
    found = exact or (matching if namespace is None and len(matching) == 1 else [])
    if not found:
        raise _unknown(inner)
    return [tool.called for tool in found]


def _members(entry: Fields, tools: ToolSet) -> list[str]:
    called = [tool.called for tool in tools.tools if tool.namespace == entry.string("name")]
    if not called:
        raise _unknown(entry)
    return called


def _unknown(entry: Fields) -> RequestError:
    return invalid_value(entry.path_of("name"), "must be the name of one of the tools")


def _check_forced(tools: ToolSet, allowed: tuple[str, ...] | None, path: str) -> None:
    """A call that is demanded would have to follow its grammar, and cannot be held to it."""

    def may_be_called(tool: DeclaredTool) -> bool:
        return allowed is None or tool.called in allowed

    if all(tool.has_grammar for tool in tools.tools if may_be_called(tool)):
        raise unsupported_value(path, "a custom tool with a grammar cannot be demanded")
