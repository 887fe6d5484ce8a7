"""Tools of a request: what the model is shown, and what its calls are called on the wire.

The model knows functions only. A custom tool is one with a single string, `input`; a member of a
namespace has a name of its own that leads back to both. Tools that only hosted services run are
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.gateway.fields import Fields, invalid_value
from ninfer.gateway.tool_choice import CALLABLE, entry_name, parse_tool_choice, unknown_tool
from ninfer.gateway.tool_fields import MAX_TOOLS, FunctionTool, parse_tool, tool_name, tool_rules


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """`function` is the tool as the model knows it, under the name it calls."""

    function: FunctionTool
    name: str
    namespace: str | None = None

    @property
    def called(self) -> str:
        return self.function.spec.name

    def renamed(self, called: str) -> DeclaredTool:
        spec = replace(self.function.spec, name=called)
        return replace(self, function=replace(self.function, spec=spec))


@dataclass(frozen=True, slots=True)
class ToolSet:
    tools: tuple[DeclaredTool, ...] = ()
    _by_call: Mapping[str, DeclaredTool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_call", {tool.called: tool for tool in self.tools})

    def of_call(self, called: str) -> DeclaredTool:
        """The tool the model called; a function of that name if none was declared."""
        return self._by_call.get(called) or DeclaredTool(FunctionTool(ToolSpec(called)), called)

    def call_name(self, namespace: str | None, name: str) -> str:
        """What the model calls, or would call, the tool of an earlier call."""
        for tool in self.tools:
            if (tool.namespace, tool.name) == (namespace, name):
                return tool.called
        return _joined(namespace, name)

    def template_objects(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.function.template_object() for tool in self.tools)


def parse_tools(fields: Fields) -> ToolSet:
    """Raises RequestError naming the tool."""
    path = fields.path_of("tools")
    tools = [tool for entry in fields.children("tools") for tool in _declared(entry)]
    if len(tools) > MAX_TOOLS:
        raise invalid_value(path, f"must have at most {MAX_TOOLS} entries")
    if len({(tool.namespace, tool.name) for tool in tools}) < len(tools):
        raise invalid_value(path, "must have unique names")
    return ToolSet(_distinct(tools))


def parse_tool_rules(fields: Fields, tools: ToolSet) -> ToolRules | None:
    """Which calls the answer may have; None when there is nothing to call. Raises RequestError."""
    names = [tool.called for tool in tools.tools]
    choice = parse_tool_choice(fields, names, partial(_find, tools))
    return tool_rules(fields, [tool.function for tool in tools.tools], choice)


def _declared(entry: Fields) -> Iterator[DeclaredTool]:
    """The functions behind one entry: none for a type that only hosted services run."""
    if entry.string("type") != "namespace":
        function = parse_tool(entry)
        if function is not None:
            yield DeclaredTool(function, function.spec.name)
        return
    namespace = tool_name(entry)
    for member in entry.children("tools"):
        function = parse_tool(member)
        if function is not None:
            name = function.spec.name
            yield DeclaredTool(function, name, namespace).renamed(_joined(namespace, name))


def _joined(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _distinct(tools: Sequence[DeclaredTool]) -> tuple[DeclaredTool, ...]:
    """A member of a namespace gives way to a tool that has its joined name already."""
    taken = {tool.called for tool in tools if tool.namespace is None}
    distinct: list[DeclaredTool] = []
    for tool in tools:
        called = tool.called
        while tool.namespace is not None and called in taken:
            called += "_"
        taken.add(called)
        distinct.append(tool.renamed(called))
    return tuple(distinct)


def _find(tools: ToolSet, entry: Fields) -> Sequence[str] | None:
    """Members of a namespace too: all of them, or one with or without its namespace."""
    kind = entry.string("type")
    if kind not in (None, "namespace", *CALLABLE):
        return None
    named = entry_name(entry)
    name, namespace = named.string("name"), named.string("namespace")
    if kind == "namespace":
        found = [tool for tool in tools.tools if tool.namespace == name]
    else:
        matching = [tool for tool in tools.tools if tool.name == name]
        found = [tool for tool in matching if tool.namespace == namespace]
        if not found and namespace is None and len(matching) == 1:
            found = matching
    if not found:
        raise unknown_tool(named)
    return [tool.called for tool in found]
