"""Which modules the lists of a quantisation configuration mean.

A pattern names modules exactly, unless it is a regular expression or a wildcard:

    EXACT      compressed-tensors: `re:` and a regular expression that matches from the start of
               the name, or the name itself; `Linear` is every linear layer
    ANYWHERE   transformers' fp8: a module, all below it, or all whose name ends with it
    WILDCARD   ModelOpt: shell wildcards, or a module and all below it

Checkpoints of wrapped models call the same module `model.language_model.X`,
`language_model.model.X` or `model.X`; a pattern may use any of the three.

Source: compressed_tensors/utils/match.py, transformers/quantizers/quantizers_utils.py and
vllm/model_executor/layers/quantization/modelopt.py as published.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

EVERY_LINEAR: Final = "Linear"
_REGEX_PREFIX: Final = "re:"
_WRAPPER: Final = "language_model."
MAX_REPEATS: Final = 5
MAX_CHARACTERS: Final = 1000
_ATOM: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape or a set of characters."""
_INNER_GROUP: Final = re.compile(r"\((?:\?[:=!])?([^()]*)\)([*+{]?)")
_REPEAT: Final = re.compile(r"[*+]|\{\d*,")


class PatternStyle(Enum):
    EXACT = auto()
    ANYWHERE = auto()
    WILDCARD = auto()


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Compiled patterns. `names` are looked up, `expressions` are tried one by one."""

    style: PatternStyle
    names: frozenset[str]
    expressions: tuple[re.Pattern[str], ...]

    @classmethod
    def compiled(cls, style: PatternStyle, patterns: Iterable[str]) -> ModulePatterns:
        """Raises ValueError, naming the pattern, for a regular expression that is none or could
        take for ever."""
        names: list[str] = []
        wildcards: list[str] = []
        expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if style is PatternStyle.EXACT and pattern.startswith(_REGEX_PREFIX):
                expressions.append(_expression(pattern))
            elif style is PatternStyle.WILDCARD and any(sign in pattern for sign in "*?["):
                wildcards.append(fnmatch.translate(pattern))
            else:
                names.append(pattern)
        if wildcards:
            expressions.append(re.compile("|".join(wildcards)))
        return cls(style, frozenset(names), tuple(expressions))

    def match(self, module: str) -> bool:
        """Whether `module` (a tensor's name without `.weight`) is meant."""
        if self.style is PatternStyle.EXACT and EVERY_LINEAR in self.names:
            return True
        return any(self._match_spelling(name) for name in _spellings(module))

    def _match_spelling(self, module: str) -> bool:
        if any(name in self.names for name in self._looked_up(module)):
            return True
        return any(expression.match(module) for expression in self.expressions)

    def _looked_up(self, module: str) -> Iterator[str]:
        yield module
        if self.style is PatternStyle.EXACT or not self.names:
            return
        dot = module.find(".")
        while dot >= 0:
            yield module[:dot]
            if self.style is PatternStyle.ANYWHERE:
                yield module[dot + 1 :]
            dot = module.find(".", dot + 1)


def _expression(pattern: str) -> re.Pattern[str]:
    expression = pattern.removeprefix(_REGEX_PREFIX)
    if _may_not_end(expression):
        raise ValueError(f"{pattern!r} repeats too much to be matched in time")
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def _may_not_end(expression: str) -> bool:
    """Whether a name could be split among the repeats in too many ways: repeats or alternatives
    inside a repeated group, more than MAX_REPEATS repeats, or no sane length."""
    if len(expression) > MAX_CHARACTERS:
        return True
    text = _ATOM.sub("x", expression)
    if len(_REPEAT.findall(text)) > MAX_REPEATS:
        return True
    while (group := _INNER_GROUP.search(text)) is not None:
        content, repeat = group.groups()
        is_varied = any(sign in content for sign in "*+?{|")
        if repeat and is_varied:
            return True
        text = text[: group.start()] + ("x?" if is_varied else "x") + repeat + text[group.end() :]
    return False


def _spellings(module: str) -> tuple[str, ...]:
    plain = module.replace(_WRAPPER, "", 1)
    wrapped = plain.replace("model.", f"model.{_WRAPPER}", 1)
    return tuple(dict.fromkeys((module, plain, wrapped, _WRAPPER + plain)))
