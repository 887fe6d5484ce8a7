"""Stop strings over a character stream: finds the first one to end, in O(1) a character.

An Aho-Corasick automaton. The state is one node number, so that whoever feeds it can go back to an
earlier state for free. Which stop ends first depends on the characters alone, never on how they
are cut into tokens; of several that end at one character the longest counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ROOT: Final = 0
"""The node before the first character."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` occupies [end - len(stop), end) of the stream; `end` is an index of the fed text."""

    stop: str
    end: int


class StopMatcher:
    """Immutable after construction; `stops` are non-empty strings."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [ROOT]
        self._depth: list[int] = [0]
        self._stop: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def depth(self, node: int) -> int:
        """How many of the newest characters may be the beginning of a stop."""
        return self._depth[node]

    def feed(self, node: int, text: str, start: int, stop: int) -> tuple[int, StopMatch | None]:
        """Follow text[start:stop] from `node`: the new node, and the first match if there is one.

        After a match the node is the one behind the matched string.
        """
        transitions, fallback, stops = self._next, self._fallback, self._stop
        for index in range(start, stop):
            character = text[index]
            while node and character not in transitions[node]:
                node = fallback[node]
            node = transitions[node].get(character, ROOT)
            matched = stops[node]
            if matched is not None:
                return node, StopMatch(matched, index + 1)
        return node, None

    def _add(self, stop: str) -> None:
        node = ROOT
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._fallback.append(ROOT)
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
            node = child
        self._stop[node] = stop

    def _link(self) -> None:
        """Breadth first: a node's fallback is its longest proper suffix that is a node."""
        waiting = deque(self._next[ROOT].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                waiting.append(child)
                fallback = self._fallback[node]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(character, ROOT)
            if self._stop[node] is None:
                self._stop[node] = self._stop[self._fallback[node]]
