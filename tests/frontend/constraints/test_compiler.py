"""Compiling: what is shared and kept, how much at once, and what takes too long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.chat import Constraint, ConstraintKind
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints import compiler as compiler_module
from ninfer.frontend.constraints.compiler import GrammarCompiler, GrammarSource
from ninfer.frontend.constraints.grammar import Grammar, build_grammar, lark_grammar
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE
from tests.helpers.grammar_rig import accepts, vocabulary


def source(text: str, build: Callable[[], Grammar] | None = None) -> GrammarSource:
    return GrammarSource((text,), "field", build or (lambda: lark_grammar(f'start: "{text}"')))


async def test_a_grammar_is_built_once_and_each_gets_a_place_of_its_own() -> None:
    compiler = GrammarCompiler(vocabulary())
    first, second = await asyncio.gather(*(compiler.compile(source("yes")) for _ in range(2)))
    third = await compiler.compile(source("yes"))
    assert compiler.num_builds == 1
    assert first.consume(vocabulary().encode("yes"))
    assert first.is_complete
    assert accepts(second, "yes")
    assert accepts(third, "yes")
    assert not accepts(await compiler.compile(source("no")), "yes")


async def test_at_most_two_are_built_at_once() -> None:
    compiler, lock = GrammarCompiler(vocabulary()), threading.Lock()
    running, most = 0, 0

    def build() -> Grammar:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return lark_grammar('start: "a"')

    await asyncio.gather(*(compiler.compile(source(str(i), build)) for i in range(8)))
    assert most == 2


async def test_who_gives_up_does_not_end_the_build_of_others() -> None:
    compiler, go_on = GrammarCompiler(vocabulary()), threading.Event()

    def build() -> Grammar:
        go_on.wait(10)
        return lark_grammar('start: "a"')

    first = asyncio.create_task(compiler.compile(source("x", build)))
    second = asyncio.create_task(compiler.compile(source("x", build)))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert accepts(await second, "a")
    assert first.cancelled()
    assert compiler.num_builds == 1


async def test_a_build_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "LONGEST_BUILD_S", 0.05)
    compiler, go_on = GrammarCompiler(vocabulary()), threading.Event()

    def build() -> Grammar:
        go_on.wait(10)
        return lark_grammar('start: "a"')

    with pytest.raises(RequestError) as caught:
        await compiler.compile(source("x", build))
    go_on.set()
    assert (caught.value.code, caught.value.param) == ("schema_too_complex", "field")


async def test_errors_are_everybody_s_own_and_not_kept() -> None:
    compiler = GrammarCompiler(vocabulary())
    bad = source("x", lambda: lark_grammar("start: nothing"))
    outcomes = await asyncio.gather(
        *(compiler.compile(bad) for _ in range(2)), return_exceptions=True
    )
    assert all(isinstance(outcome, RequestError) for outcome in outcomes)
    with pytest.raises(RequestError):
        await compiler.compile(bad)
    assert compiler.num_builds == 2


async def test_a_grammar_in_which_nothing_can_begin_is_refused() -> None:
    compiler = GrammarCompiler(vocabulary())
    endless = source("x", lambda: lark_grammar("start: a\na: a"))
    with pytest.raises(RequestError) as caught:
        await compiler.compile(endless)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "field")


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "KEPT_BYTES", 200_000)
    compiler = GrammarCompiler(vocabulary())
    for text in ("a", "b", "a", "c", "d"):
        await compiler.compile(source(text))
    assert compiler.num_builds == 4
    for text in ("a", "c", "d"):
        await compiler.compile(source(text))
    assert compiler.num_builds == 4
    await compiler.compile(source("b"))
    assert compiler.num_builds == 5


async def test_the_loop_is_free_while_a_large_grammar_is_built() -> None:
    compiler = GrammarCompiler(vocabulary())
    chain = "\n".join(f'r{i}: "{i}" | r{i + 1} "x"' for i in range(1200))
    grammar = Constraint("lark", f'start: r0\n{chain}\nr1200: "y"', "field")
    build = asyncio.create_task(
        compiler.compile(GrammarSource(("big",), "field", lambda: build_grammar(grammar)))
    )
    turns = 0
    while not build.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert accepts(build.result(), "0")
    assert turns > 3


@pytest.mark.parametrize(
    "inner", ["{}", '{{"type": "object", "properties": {{"p": {}}}, "required": ["p"]}}']
)
async def test_long_chains_of_references_do_not_end_the_process(inner: str) -> None:
    """The library recurses along them."""
    compiler = GrammarCompiler(vocabulary())
    names = [f'"a{i}": ' + inner.format(f'{{"$ref": "#/$defs/a{i + 1}"}}') for i in range(1900)]
    text = f'{{"$ref": "#/$defs/a0", "$defs": {{{", ".join(names)}, "a1900": {{}}}}}}'
    constraint = Constraint("json_schema", text, "field")
    start = await compiler.compile(
        GrammarSource((text,), "field", lambda: build_grammar(constraint))
    )
    assert start.accepts(vocabulary().encode("{"))


@pytest.mark.parametrize(
    ("kind", "text", "code", "cause"),
    [
        ("regex", ".*" * 200, "schema_too_complex", "too many"),
        ("lark", 'start: "x" T\nT: /a/ & /b/', "invalid_grammar", "no text keeps to it"),
        ("gbnf", "root ::= root", "invalid_grammar", "no text keeps to it"),
        (
            "json_schema",
            '{"type": "number", "exclusiveMinimum": 0, "maximum": 1e-60}',
            "invalid_json_schema",
            "no text keeps to it",
        ),
    ],
)
async def test_what_fails_behind_the_beginning_is_found_at_once(
    kind: ConstraintKind, text: str, code: str, cause: str
) -> None:
    wanted, compiler = Constraint(kind, text, "field"), GrammarCompiler(vocabulary())
    for _ in range(2):
        with pytest.raises(RequestError, match=cause) as caught:
            await compiler.compile(GrammarSource((text,), "field", lambda: build_grammar(wanted)))
        assert (caught.value.code, caught.value.param) == (code, "field")


HEAVY = 'start: T\nT: (/(?s:.{0,400})/ & ~(/(?s:.*)xyz(?s:.*)/)) "q"'
"""Behind "xy" the library counts to 400 to find out that no "z" may follow, and gives up."""


def heavy() -> GrammarSource:
    return GrammarSource(("heavy",), "field", lambda: lark_grammar(HEAVY))


async def test_a_grammar_that_failed_is_built_anew() -> None:
    compiler = GrammarCompiler(vocabulary())
    words: NDArray[np.uint32] = np.zeros(DEMO_VOCAB_SIZE // 32, np.uint32)
    for count in (1, 2):
        place, mate = await compiler.compile(heavy()), await compiler.compile(heavy())
        assert compiler.num_builds == count
        place.fill(words)
        assert words.any()
        assert place.consume(vocabulary().encode("axy"))
        place.fill(words)
        assert not words.any()
        assert place.is_failed
        assert mate.is_failed, "the library's lexer is one for all"
    assert not (await compiler.compile(heavy())).is_failed


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{100000}"),
        ("regex", "(ab){40000}c"),
        ("lark", 'start: "a" start'),
        ("gbnf", 'root ::= "a" root'),
        ("lark", 'start: "a" next\nnext: "b" start'),
        ("lark", 'start: "a" "b" next\nnext: "c" other\nother: "d" next'),
    ],
)
async def test_texts_that_are_forced_too_far_are_refused(kind: ConstraintKind, text: str) -> None:
    compiler = GrammarCompiler(vocabulary())
    constraint = Constraint(kind, text, "guided_grammar", True)
    with pytest.raises(RequestError) as caught:
        await compiler.compile(
            GrammarSource((text,), "guided_grammar", lambda: build_grammar(constraint))
        )
    assert (caught.value.code, caught.value.param) == ("schema_too_complex", "guided_grammar")


@pytest.mark.parametrize("text", ["a{30000}", "(a?){500}a{500}", "x|(ab){10000}", "ab" * 16_000])
async def test_long_texts_may_be_forced(text: str) -> None:
    compiler = GrammarCompiler(vocabulary())
    constraint = Constraint("regex", text, "guided_regex", True)
    source = GrammarSource((text,), "guided_regex", lambda: build_grammar(constraint))
    assert not (await compiler.compile(source)).is_failed
