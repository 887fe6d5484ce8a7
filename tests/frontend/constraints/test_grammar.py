"""Grammars of all kinds but schemas: what they accept, and errors that name the field."""

from __future__ import annotations

import json

import pytest

from ninfer.contract.chat import ConstraintKind
from ninfer.contract.errors import RequestError
from tests.helpers.grammar_rig import PARAM, accepts, matcher, refusal

ARITHMETIC = r"""
root ::= term ("+" term)*  # a sum
term ::= digit{1,3} | "(" root ")"
digit ::= [0-9]
"""
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ["{}", '{"a":[1]}'], ["[]", "1", ""]),
        ("regex", "[0-9]{2,3}", ["12", "123"], ["1", "1234", "a"]),
        ("regex", "^a/b|c\\d$", ["a/b", "c1"], ["a", "c"]),
        ("choice", json.dumps(["yes", "no!", 'a"b\n', "\\d"]), ["yes", 'a"b\n', "\\d"], ["y", "1"]),
        ("lark", 'start: "a" b*\nb: /[xy]/', ["a", "axy"], ["b"]),
        ("lark", 'start: "%json" %json {"type": "null"}', ["%jsonnull"], ["null"]),
        ("lark", 'start: %json {"items": {"$ref": "#"}, "type": "array"}', ["[[]]"], ["[1]"]),
        ("gbnf", ARITHMETIC, ["1", "12+(3+4)", "(((1)))"], ["1+", "(1", "1234"]),
        ("gbnf", JSON_GBNF, ['{"a": [1, 2.5e1, "xé\\n"]}', "{}"], ['{"a":tru}', "1"]),
        ("gbnf", 'root ::= "ab" "c" | [a-z] [a-z] "d"', ["abc", "abd", "xyd"], ["xyc", "ab"]),
        ("gbnf", 'root ::= [^"a-c\\n]+ | "\\x41\\u00e9"', ["xyz", "Aé"], ["xa", 'x"', "x\n"]),
        ("gbnf", 'root ::= "a"? [-x]{2,} "" .', ["a--b", "xx\n"], ["a-", "b"]),
        ("gbnf", 'root ::= root "a" | "b"', ["b", "baa"], ["a"]),
        (
            "choice",
            json.dumps(["a\x01b", "\x1f", "\x0b", "\x7f", "é\u2028😀"]),
            ["a\x01b", "\x1f", "\x0b", "\x7f", "é\u2028😀"],
            ["ab", "a\\u0001b"],
        ),
        ("gbnf", 'root ::= "a\x7f\x01"', ["a\x7f\x01"], ["a"]),
        ("json_schema", '{"enum": ["a\x7fb", "\\u0001"]}', ['"a\x7fb"', '"\\u0001"'], ['"ab"']),
        ("json_schema", '{"required": ["a\x7f"], "type": "object"}', ['{"a\x7f":1}'], ['{"a":1}']),
        ("json_schema", '{"const": "\\ud800x"}', ['"\ufffdx"'], ['"x"']),
    ],
)
def test_languages(kind: ConstraintKind, text: str, good: list[str], bad: list[str]) -> None:
    start = matcher(kind, text)
    assert [item for item in good if not accepts(start, item)] == []
    assert [item for item in bad if accepts(start, item)] == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "["),
        ("regex", "(?=a)b"),
        ("regex", "(a)\\1"),
        ("choice", "[]"),
        ("choice", "[1]"),
        ("lark", "start: nothing"),
        ("lark", 'begin: "a"'),
        ("lark", 'start: %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("gbnf", "root ::= undefined_rule"),
        ("gbnf", 'start ::= "a"'),
        ("gbnf", 'root ::= "a'),
        ("gbnf", 'root ::= "a" )'),
        ("gbnf", 'root ::= ( "a"'),
        ("gbnf", "root ::= *"),
        ("gbnf", "root ::= []"),
        ("gbnf", 'root ::= "a"{1,99999999}'),
        ("gbnf", 'root ::= "\\U99999999"'),
        ("gbnf", 'root ::= "a"\nroot ::= "b"'),
        ("gbnf", '"a"'),
        ("gbnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    ],
)
def test_bad_grammars(kind: ConstraintKind, text: str) -> None:
    assert refusal(kind, text) == ("invalid_grammar", PARAM)


@pytest.mark.parametrize("kind", ["regex", "lark", "gbnf", "choice", "json_schema"])
def test_size_is_bounded(kind: ConstraintKind) -> None:
    assert refusal(kind, "x" * 600_000) == ("schema_too_complex", PARAM)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[ab]?" * 6000),
        ("lark", "start: a" + "\nb: a" * 4500),
        ("choice", json.dumps(["a" * 9000])),
    ],
)
def test_amounts_are_bounded(kind: ConstraintKind, text: str) -> None:
    assert refusal(kind, text) == ("schema_too_complex", PARAM)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?=a)b"),
        ("lark", "start: /(?=a)b/"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}'),
    ],
)
def test_what_is_wrong_with_a_regular_expression_is_said(kind: ConstraintKind, text: str) -> None:
    with pytest.raises(RequestError, match="look-around"):
        matcher(kind, text)


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="b"', "stop=/b/", "capture,stop=B"])
def test_attributes_that_are_not_supported_are_refused(attribute: str) -> None:
    grammar = f'start: t "c"\nt[{attribute}]: /[a-b]*/ "[capture]"\nB: "b"'
    assert refusal("lark", grammar) == ("invalid_grammar", PARAM)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: t "c"\nt[suffix="b"]: /[a-z]*/', "xbc"),
        ('start: "[stop=1]" // [stop=2]', "[stop=1]"),
        ("start: /[max_tokens=]+/ # [stop=2]", "=max=tens="),
    ],
)
def test_what_only_looks_like_an_attribute_is_text(grammar: str, text: str) -> None:
    assert accepts(matcher("lark", grammar), text)
