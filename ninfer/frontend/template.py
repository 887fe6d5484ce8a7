"""A checkpoint's chat template, compiled once and run in Jinja's immutable sandbox.

The environment is the one HF templates are written for: trim_blocks, lstrip_blocks, loop controls,
`{% generation %}`, `raise_exception`, `strftime_now` and a `tojson` without HTML escaping. A render
is bounded (template_bounds.py). Knows nothing of roles; see chat_renderer.py for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ninfer.contract.errors import ModelFileError, RequestError
from ninfer.contract.printable import printable
from ninfer.frontend.template_bounds import (
    BoundedSandbox,
    TemplateBudget,
    TemplateLimit,
    render_bounded,
    size_of,
)

TEMPLATE_FILE: Final = "chat_template.jinja"
MAX_SOURCE_CHARACTERS: Final = 2**18
"""Ten times the longest template seen; compiling takes seconds beyond."""
MAX_JSON_INDENT: Final = 32
_SOURCE_NAME: Final = "<template>"
"""Jinja's name of a source that came from no file."""
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a conversation was not rendered, and the line of the template if it is known."""

    reason: str
    line: int | None


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        *,
        path: Path = Path(TEMPLATE_FILE),
    ) -> None:
        """`variables` are constants such as eos_token; `path` is the file that errors name.

        Raises ModelFileError with the line of a syntax error.
        """
        self._variables = dict(variables or {})
        self.source = source
        self.path = path
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise self.error(f"{len(source)} characters, more than {MAX_SOURCE_CHARACTERS}")
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise self.error(error.message or "syntax error", error.lineno) from None
        except (RecursionError, MemoryError):
            raise self.error("nested too deeply") from None
        except (SyntaxError, ValueError, OverflowError) as error:
            raise self.error(f"cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """The template's text. Raises RequestError (`invalid_template`) with its own message."""
        try:
            return self._render(messages, tools, template_kwargs or {}, add_generation_prompt)
        except _RENDER_ERRORS as error:
            raise RequestError("invalid_template", _describe(error), "messages") from None

    def probe(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str | None:
        """The text of a few short messages, or None when the template refuses them.

        Raises ModelFileError when even they take more than any template may use, or the template
        calls itself without end.
        """
        outcome = self.attempt(messages, add_generation_prompt=add_generation_prompt)
        return outcome if isinstance(outcome, str) else None

    def attempt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str | Refusal:
        """`probe` with the reason of a refusal."""
        try:
            return self._render(messages, (), {}, add_generation_prompt)
        except TemplateLimit as error:
            raise self.error(f"unusable: {error} for a short conversation") from None
        except RecursionError:
            raise self.error("unusable: a macro calls itself without end") from None
        except _RENDER_ERRORS as error:
            return Refusal(_text_of(error), _line_of(error, self._template))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        context = {
            **self._variables,
            **template_kwargs,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render_bounded(self._template, context, TemplateBudget(size_of(context)))

    def error(self, message: str, line: int | None = None) -> ModelFileError:
        """What is wrong with the template, named by its file and line."""
        places = [] if self.path.suffix == ".jinja" else ["chat_template"]
        places += [] if line is None else [f"line {line}"]
        return ModelFileError(self.path, " ".join(places) or None, message)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = BoundedSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.bound_filters()
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
    if isinstance(indent, int) and indent > MAX_JSON_INDENT:
        raise ValueError(f"tojson: an indent of {indent} is more than {MAX_JSON_INDENT}")
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


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the chat template nests too deeply for this conversation"
    text = _text_of(error)
    if isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.UndefinedError):
        return f"the chat template refuses this conversation: {text}"
    return f"the chat template fails on this conversation: {text}"


def _text_of(error: Exception) -> str:
    return printable(" ".join(str(error).split())) or type(error).__name__


def _line_of(error: Exception, template: jinja2.Template) -> int | None:
    """The line of `template` that failed: compiled code has lines of its own."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _SOURCE_NAME:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line
