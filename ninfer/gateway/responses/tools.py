"""Tools of a request: what the model is shown, and what its calls are called on the wire.

The model knows functions only. A custom tool is one with a single string, `input`; a member of a
namespace has a name of its own that leads back to both. Tools that only hosted services run are
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ninfer.contract.chat import ToolSpec
from ninfer.gateway.fields import Fields, invalid_value, missing
from ninfer.gateway.tool_fields import FREE_FORM, MAX_TOOLS, template_tool, tool_name

_SYNTAXES: Final = ("lark", "regex")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTool:
    """`called` is its name for the model; `has_grammar`: its input should follow a grammar."""

    called: str
    name: str
    namespace: str | None = None
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    is_custom: bool = False
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class ToolSet:
    tools: tuple[DeclaredTool, ...] = ()
    _by_call: Mapping[str, DeclaredTool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_call", {tool.called: tool for tool in self.tools})

    def of_call(self, called: str) -> DeclaredTool:
        """The tool the model called; a function of that name if none was declared."""
        return self._by_call.get(called) or DeclaredTool(called=called, name=called)

    def call_name(self, namespace: str | None, name: str) -> str:
        """What the model calls, or would call, the tool of an earlier call."""
        for tool in self.tools:
            if (tool.namespace, tool.name) == (namespace, name):
                return tool.called
        return _joined(namespace, name)

    def template_objects(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(
            template_tool(tool.called, tool.description, tool.parameters) for tool in self.tools
        )

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(ToolSpec(tool.called, tool.parameters, tool.is_strict) for tool in self.tools)


def parse_tools(fields: Fields) -> ToolSet:
    """Raises RequestError naming the tool."""
    path = fields.path_of("tools")
    tools = [tool for entry in fields.children("tools") for tool in _declared(entry)]
    if len(tools) > MAX_TOOLS:
        raise invalid_value(path, f"must have at most {MAX_TOOLS} entries")
    if len({(tool.namespace, tool.name) for tool in tools}) < len(tools):
        raise invalid_value(path, "must have unique names")
    return ToolSet(_distinct(tools))


def _declared(entry: Fields) -> Iterator[DeclaredTool]:
    """The functions behind one entry: none for a type that only hosted services run."""
    if entry.string("type") != "namespace":
        tool = _tool(entry)
        if tool is not None:
            yield tool
        return
    namespace = tool_name(entry)
    for member in entry.children("tools"):
        tool = _tool(member)
        if tool is not None:
            called = _joined(namespace, tool.name)
            yield replace(tool, namespace=namespace, called=called)


def _tool(entry: Fields) -> DeclaredTool | None:
    kind = entry.string("type")
    if kind == "custom":
        return _custom_tool(entry)
    if kind not in (None, "function"):
        return None
    function = entry.child("function") or entry
    parameters = function.child("parameters")
    name = tool_name(function)
    return DeclaredTool(
        called=name,
        name=name,
        description=function.string("description"),
        parameters=None if parameters is None else parameters.values,
        is_strict=function.flag("strict"),
    )


def _custom_tool(entry: Fields) -> DeclaredTool:
    """A grammar is described to the model: its input is not held to one."""
    name, description = tool_name(entry), entry.string("description")
    rule = _grammar_rule(entry.child("format"))
    texts = [text for text in (description, rule) if text]
    return DeclaredTool(
        called=name,
        name=name,
        description="\n\n".join(texts) if texts else None,
        parameters=FREE_FORM,
        is_custom=True,
        has_grammar=rule is not None,
    )


def _grammar_rule(form: Fields | None) -> str | None:
    if form is None or form.choice("type", ("text", "grammar")) != "grammar":
        return None
    syntax, definition = form.choice("syntax", _SYNTAXES), form.string("definition")
    if syntax is None:
        raise missing(form.path_of("syntax"))
    if not definition:
        raise missing(form.path_of("definition"))
    return f"The input must match this {syntax} grammar:\n{definition}"


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
        distinct.append(replace(tool, called=called))
    return tuple(distinct)
