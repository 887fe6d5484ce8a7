"""Conversations as agents have them: one system text and tools for all, growing histories, results
of tools, thoughts that the template drops from old turns, and a question that is edited."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

TEXT: Final = Path(__file__).resolve().parents[2] / "tests" / "data" / "heldout.txt"
NUM_TOOLS: Final = 8
SYSTEM_WORDS: Final = 700
QUESTION_WORDS: Final = 30
RESULT_WORDS: Final = 60
RESULT_EVERY: Final = 2
"""Every second turn uses a tool."""


@dataclass(slots=True)
class Session:
    """One conversation; `turn_starts[t]` is where turn t begins in `messages`."""

    name: str
    messages: list[dict[str, Any]]
    turn_starts: list[int] = field(default_factory=list)


class AgentTrace:
    """What the clients of a trace send; the answers are the server's."""

    def __init__(self, num_sessions: int, num_turns: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._words = [word for word in TEXT.read_text().split() if "<" not in word]
        self.num_turns = num_turns
        self.tools = [self._tool(index) for index in range(NUM_TOOLS)]
        system = {"role": "system", "content": self.words(SYSTEM_WORDS)}
        self.sessions = [Session(f"agent-{i}", [system]) for i in range(num_sessions)]

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(self._words, k=count))

    def ask(self, session: Session) -> None:
        session.turn_starts.append(len(session.messages))
        session.messages.append({"role": "user", "content": self.words(QUESTION_WORDS)})

    def edit(self, session: Session, turn: int) -> None:
        """Ask something else in an earlier turn; what followed is gone."""
        start = session.turn_starts[turn]
        del session.messages[start:], session.turn_starts[turn:]
        self.ask(session)

    def uses_tool(self, turn: int) -> bool:
        return turn % RESULT_EVERY == 1

    def answer(self, session: Session, content: str, reasoning: str, *, calls_tool: bool) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls_tool:
            arguments = {"query": self.words(4)}
            call = {"name": "tool_1", "arguments": arguments}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": call}]
        session.messages.append(message)
        if calls_tool:
            result = {"role": "tool", "tool_call_id": "call_1", "content": self.words(RESULT_WORDS)}
            session.messages.append(result)

    def body(self, session: Session, max_tokens: int) -> dict[str, Any]:
        return {
            "messages": list(session.messages),
            "tools": self.tools,
            "tool_choice": "none",
            "session_id": session.name,
            "enable_thinking": True,
            "temperature": 0,
            "max_tokens": max_tokens,
        }

    def _tool(self, index: int) -> dict[str, Any]:
        properties = {"query": {"type": "string", "description": self.words(8)}}
        parameters = {"type": "object", "properties": properties, "required": ["query"]}
        function = {
            "name": f"tool_{index}",
            "description": self.words(20),
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


class ServedTokens:
    """Token histories that a server has had, and what a prompt has in common with them."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def add(self, token_ids: Sequence[int]) -> None:
        self._texts.append(_encoded(token_ids))

    def reusable(self, token_ids: Sequence[int]) -> int:
        """Longest common prefix, less the last token, which is computed in any case."""
        text = _encoded(token_ids)
        longest = max((_num_common(text, other) for other in self._texts), default=0)
        return min(longest, len(token_ids) - 1)

    def num_pages(self, page_tokens: int) -> int:
        """Different pages of all histories, each prefix once."""
        size = 4 * page_tokens
        pages = set()
        for text in self._texts:
            pages |= {text[:end] for end in range(size, len(text), size)} | {text}
        return len(pages)


def _encoded(token_ids: Sequence[int]) -> bytes:
    return b"".join(int(token_id).to_bytes(4, "little") for token_id in token_ids)


def _num_common(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if left[: 4 * middle] == right[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
