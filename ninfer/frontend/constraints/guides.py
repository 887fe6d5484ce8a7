"""Guides: what a request asks for -> the Guide of its answer, or none.

constraint                    a grammar for the answer
tools, choice required        a grammar for calls
constraint and tools          the answer or calls
tools, some of them strict    a grammar behind the mark that begins a call
thinking budget               closes the thought
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ninfer.contract.chat import Constraint, GenerationParams, ToolRules, ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.contract.prompt import PreparedPrompt
from ninfer.frontend.constraints.call_grammar import CallGrammars
from ninfer.frontend.constraints.compiler import GrammarCompiler, GrammarSource
from ninfer.frontend.constraints.grammar import build_grammar
from ninfer.frontend.constraints.guide import Guide, GuideRules
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.constraints.vocabulary import GrammarVocabulary
from ninfer.frontend.tokenizer import THINK_CLOSE, TextTokenizer
from ninfer.frontend.tool_calls.call_format import CALL_OPEN, CallFormat

CLOSING_TEXT: Final = (
    f"\n\nMy time for thinking is over, so I answer with what I have now.\n{THINK_CLOSE}\n\n"
)
"""Ends a thought whose budget is used up."""
BARE_CLOSING: Final = f"{THINK_CLOSE}\n\n"
"""The same without words, where none are to come or none have room."""
_LEAD: Final = "\n\n"
_TOOLS_PARAM: Final = "tools"


class Guides:
    """For one model; without a tokenizer nothing can be guided."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        form: CallFormat,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        if tokenizer is not None:
            vocabulary = GrammarVocabulary(tokenizer, vocab_size)
            self._compiler = GrammarCompiler(vocabulary)
            self._calls = CallGrammars(form, vocabulary)
            self._closing = tuple(tokenizer.encode(CLOSING_TEXT))
            self._bare_closing = tuple(tokenizer.encode(BARE_CLOSING))
            self._lead = tuple(tokenizer.encode(_LEAD))
            self._trigger = tokenizer.added_id(CALL_OPEN)

    def guide(
        self,
        prompt: PreparedPrompt,
        params: GenerationParams,
        *,
        end_ids: frozenset[int],
        budget: int | None,
        max_output: int,
    ) -> Guide | None:
        """None when any token may come. `budget`: most tokens of thought; `max_output`: of the
        answer with its thought. Raises RequestError."""
        source, is_triggered = self._source(params)
        tokenizer = self._tokenizer
        if tokenizer is None:
            if source is not None:
                raise RequestError(
                    "tokenizer_unavailable",
                    "a constraint needs the model's tokenizer, and it has none",
                    source.param,
                )
            return None
        if not params.split_reasoning:
            budget = None
        if source is None and budget is None:
            return None
        budget, closing = self._usable_budget(budget, max_output)
        rules = GuideRules(
            token_bytes=tokenizer.token_bytes,
            encode=lambda text: tuple(tokenizer.encode_plain(text)),
            end_ids=end_ids,
            mute_ids=self._eos_ids - end_ids,
            min_tokens=params.min_tokens,
            budget=budget,
            closing=closing,
            lead=self._lead,
            trigger=self._trigger if is_triggered else None,
            param=None if source is None else source.param,
        )
        is_thinking = params.split_reasoning and prompt.opens_in_reasoning
        return Guide(rules, self._compile(source), is_thinking=is_thinking)

    def banned_ids(self, tools: ToolRules | None) -> tuple[int, ...]:
        """Tokens that may not come at all: the mark that begins a call, where none is allowed."""
        if self._tokenizer is None or tools is None or tools.choice != "none":
            return ()
        return () if self._trigger is None else (self._trigger,)

    def _compile(self, source: GrammarSource | None) -> Callable[[], Awaitable[Matcher]] | None:
        if source is None:
            return None
        compiler = self._compiler
        return lambda: compiler.compile(source)

    def _usable_budget(
        self, wanted: int | None, max_output: int
    ) -> tuple[int | None, tuple[int, ...]]:
        """A budget that is no more, and what closes the thought: behind it there is room for a
        token of answer, where that can be."""
        bare = self._bare_closing
        if wanted is None or wanted == 0 or wanted >= max_output:
            return wanted, bare
        words_fit = max_output > len(self._closing) + 1
        closing = self._closing if words_fit else bare
        return max(0, min(wanted, max_output - len(closing) - 1)), closing

    def _source(self, params: GenerationParams) -> tuple[GrammarSource | None, bool]:
        """The grammar, and whether it holds behind the mark of a call alone."""
        constraint, tools = params.constraint, params.tools
        usable = _usable_tools(tools)
        if tools is None or tools.choice == "none" or not usable:
            return (None if constraint is None else _answer_source(constraint)), False
        if tools.choice == "required":
            if constraint is not None:
                raise RequestError(
                    "invalid_value",
                    f"'{constraint.param}' excludes a tool_choice that demands a call.",
                    constraint.param,
                )
            return self._calls_source(usable, tools.parallel, None), False
        if constraint is not None:
            return self._calls_source(usable, tools.parallel, constraint), False
        if not any(tool.is_strict for tool in usable):
            return None, False
        if self._tokenizer is not None and self._trigger is None:
            raise RequestError(
                "unsupported_value",
                "strict tools need a tokenizer with a token that begins a call",
                _TOOLS_PARAM,
            )
        return self._body_source(usable), True

    def _calls_source(
        self, tools: tuple[ToolSpec, ...], several: bool, constraint: Constraint | None
    ) -> GrammarSource:
        answer_key: tuple[str, ...] = ()
        if constraint is not None:
            answer_key = _answer_source(constraint).key
        key = ("calls", str(several), _tools_key(tools), *answer_key)
        return GrammarSource(
            key,
            _TOOLS_PARAM if constraint is None else constraint.param,
            lambda: self._calls.calls(
                tools,
                _TOOLS_PARAM,
                several=several,
                answer=None if constraint is None else build_grammar(constraint),
            ),
        )

    def _body_source(self, tools: tuple[ToolSpec, ...]) -> GrammarSource:
        return GrammarSource(
            ("body", _tools_key(tools)),
            _TOOLS_PARAM,
            lambda: self._calls.body(tools, _TOOLS_PARAM),
        )


def _answer_source(constraint: Constraint) -> GrammarSource:
    key = (constraint.kind, constraint.text, str(constraint.is_strict), constraint.param)
    return GrammarSource(key, constraint.param, lambda: build_grammar(constraint))


def _usable_tools(tools: ToolRules | None) -> tuple[ToolSpec, ...]:
    if tools is None:
        return ()
    return tuple(
        tool for tool in tools.tools if tools.allowed is None or tool.name in tools.allowed
    )


def _tools_key(tools: tuple[ToolSpec, ...]) -> str:
    return json.dumps([[tool.name, tool.parameters, tool.is_strict, tool.path] for tool in tools])
