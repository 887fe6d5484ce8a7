"""Log probabilities as /v1/completions has them: four lists, an element a token.

tokens           texts; one that is no text of its own is written `bytes:\\xf0\\x9f`
token_logprobs   null where nothing predicts the token: at a prompt's beginning
top_logprobs     {text: logprob} of the best, and always of the token itself
text_offset      where the token's text begins in the choice's text, in characters
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer.contract.chat import Frontend
from ninfer.contract.sampling import GeneratedToken, PromptScores
from ninfer.gateway.answer_parts import finite_logprob, require_logprobs


class TokenNames:
    """What tokens are called, and their bytes. Remembered: few of a vocabulary come often."""

    def __init__(self, frontend: Frontend, *, by_id: bool) -> None:
        self._token_bytes = frontend.token_bytes
        self._by_id = by_id
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._name_of(token_id)
        return name

    def bytes_of(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._token_bytes(token_id)
        return data

    def _name_of(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(slots=True)
class LogprobLists:
    """The four lists, of equal length."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(
        self, name: str, logprob: float | None, top: dict[str, float] | None, place: int
    ) -> None:
        self.tokens.append(name)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(place)

    def extend(self, other: LogprobLists, num_before: int = 0) -> None:
        """`num_before`: characters in front of what the places of `other` count from."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += (place + num_before for place in other.text_offset)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def top_object(
    names: TokenNames, best: Iterable[tuple[int, float]], token_id: int, logprob: float
) -> dict[str, float]:
    """By name. Two tokens of one name have one entry, the likelier one's; `token_id` has one in any
    case."""
    top: dict[str, float] = {}
    for other, value in (*best, (token_id, logprob)):
        name, value = names[other], finite_logprob(value)
        if value > top.get(name, -float("inf")):
            top[name] = value
    return top


class EchoedPrompt:
    """A prompt's tokens as their scores come, with the text they stand for."""

    def __init__(self, token_ids: Sequence[int], names: TokenNames) -> None:
        self._token_ids = token_ids
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def beginning(self) -> tuple[str, LogprobLists]:
        """The first token, which has no score."""
        lists = LogprobLists()
        lists.add(self._names[self._token_ids[0]], None, None, 0)
        return self._read(0), lists

    def scored(self, scores: PromptScores) -> tuple[str, LogprobLists]:
        """The next tokens: those behind what was read before."""
        lists, texts = LogprobLists(), []
        logprobs, num_top = scores.logprobs.tolist(), scores.top_ids.shape[1]
        top_ids, top_logprobs = scores.top_ids.tolist(), scores.top_logprobs.tolist()
        for offset, logprob in enumerate(logprobs):
            index = scores.first + offset
            token_id = self._token_ids[index]
            best = zip(top_ids[offset], top_logprobs[offset], strict=True) if num_top else ()
            top = top_object(self._names, best, token_id, logprob)
            lists.add(self._names[token_id], finite_logprob(logprob), top, self._place)
            texts.append(self._read(index))
        return "".join(texts), lists

    def _read(self, index: int) -> str:
        is_last = index == len(self._token_ids) - 1
        text = self._decoder.decode(self._names.bytes_of(self._token_ids[index]), is_last)
        self._place += len(text)
        return text


class GeneratedLogprobs:
    """Of a choice's generated tokens; places count from the first of them. Texts and tokens come as
    the output session reports them: tokens with the text in which theirs ends."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._undecoded = b""
        self._text = ""
        self._taken = 0
        self._place = 0

    def read(self, text: str, tokens: Iterable[GeneratedToken]) -> LogprobLists:
        self._text, self._taken = self._text[self._taken :] + text, 0
        lists = LogprobLists()
        for token in tokens:
            found, token_id = require_logprobs(token), token.token_id
            top = top_object(self._names, found.top, token_id, found.logprob)
            name, place = self._names[token_id], self._place
            lists.add(name, finite_logprob(found.logprob), top, place)
            self._pass(token_id)
        return lists

    def _pass(self, token_id: int) -> None:
        """Move behind the token's text, if that is what comes next: texts of special tokens need
        not be shown."""
        data = self._undecoded + self._names.bytes_of(token_id)
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        if self._text.startswith(text, self._taken):
            self._taken += len(text)
            self._place += len(text)
            self._undecoded = data[num_decoded:]
