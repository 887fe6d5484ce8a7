"""Objects of JSON as Lark rules: members in the order of the schema, then those it does not name.

    next[i, n]   a member comes, from the i-th on, behind n earlier ones
    rest[i, n]   a comma and a member, or nothing where the object may end

n is counted where a bound of it matters, up to the number from which on all are alike. Members that
the schema does not name may share one name, so all of them together count as one towards the least.

A parser looks at every member that may come next, at each place where one may. So the ways of
next[i, n] are written out, a block of members at a time, rather than each as "this or a later one".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ninfer.frontend.constraints.lark_rules import LarkRules
from ninfer.frontend.constraints.unenforceable import Unenforceable

_MAX_PLACES: Final = 20_000
"""Of rules that count members."""
_LONGEST_BLOCK: Final = 16
_FEW_PLACES: Final = 48
"""So many can be looked at one by one."""
_MAX_WAYS: Final = 9_000
"""About the most that are written out for one grammar: the library has room for some 60,000
symbols in all."""


@dataclass(slots=True)
class WayBudget:
    """How many ways may still be written out, over all objects of a grammar."""

    num_left: int = _MAX_WAYS

    def block(self, num_places: int) -> int:
        """How many members at a time an object writes out."""
        longest = min(_LONGEST_BLOCK, 2 * self.num_left // num_places)
        if num_places <= _FEW_PLACES or longest < 2:
            return 1
        self.num_left -= num_places * longest // 2
        return longest


@dataclass(frozen=True, slots=True)
class Member:
    """`body` is its name and its value."""

    body: str
    is_required: bool


class MemberSequence:
    """`others`: the rule of a member that the schema does not name, None when there is none."""

    def __init__(
        self,
        rules: LarkRules,
        members: list[Member],
        others: str | None,
        case: Mapping[str, Any],
        ways: WayBudget,
    ) -> None:
        self._rules = rules
        self._members = members
        self._others = others
        self._least = case.get("minProperties", 0)
        self._most: int | None = case.get("maxProperties")
        required = [index for index, member in enumerate(members) if member.is_required]
        self._last_required = required[-1] if required else -1
        self._drop_idle_bounds(len(required))
        self._bound_least()
        self._cap = max(self._least, 0 if self._most is None else self._most + 1)
        num_places = (len(members) + 1) * (self._cap + 1)
        if num_places > _MAX_PLACES:
            raise Unenforceable("counts too many members")
        self._block = ways.block(num_places)

    def braced(self) -> str | None:
        """The objects, None when there are none."""
        following, rests = self._behind_the_last()
        ways = [[] if name is None else [name] for name in following]
        for index in reversed(range(len(self._members))):
            ways = [self._ways(index, n, ways[n], rests) for n in range(self._cap + 1)]
            following = [self._rules.rule(" | ".join(way)) if way else None for way in ways]
            rests = [self._rest(index, n, following[n]) for n in range(self._cap + 1)]
            if index % self._block == 0:
                ways = [[] if name is None else [name] for name in following]
        first, may_be_empty = following[0], self._may_end(0, 0)
        if first is None:
            return '"{" "}"' if may_be_empty else None
        return f'"{{" {first}{"?" if may_be_empty else ""} "}}"'

    def _drop_idle_bounds(self, num_required: int) -> None:
        if self._least <= num_required:
            self._least = 0
        if self._most is not None and self._others is None and self._most >= len(self._members):
            self._most = None

    def _bound_least(self) -> None:
        """Raises Unenforceable where only different names that are not listed would be enough."""
        most_told = len(self._members) + (self._others is not None)
        is_possible = self._others is not None and (self._most is None or self._most >= self._least)
        if is_possible and self._least > most_told:
            raise Unenforceable(
                "asks for more members than it names: other names cannot be kept different",
                ("minProperties", self._least),
            )
        self._least = min(self._least, most_told + 1)

    def _behind_the_last(self) -> tuple[list[str | None], list[str | None]]:
        """`next` and `rest` where only members that are not named are left, by the count."""
        count, cap = len(self._members), self._cap
        following: list[str | None] = [None] * (cap + 1)
        if self._others is not None:
            more = self._more(self._others)
            for n in range(max(0, self._least - 1), cap + 1):
                if self._may_grow(n):
                    rest = more[min(n + 1, cap)]
                    following[n] = self._rules.rule(f"{self._others} {rest}".rstrip())
        return following, [self._rest(count, n, following[n]) for n in range(cap + 1)]

    def _more(self, others: str) -> list[str]:
        """Any number of members that are not named, or nothing, by the count before them."""
        more = [""] * (self._cap + 1)
        for n in reversed(range(self._cap + 1)):
            if n == self._cap and self._most is None:
                more[n] = self._rules.rule(f'("," {others})*')
            elif self._may_grow(n):
                more[n] = self._rules.rule(f'("," {others} {more[n + 1]})?')
        return more

    def _ways(self, index: int, n: int, skipped: list[str], rests: list[str | None]) -> list[str]:
        """Of next[index, n], given those of the next member and the rests behind this one."""
        member = self._members[index]
        rest = rests[min(n + 1, self._cap)] if self._may_grow(n) else None
        taken = [] if rest is None else [f"{member.body} {rest}".rstrip()]
        return taken if member.is_required else taken + skipped

    def _rest(self, index: int, n: int, following: str | None) -> str | None:
        """An empty text is the one way to end."""
        may_end = self._may_end(index, n)
        if following is None:
            return "" if may_end else None
        return self._rules.rule(f'("," {following})?' if may_end else f'"," {following}')

    def _may_end(self, index: int, n: int) -> bool:
        is_few = self._most is None or n <= self._most
        return index > self._last_required and n >= self._least and is_few

    def _may_grow(self, n: int) -> bool:
        return self._most is None or n < self._most
