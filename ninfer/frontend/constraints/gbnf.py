"""GBNF, llama.cpp's grammar notation, -> the Lark dialect of the grammar library.

    rule     ::=  alternatives     alternatives: sequences, separated by |
    items         "literal"  [class]  .  rule-name  ( alternatives )
    repeats       *  +  ?  {m}  {m,}  {m,n}

The start rule is `root`. A grammar without recursion becomes one regular expression. In any other
every character is a lexeme of its own, which is slower: longer ones would be matched greedily, and
`"ab" "c" | [a-z] [a-z] "d"` would not know `abd`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ninfer.frontend.constraints.vocabulary import quoted

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\n]*)+)
    |(?P<define>(?P<defined>[A-Za-z0-9_-]+)[ \t]*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\]|\\.)*")
    |(?P<chars>\[(?:[^\]\\]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*\d+[ ]*(?:,[ ]*\d*[ ]*)?\})
    |(?P<mark>[|().])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_SIMPLE: Final = {"n": "\n", "r": "\r", "t": "\t"}
MAX_REPEATS: Final = 10_000


class GbnfError(ValueError):
    """The text is no GBNF grammar; the message says where."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def to_lark(text: str) -> str:
    """Raises GbnfError."""
    rules = _Parser(_tokens(text)).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule 'root'")
    letter = "r" if _is_recursive(rules) else "R"
    names = {name: f"{letter}{index}" for index, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, body in rules.items():
        parts = []
        for token in body:
            if token.kind == "name" and token.text not in names:
                raise GbnfError(f"line {token.line}: rule '{token.text}' is not defined")
            parts.append(names[token.text] if token.kind == "name" else token.text)
        lines.append(f"{names[name]}: {' '.join(parts)}")
    return "\n".join(lines) + "\n"


def _is_recursive(rules: dict[str, list[_Token]]) -> bool:
    """Whether some rule leads to itself; rules without others are taken away until none is left."""
    needs = {
        name: {token.text for token in body if token.kind == "name"} & rules.keys()
        for name, body in rules.items()
    }
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in needs.items():
        for other in others:
            users[other].append(name)
    ready = [name for name, others in needs.items() if not others]
    num_done = 0
    while ready:
        num_done += 1
        done = ready.pop()
        for user in users[done]:
            needs[user].discard(done)
            if not needs[user]:
                ready.append(user)
    return num_done < len(rules)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    place, line = 0, 1
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or match.end() == place:
            raise GbnfError(f"line {line}: {text[place : place + 10]!r} is not understood")
        kind = match.lastgroup or "space"
        if match.group("define") is not None:
            tokens.append(_Token("define", match.group("defined"), line))
        elif kind != "space":
            tokens.append(_Token(kind, match.group(), line))
        line += match.group().count("\n")
        place = match.end()
    return tokens


class _Parser:
    """Recursive descent is not needed: only groups nest, and they are counted."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens

    def rules(self) -> dict[str, list[_Token]]:
        rules: dict[str, list[_Token]] = {}
        body: list[_Token] | None = None
        for token in self._tokens:
            if token.kind == "define":
                if token.text in rules:
                    raise GbnfError(f"line {token.line}: rule '{token.text}' is defined twice")
                body = rules[token.text] = []
            elif body is None:
                raise GbnfError(f"line {token.line}: a rule begins with 'name ::='")
            else:
                body.append(_translated(token))
        for name, items in rules.items():
            _check_body(name, items)
        return rules


def _check_body(name: str, items: list[_Token]) -> None:
    """Groups close, and a repeat has something before it."""
    depth, before = 0, "mark"
    for token in items:
        if token.kind == "repeat" and before in ("mark", "repeat"):
            raise GbnfError(f"line {token.line}: {token.text} repeats nothing")
        if token.text == "(":
            depth += 1
        elif token.text == ")":
            depth -= 1
        if depth < 0:
            raise GbnfError(f"line {token.line}: ) closes nothing")
        before = "item" if token.text == ")" else token.kind
    if depth:
        raise GbnfError(f"rule '{name}': ( is not closed")


def _translated(token: _Token) -> _Token:
    if token.kind == "literal":
        text = _unescaped(token.text[1:-1], token.line)
        characters = list(map(quoted, text)) or ['""']
        return _Token("item", f"({' '.join(characters)})", token.line)
    if token.kind == "chars":
        return _Token("item", _character_class(token), token.line)
    if token.text == ".":
        return _Token("item", "/(?s:.)/", token.line)
    if token.kind == "repeat" and token.text.startswith("{"):
        return _Token("repeat", _bounded(token), token.line)
    return token


def _bounded(token: _Token) -> str:
    low, separator, high = token.text[1:-1].replace(" ", "").partition(",")
    if max(int(low), int(high or 0)) > MAX_REPEATS:
        raise GbnfError(f"line {token.line}: at most {MAX_REPEATS} repeats")
    return f"{{{int(low)}{separator}{high}}}"


def _character_class(token: _Token) -> str:
    inner = token.text[1:-1]
    is_negated = inner.startswith("^")
    parts: list[str] = []
    place = int(is_negated)
    while place < len(inner):
        match = _ESCAPE.match(inner, place)
        text = match.group() if match else inner[place]
        character = _unescaped(text, token.line)
        is_range = text == "-" and parts and place + 1 < len(inner)
        parts.append("-" if is_range else "".join(f"\\x{{{ord(c):X}}}" for c in character))
        place += len(text)
    if not parts:
        raise GbnfError(f"line {token.line}: an empty character class")
    return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"


def _unescaped(text: str, line: int) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "xuU" and len(code) > 1:
            try:
                return chr(int(code[1:], 16))
            except (ValueError, OverflowError):
                raise GbnfError(f"line {line}: {match.group()} is no character") from None
        return _SIMPLE.get(code, code)

    return _ESCAPE.sub(replace, text)
