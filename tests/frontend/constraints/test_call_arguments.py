"""Random walks through the grammars of calls, read as answers are: every call has arguments of its
schema, and no mark-up is left in the content."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.chat import ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.call_grammar import CallGrammars
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.tool_calls.call_format import CallFormat, JsonCallFormat, XmlCallFormat
from tests.helpers.call_output import call_rules, cut_every, run_answer
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE
from tests.helpers.grammar_rig import accepts, matcher_of, vocabulary, walk
from tests.helpers.random_schemas import Schema, random_schema

XML = XmlCallFormat()
CLOSE = "\n</parameter>\n</function>\n</tool_call>"
BAIT = ("</parameter>", "\n", "</function>", "</tool_call>", "<parameter=a>", "Oslo", " ", "5", '"')
NULL_OR: Schema = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


def closed(**properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def start_of(schema: Any, form: CallFormat = XML, *, is_strict: bool = True) -> Matcher:
    tool = ToolSpec("f", schema, is_strict=is_strict)
    grammars = CallGrammars(form, vocabulary())
    return matcher_of(grammars.calls([tool], "tools", several=False))


def call(value: str, name: str = "k") -> str:
    return f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}{CLOSE}"


def takes(schema: Any, value: str) -> bool:
    return accepts(start_of(closed(k=schema)), call(value))


def check_answer(schema: Any, text: str) -> Any:
    answer = run_answer(cut_every(text, 7), call_rules({"f": schema}))
    assert answer.text().strip() == "", text
    ((name, arguments),) = answer.calls
    assert name == "f"
    jsonschema.Draft202012Validator(schema).validate(arguments)
    return arguments


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "string", "minLength": 5},
            ["Oslo!", "a</parameter>b", "<b>\n</a>"],
            ["Oslo", f"a{CLOSE}", "abcdef\n</parameter>\n", "abcde</parameter> </function>"],
        ),
        ({"type": "string", "maxLength": 3}, ["", "abc", "\n"], ["abcd"]),
        ({"type": "string", "pattern": "^a/b+$"}, ["a/bb"], ["a/", "xa/b", "a/b "]),
        ({"type": "string", "pattern": "b|^c$"}, ["abc", "c"], ["cc", ""]),
        ({"type": "string", "pattern": "^[ab$]{2}", "maxLength": 3}, ["ab", "$bx"], ["abcd", "b"]),
        ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256", "x"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29"]),
        (NULL_OR, ["5", "null"], ["Oslo", "5.5", ""]),
        ({"type": ["string", "null"], "enum": ["q", None]}, ["q", "null"], ["Oslo", "None"]),
        ({"type": ["string", "null"]}, ["x", "", "null", "nul"], ["None", " null "]),
        ({"type": ["string", "integer"]}, ["x5", "5", "-"], ["5.5", "1e3"]),
        ({"type": ["string", "integer"], "enum": ["5", "x"]}, ["5", "x"], ["6"]),
        (
            {"type": ["string", "array"], "items": {"type": "integer"}},
            ["x", "[1, 2]"],
            ['["a"]', " [1.5]"],
        ),
        ({"type": "number"}, ["5", "-2.5e-3", "6.02e23"], ["1e400", "x"]),
        (
            {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "null"}}]},
            ["2.5", "[null]"],
            ["[1]", "x"],
        ),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, ["ab"], ["a"]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": "long"}]}, ["a", "long"], ["ab"]),
        ({}, ["x", "5", '{"a"'], ["a</parameter></function>"]),
    ],
)
def test_values(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(schema, text)] == []
    assert [text for text in bad if takes(schema, text)] == []
    for text in good:
        check_answer(closed(k=schema), call(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": closed(k={"type": "string"})}},
        {"allOf": [closed(k={"type": "string"})]},
        {"anyOf": [closed(k={"type": "string"}), closed(n={"type": "integer"})]},
        {"type": "object", "properties": {"k": {"type": "string"}}, "minProperties": 1},
        {"type": "object", "required": ["k"]},
    ],
    ids=["ref", "allOf", "anyOf", "minProperties", "undeclared"],
)
def test_what_the_root_demands_is_there(schema: Any) -> None:
    start = start_of(schema)
    assert not accepts(start, "<tool_call>\n<function=f>\n</function>\n</tool_call>")
    assert accepts(start, call("Oslo"))
    check_answer(schema, call("Oslo"))


def test_a_string_of_a_combined_root_stays_one() -> None:
    schema = {"anyOf": [closed(k={"type": "string"}), closed(n={"type": "integer"})]}
    assert accepts(start_of(schema), call("5"))
    assert check_answer(schema, call("5")) == {"k": "5"}


def test_parameters_are_counted() -> None:
    names = [f"p{index}" for index in range(4)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": ["p1"],
        "minProperties": 2,
        "maxProperties": 3,
        "additionalProperties": False,
    }
    start = start_of(schema)

    def text(*chosen: str) -> str:
        parts = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in chosen)
        return f"<tool_call>\n<function=f>\n{parts}</function>\n</tool_call>"

    for good in (["p0", "p1"], ["p1", "p3"], ["p0", "p1", "p2"]):
        assert accepts(start, text(*good))
    for bad in (["p1"], ["p0", "p2"], names):
        assert not accepts(start, text(*bad))


def test_one_of_very_many_parameters_is_demanded() -> None:
    properties = {f"p{index}": {"type": "integer"} for index in range(300)}
    schema = {"type": "object", "properties": properties, "minProperties": 1}
    start = start_of(schema)
    assert accepts(start, call("1", "p0"))
    assert accepts(start, call("1", "p299"))
    assert not accepts(start, "<tool_call>\n<function=f>\n</function>\n</tool_call>")


def test_schemas_that_refer_to_themselves() -> None:
    node = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/n"}]}
    start = start_of({**closed(k={"$ref": "#/$defs/n"}), "$defs": {"n": node}})
    assert accepts(start, call("5"))
    assert not accepts(start, call("Oslo"))


def test_combinations_that_double_at_every_level_are_refused() -> None:
    levels = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    for last in ({"$ref": "#/$defs/a0"}, {"type": "string", "minLength": 2}):
        schema = {**closed(k={"$ref": "#/$defs/a0"}), "$defs": {**levels, "a40": last}}
        with pytest.raises(RequestError) as caught:
            start_of(schema)
        assert caught.value.code == "invalid_json_schema"


@pytest.mark.parametrize("name", ["a>b", "a<b", "a\nb", "", " a", "x" * 257])
@pytest.mark.parametrize("is_strict", [True, False])
def test_names_that_cannot_be_written_are_refused(name: str, *, is_strict: bool) -> None:
    with pytest.raises(RequestError) as caught:
        start_of(closed(**{name: {"type": "integer"}}), is_strict=is_strict)
    error = caught.value
    assert (error.code, error.param) == ("invalid_json_schema", f"tools.f.properties.{name}")
    start_of(closed(**{name: {"type": "integer"}}), JsonCallFormat())


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array"}, "tools.f.type"),
        (closed(k={"type": "string", "pattern": "a^b"}), "tools.f.properties.k.pattern"),
        (closed(k={"type": "string", "minLength": 3, "maxLength": 2}), "tools.f"),
        (closed(k={"type": "string", "minLength": 1, "pattern": "^$"}), "tools.f"),
        (closed(k={"type": "object", "minProperties": 2}), "tools.f.properties.k.minProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "tools.f.propertyNames"),
        (closed(k={"type": "string", "pattern": "(?=a)b"}), "tools.f.properties.k.pattern"),
        (closed(k={"type": "string", "pattern": "[" * 30_000}), "tools.f.properties.k.pattern"),
        (closed(k={"type": ["string", "integer"], "minimum": 5}), "tools.f.properties.k"),
        (closed(k={"enum": [f"x{CLOSE}"]}), "tools.f.properties.k"),
        ({"patternProperties": {"^a": {"type": "integer"}}}, "tools.f.patternProperties"),
        (
            {"type": "object", "minProperties": 1, "additionalProperties": False},
            "tools.f",
        ),
        ({"required": ["k"], "additionalProperties": False}, "tools.f"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        start_of(schema)
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", place)


@pytest.mark.parametrize("form", [XML, JsonCallFormat()], ids=["xml", "json"])
def test_places_are_those_of_the_request(form: CallFormat) -> None:
    path, schema = (
        "tools[0].function.parameters",
        closed(k={"type": "integer", "not": {"enum": [1]}}),
    )
    tool = ToolSpec("f", schema, is_strict=True, path=path)
    with pytest.raises(RequestError) as caught:
        CallGrammars(form, vocabulary()).calls([tool], "tools", several=False)
    assert caught.value.param == f"{path}.properties.k.not"


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"multipleOf": 99_991}, "multipleOf"),
    ],
)
def test_what_has_no_grammar_anywhere_is_refused_for_other_tools_too(schema: Any, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        start_of(closed(k={**schema, "type": schema.get("type", "integer")}), is_strict=False)
    assert caught.value.param == f"tools.f.properties.k.{key}"


def test_other_tools_are_held_to_what_can_be() -> None:
    for schema in ({"type": "string", "pattern": "a^b"}, {"type": ["string", "integer"]}):
        start = start_of(closed(k=schema), is_strict=False)
        assert accepts(start, call("Oslo"))
        assert not accepts(start, call(f"a{CLOSE}"))


def test_marks_inside_strings_of_json_do_not_end_a_value() -> None:
    schema = closed(k={"type": "array", "items": {"type": "string"}})
    text = call('["a</parameter></function>", "b"]')
    assert accepts(start_of(schema), text)
    assert check_answer(schema, text) == {"k": ["a</parameter></function>", "b"]}
    broken = call('["a').replace("\n</parameter>", "</parameter>")
    answer = run_answer([broken], call_rules({"f": schema}))
    assert answer.calls == [("f", {"k": '["a'})]


@pytest.mark.no_cover
@pytest.mark.parametrize("form", [XML, JsonCallFormat()], ids=["xml", "json"])
@pytest.mark.parametrize("part", range(4))
def test_random_calls_are_read_as_valid_arguments(form: CallFormat, part: int) -> None:
    num_whole = 0
    for seed in range(part, 44, 4):
        rng = random.Random(seed)
        schema = _tool_schema(rng)
        try:
            start = start_of(schema, form)
        except RequestError as error:
            assert "cannot be enforced" in str(error)  # noqa: PT017
            continue
        for _ in range(2):
            answer = walk(start, rng, patience=20, closing="\n</parameter>\n")
            if answer.is_whole:
                num_whole += 1
                check_answer(schema, answer.text)
    assert num_whole > 15


def _tool_schema(rng: random.Random) -> Schema:
    names = rng.sample(["alpha", "beta", "x y"], rng.randint(1, 3))
    schema = closed(**{name: rng.choice(_MAKERS)(rng) for name in names})
    schema["required"] = [name for name in names if rng.random() < 0.6]
    kind = rng.randrange(5)
    if kind == 0:
        return {"$defs": {"a": schema}, "$ref": "#/$defs/a"}
    if kind == 1:
        return {"anyOf": [schema, closed(other={"type": "string", "minLength": 2})]}
    return {**schema, "minProperties": 1} if kind == 2 else schema


def _nullable_text(rng: random.Random) -> Schema:
    return {"type": rng.sample(["string", "null", "boolean", "integer"], 2)}


def _either(rng: random.Random) -> Schema:
    return {"anyOf": [random_schema(rng, 1), random_schema(rng, 1)]}


_MAKERS: tuple[Callable[[random.Random], Schema], ...] = (
    lambda rng: random_schema(rng, 2),
    lambda rng: {"type": "string", "minLength": rng.randrange(30)},
    lambda _: {},
    _nullable_text,
    _either,
)


@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "minLength": 3}, {"type": ["string", "null"]}, {}, {"maxLength": 40}],
)
def test_text_full_of_marks_is_read_back(schema: Any) -> None:
    start, rng, num_taken = start_of(closed(k=schema)), random.Random(3), 0
    for _ in range(60):
        value = "".join(rng.choices(BAIT, k=rng.randrange(1, 6)))
        if accepts(start, call(value)):
            num_taken += 1
            check_answer(closed(k=schema), call(value))
    assert num_taken > 5


@pytest.mark.parametrize("value", ["1e400", "-1e999", "1" * 60, "0." + "1" * 60])
def test_numbers_of_calls_are_what_readers_hold(value: str) -> None:
    lists = {"type": "array", "items": {"type": "number"}}
    anything = {"type": "object"}
    assert takes(lists, "[1e40, -2.5]")
    assert not takes(lists, f"[{value}]")
    assert not takes(anything, f'{{"a": [{value}]}}')
    start = start_of(closed(k=lists), JsonCallFormat())
    whole = '<tool_call>\n{"name": "f", "arguments": {"k": [%s]}}\n</tool_call>'
    assert accepts(start, whole % "1e40")
    assert not accepts(start, whole % value)


def test_a_member_may_refer_to_the_parameters_themselves() -> None:
    tree = closed(k={"type": "array", "items": {"$ref": "#"}})
    start = start_of(tree)
    assert accepts(start, call('[{"k": [{"k": []}]}]'))
    assert not accepts(start, call('[{"k": [[]]}]'))


@pytest.mark.parametrize("kind", ["string", ["string", "null"], ["string", "integer", "object"]])
@pytest.mark.parametrize(
    "lengths",
    [(0, 0), (0, 1), (0, 9), (0, 36), (0, 40), (0, 100), (0, 5000), (7, None), (10, 200),
     (100, None), (1000, 5000), (5000, 5000), (5000, None)],
)  # fmt: skip
def test_texts_of_any_length_can_be_written(kind: Any, lengths: tuple[int, int | None]) -> None:
    least, most = lengths
    schema: Schema = {"type": kind, "minLength": least}
    if most is not None:
        schema["maxLength"] = most
    start = start_of(closed(k=schema))
    longest = least + 50 if most is None else most
    lure = "\n</parameter\n</parameter>"
    for length in {least, longest}:
        text = (lure[:-1] * length)[:length].rstrip("\n") + "x" * length
        assert accepts(start, call(text[:length]))
    for length in {least - 1, longest + (most is not None)} - {-1, least, longest}:
        assert not accepts(start, call("x" * length))


@pytest.mark.parametrize("lengths", [{"maxLength": 100}, {"minLength": 10, "maxLength": 5000}])
def test_what_looks_like_the_end_of_a_text_costs_no_more_steps(lengths: Schema) -> None:
    """Every mask can be filled on the way."""
    matcher = start_of(closed(k={"type": "string", **lengths}))
    words: NDArray[np.uint32] = np.zeros(DEMO_VOCAB_SIZE // 32, np.uint32)
    for token_id in vocabulary().encode(call("Paris\n</parameter\n</parameter <parameter=a")):
        matcher.fill(words)
        assert not matcher.is_failed
        assert matcher.consume([token_id])
    assert matcher.is_complete
