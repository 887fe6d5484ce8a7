"""Bounds of a chat template's steps, memory and time, kept while it runs in Jinja's sandbox.

Jinja's own sandbox keeps a template from the system, not from running for ever. Here every loop,
call, filter and operator charges the `TemplateBudget` of its render:

    loops, calls            steps            a loop that has a length pays for all of it at once
    + * ~ filters, calls    characters       of what they return, kept or not
    * ** %, padding         refused beforehand where the result would not fit
    literals, comparisons   steps            for all they hold: shared parts must not multiply
    everything              CPU time

A budget grows with the conversation, so real templates never meet it. Literals, loops and the like
are hooked by rewriting the parsed template; nothing is computed while it is compiled.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import BuiltinMethodType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ninfer.contract.abandonment import stop_if_abandoned
from ninfer.contract.errors import InvariantError

BASE_STEPS: Final = 200_000
STEPS_PER_CHARACTER: Final = 100
BASE_CHARACTERS: Final = 2**22
COPIES: Final = 1000
"""How often a template may copy the whole conversation."""
BASE_SECONDS: Final = 1.0
CHARACTERS_PER_SECOND: Final = 100_000
MAX_POWER_OPERAND: Final = 1024
MAX_PRODUCT_BITS: Final = 2**16

_SMALL_RESULT: Final = 64
"""Shorter results are free: their steps are counted."""
_TIME_INTERVAL: Final = 4
_ITEMS_PER_CHARACTER: Final = 16
"""Lists are cheap: templates copy them whole to add an item."""
_WIDE_FORMAT: Final = re.compile(r"\d{5}|\*")
_LOOP, _JOIN, _LITERAL = "loop steps", "joined text", "counted literal"
_STRETCHING: Final = frozenset(
    {
        *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust"),
        *("replace", "rjust", "round", "slice", "translate", "wordwrap", "zfill"),
    }
)
"""Filters and methods whose result can be longer than all they are given."""
_SHALLOW: Final = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list"),
        *("map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    }
)
"""Filters that do not look into what a list holds."""


class TemplateLimit(SecurityError):
    """The template uses more than its budget."""


class TemplateBudget:
    """What one render may still use. `num_characters` is `size_of` what it is given."""

    def __init__(self, num_characters: int) -> None:
        self.max_characters = BASE_CHARACTERS + COPIES * num_characters
        self._steps = BASE_STEPS + STEPS_PER_CHARACTER * num_characters
        self._characters = self.max_characters
        self._seconds = BASE_SECONDS + num_characters / CHARACTERS_PER_SECOND
        self._deadline = time.thread_time() + self._seconds
        self._until_look = _TIME_INTERVAL

    def take_steps(self, count: int) -> None:
        """Raises TemplateLimit, and WorkAbandoned when nobody waits for the text."""
        self._steps -= count
        if self._steps < 0:
            raise TemplateLimit("it does not end: too many loop steps and calls")
        self._until_look -= 1
        if self._until_look < 0:
            self._until_look = _TIME_INTERVAL
            stop_if_abandoned()
            if time.thread_time() > self._deadline:
                raise TemplateLimit(f"it takes more than {self._seconds:.1f} seconds")

    def take(self, value: Any) -> Any:
        """Charge for a new value and return it."""
        if isinstance(value, str):
            if len(value) > _SMALL_RESULT:
                self.take_characters(len(value))
        elif isinstance(value, list | tuple) and len(value) > _SMALL_RESULT:
            self.take_characters(len(value) // _ITEMS_PER_CHARACTER)
        return value

    def take_characters(self, count: int) -> None:
        self._characters -= count
        if self._characters < 0:
            raise TemplateLimit("it writes too much: too many characters")

    def require(self, num_characters: int) -> None:
        """Refuse a result of this size before it is made."""
        if num_characters > self.max_characters:
            raise TemplateLimit("it writes too much: a result that is too long")


def size_of(value: Any) -> int:
    """Characters of all texts in a JSON-like value, and one for each thing it holds."""
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            rest.extend(item)
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            rest.extend(item)
    return size


class BoundedContext(Context):
    """Jinja's context of one render, with its budget."""

    budget: TemplateBudget


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox for templates of model directories; render with `render_bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = BoundedContext

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=jinja2.pass_context(_counted_text), **options)
        del self.globals["lipsum"]
        self.globals["namespace"] = _QuietNamespace
        self.filters |= {
            _LOOP: jinja2.pass_context(_counted_loop),
            _JOIN: jinja2.pass_context(_joined_text),
            _LITERAL: jinja2.pass_context(_counted_literal),
        }

    def bound_filters(self) -> None:
        """Make every filter charge; after the last one has been added."""
        own = {_LOOP, _JOIN, _LITERAL}
        for name, function in self.filters.items():
            if name not in own:
                self.filters[name] = _charging(name, function)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        _check_operands(budget, operator, left, right)
        return budget.take(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as in the base class: keywords belong to the template.
        budget = _budget_of(__context)
        budget.take_steps(1)
        if isinstance(__obj, LoopContext):
            args = tuple(_counted_loop(__context, value) for value in args)
        elif __obj is dict:
            _take_tree(budget, [args, kwargs])
        else:
            method = getattr(__obj, "__wrapped__", __obj)
            if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
                _check_stretching(budget, method.__name__, (method.__self__, *args), kwargs)
        return budget.take(super().call(__context, __obj, *args, **kwargs))

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        return super()._generate(_Hooks().visit(source), name, filename, defer_init)


def render_bounded(
    template: jinja2.Template, variables: Mapping[str, Any], budget: TemplateBudget
) -> str:
    """The text of a BoundedSandbox's template.

    Raises TemplateLimit, and whatever the template raises.
    """
    context = template.new_context(dict(variables))
    if not isinstance(context, BoundedContext):
        raise InvariantError("the template was compiled without bounds")
    context.budget = budget
    return "".join(template.root_render_func(context))


class _QuietNamespace(Namespace):
    """Namespaces may hold each other; writing them out could take for ever."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Hooks(NodeTransformer):
    """Puts the counting filters into a parsed template."""

    def visit_Include(self, node: nodes.Include) -> nodes.Node:
        return _refused(node)

    def visit_Import(self, node: nodes.Import) -> nodes.Node:
        return _refused(node)

    def visit_FromImport(self, node: nodes.FromImport) -> nodes.Node:
        return _refused(node)

    def visit_Extends(self, node: nodes.Extends) -> nodes.Node:
        return _refused(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOIN)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filtered(node.expr, _LITERAL)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """As an expression, a long text pays each time that it is written."""
        is_short = len(node.data) <= _SMALL_RESULT
        return node if is_short else nodes.Const(node.data, lineno=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node, [pair.value for pair in node.items])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":
            return node
        return self._literal(node, node.items)

    def _literal(self, node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        is_plain = all(isinstance(item, nodes.Const) for item in items)
        return node if is_plain else _filtered(node, _LITERAL)


def _refused(node: nodes.Node) -> NoReturn:
    raise jinja2.TemplateSyntaxError("a template cannot use other files", node.lineno)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _budget_of(context: Context) -> TemplateBudget:
    if not isinstance(context, BoundedContext):
        raise InvariantError("a template runs without bounds")
    return context.budget


def _charging(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(function, "jinja_pass_arg", None)
    kind = "" if passed is None else passed.name

    @jinja2.pass_context
    @functools.wraps(function)
    def charging(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.take_steps(1)
        if name in _STRETCHING:
            _check_stretching(budget, name, args, kwargs)
        if name not in _SHALLOW and args:
            _take_tree(budget, args[0])
        lead = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }.get(kind, ())
        return budget.take(function(*lead, *args, **kwargs))

    return charging


def _counted_loop(context: Context, value: Any) -> Iterable[Any]:
    budget = _budget_of(context)
    if isinstance(value, Sized) and isinstance(value, Iterable):
        budget.take_steps(len(value))
        return value
    return _counted_items(budget, value)


def _counted_items(budget: TemplateBudget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.take_steps(1)
        yield item


def _joined_text(context: Context, values: list[Any]) -> str:
    """What `~` means: texts one after another."""
    budget = _budget_of(context)
    texts = [str(_written(budget, value)) for value in values]
    budget.take_characters(sum(map(len, texts)))
    return "".join(texts)


def _counted_text(context: Context, value: Any) -> Any:
    return _written(_budget_of(context), value)


def _written(budget: TemplateBudget, value: Any) -> Any:
    """A value that becomes text."""
    _take_tree(budget, value)
    return budget.take(value)


def _counted_literal(context: Context, value: Any) -> Any:
    _take_tree(_budget_of(context), value)
    return value


def _take_tree(budget: TemplateBudget, value: Any) -> None:
    """A step for everything that a value holds, as often as it holds it."""
    if isinstance(value, str):
        return
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, Mapping):
            budget.take_steps(len(item))
            rest.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            budget.take_steps(len(item))
            rest.extend(item)


def _check_operands(budget: TemplateBudget, operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if max(abs(left), abs(right)) > MAX_POWER_OPERAND:
            raise TemplateLimit("power of too large a number")
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            budget.require(len(left) + len(right))
    elif operator == "*":
        budget.require(_repeated_length(left, right))
        if _product_bits(left, right) > MAX_PRODUCT_BITS:
            raise TemplateLimit("product of too large numbers")
    elif operator == "%" and isinstance(left, str):
        _check_format(budget, left, right)


def _repeated_length(left: Any, right: Any) -> int:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


def _product_bits(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    return 0


def _check_format(budget: TemplateBudget, text: str, values: Any) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimit("a format that pads too far")
    _take_tree(budget, values)
    budget.require(len(text) * _size(values))


def _check_stretching(
    budget: TemplateBudget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """`args` begin with the text or list that is stretched."""
    if name not in _STRETCHING or not args:
        return
    subject, *others = args
    if name in ("format", "format_map") and isinstance(subject, str):
        _check_format(budget, subject, [*others, *kwargs.values()])
    factor = max(map(_size, (*others, *kwargs.values())), default=1)
    budget.require((len(subject) if isinstance(subject, Sized) else 1) * factor)


def _size(value: Any) -> int:
    """How far a value can stretch another: a number as a width, a text by its length."""
    if isinstance(value, bool):
        return 1
    if isinstance(value, int):
        return max(1, abs(value))
    if isinstance(value, str):
        return max(1, len(value))
    if isinstance(value, Mapping):
        return max(map(_size, value.values()), default=1)
    if isinstance(value, list | tuple):
        return max(map(_size, value), default=1)
    return 1
