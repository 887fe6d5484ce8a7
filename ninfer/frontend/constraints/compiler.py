"""GrammarCompiler: grammars of requests, built in threads, kept, and shared while they are built.

compile -> kept?  -> a matcher of its own
        -> being built by somebody? -> wait for it
        -> one of two threads, at most 10 s
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.grammar import Grammar
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.constraints.trial import fault_of
from ninfer.frontend.constraints.vocabulary import GrammarVocabulary

MAX_BUILDS_AT_ONCE: Final = 2
LONGEST_BUILD_S: float = 10.0
KEPT_BYTES: int = 64 << 20
_STACK_BYTES: Final = 256 << 20
"""Of address space: the library recurses along rules and references, and where its stack ends the
process does. The bounds of grammars keep it well within."""
_BASE_BYTES: Final = 64 << 10
_BYTES_A_CHARACTER: Final = 64
"""About what a compiled grammar takes."""
LIBRARY_LIMITS: Final = LLParserLimits(
    max_items_in_row=20_000,
    initial_lexer_fuel=5_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""A step takes a few milliseconds at most."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What is to be compiled.

    key      says all that the grammar and its errors follow from; equal keys share it
    param    the field it came in, for errors
    build    makes the grammar; runs in a thread, raises RequestError
    """

    key: tuple[str, ...]
    param: str
    build: Callable[[], Grammar]

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.key))


class GrammarCompiler:
    """For one model. `compile` from one loop at a time."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(MAX_BUILDS_AT_ONCE, thread_name_prefix="grammar")
        self._kept: OrderedDict[tuple[str, ...], Matcher] = OrderedDict()
        self._kept_bytes = 0
        self._building: dict[tuple[str, ...], asyncio.Task[Matcher]] = {}
        self.num_builds = 0

    async def compile(self, source: GrammarSource) -> Matcher:
        """A matcher at the grammar's beginning. Raises RequestError: what `source.build` raises,
        `schema_too_complex` when it takes too long or too much, `invalid_grammar` and
        `invalid_json_schema` for what the library does not understand."""
        kept = self._kept.get(source.key)
        if kept is not None and kept.is_failed:
            self._drop(source.key)
            kept = None
        if kept is None:
            kept = await self._wait_for(self._build_of(source), source)
        else:
            self._kept.move_to_end(source.key)
        return kept.copy()

    def _build_of(self, source: GrammarSource) -> asyncio.Task[Matcher]:
        task = self._building.get(source.key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.create_task(self._build(source), name="grammar-build")
            self._building[source.key] = task
            task.add_done_callback(lambda done: self._forget(source.key, done))
        return task

    async def _build(self, source: GrammarSource) -> Matcher:
        loop = asyncio.get_running_loop()
        self.num_builds += 1
        # A pool starts its threads when it is given work; they keep the stack they start with.
        previous = threading.stack_size(_STACK_BYTES)
        try:
            build = loop.run_in_executor(self._threads, self._built, source)
        finally:
            threading.stack_size(previous)
        built = await build
        self._keep(source, built)
        return built

    async def _wait_for(self, task: asyncio.Task[Matcher], source: GrammarSource) -> Matcher:
        done, _ = await asyncio.wait((task,), timeout=LONGEST_BUILD_S)
        if not done:
            raise RequestError(
                "schema_too_complex",
                f"'{source.param}' takes more than {LONGEST_BUILD_S:g} s to compile.",
                source.param,
            )
        return task.result()

    def _built(self, source: GrammarSource) -> Matcher:
        """In a thread; the library lets others run meanwhile."""
        grammar = source.build()
        matcher = LLMatcher(
            self.vocabulary.tokens(),
            grammar.text,
            log_level=0,
            limits=LIBRARY_LIMITS,
        )
        if matcher.is_error():
            raise grammar.error(source.param, matcher.get_error())
        start = Matcher(matcher, self.vocabulary.vocab_size)
        self._check_start(grammar, start, source.param)
        return start

    def _check_start(self, grammar: Grammar, start: Matcher, param: str) -> None:
        """Some answer begins. The first mask takes longest; copies know what it found out."""
        words: NDArray[np.uint32] = np.zeros(-(-self.vocabulary.vocab_size // 32), np.uint32)
        start.fill(words)
        if start.is_failed:
            raise grammar.error(param, start.complaint)
        if not words.any() and not start.is_accepting:
            raise grammar.error(param, "no token can begin an answer")
        fault = fault_of(start, self.vocabulary.vocab_size)
        if fault is not None:
            raise grammar.error(param, fault)

    def _keep(self, source: GrammarSource, built: Matcher) -> None:
        self._kept[source.key] = built
        self._kept_bytes += _size(source.key)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, ...]) -> None:
        del self._kept[key]
        self._kept_bytes -= _size(key)

    def _forget(self, key: tuple[str, ...], task: asyncio.Task[Matcher]) -> None:
        if self._building.get(key) is task:
            del self._building[key]
        if not task.cancelled():
            task.exception()


def _size(key: tuple[str, ...]) -> int:
    return _BASE_BYTES + _BYTES_A_CHARACTER * sum(map(len, key))
