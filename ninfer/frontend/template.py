"""A checkpoint's chat template, compiled once and run in Jinja's immutable sandbox.

The environment is the one HF templates are written for: trim_blocks, lstrip_blocks, loop controls,
`{% generation %}`, `raise_exception`, `strftime_now` and a `tojson` without HTML escaping. A render
is bounded in loop steps, in sizes of repeated values and in output. Knows nothing of roles; see
chat_renderer.py for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer.contract.errors import ModelFileError, RequestError

TEMPLATE_FILE: Final = "chat_template.jinja"
MAX_OUTPUT_CHARACTERS: Final = 2**26
"""More than any request body can hold, far less than memory."""
MAX_RANGE_STEPS: Final = 1_000_000
"""Steps of all `range(...)` calls of one render together."""
MAX_POWER_OPERAND: Final = 1024

_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What evaluating template code over foreign values can raise."""


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables` are constants such as eos_token.

        Raises ModelFileError with the line of a syntax error.
        """
        self._variables = dict(variables or {})
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = error.message or "syntax error"
            raise ModelFileError(TEMPLATE_FILE, f"line {error.lineno}", message) from None
        except RecursionError:
            raise ModelFileError(TEMPLATE_FILE, None, "nested too deeply") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """The template's text. Raises RequestError (`invalid_template`) with its own message."""
        context = {
            **self._variables,
            **(template_kwargs or {}),
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": _bounded_range(),
        }
        try:
            return self._collect(context)
        except _RENDER_ERRORS as error:
            raise RequestError("invalid_template", _describe(error), "messages") from None

    def _collect(self, context: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_characters = 0
        for piece in self._template.generate(context):
            num_characters += len(piece)
            if num_characters > MAX_OUTPUT_CHARACTERS:
                raise SecurityError(f"more than {MAX_OUTPUT_CHARACTERS} characters of output")
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """Refuses `*` and `**` whose result could fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            if max(abs(left), abs(right)) > MAX_POWER_OPERAND:
                raise SecurityError("power of too large a number")
        elif _repeated_length(left, right) > MAX_OUTPUT_CHARACTERS:
            raise SecurityError("repetition too long")
        return super().call_binop(context, operator, left, right)


def _repeated_length(left: Any, right: Any) -> int:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


def _environment() -> jinja2.Environment:
    environment = _BoundedSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter it leaves <, >, & and ' as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _bounded_range() -> Callable[..., range]:
    """Jinja's own bound is a call's; nested loops need one for the whole render."""
    steps_left = MAX_RANGE_STEPS

    def bounded_range(*arguments: int) -> range:
        nonlocal steps_left
        result = range(*arguments)
        steps_left -= len(result)
        if steps_left < 0:
            raise SecurityError(f"more than {MAX_RANGE_STEPS} loop steps")
        return result

    return bounded_range


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the chat template nests too deeply for this conversation"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.UndefinedError):
        return f"the chat template refuses this conversation: {text}"
    return f"the chat template fails on this conversation: {text}"
