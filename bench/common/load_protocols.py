"""One question in the words of every protocol, and its answer read back from each.

An answer is one text, thoughts before the rest, so that streams and whole answers of a protocol can
be compared, and a stream that was left early with the beginning of either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

ANSWER_TOKENS: Final = 8
_QUESTIONS: Final = (
    "hi",
    "Name three farm animals.",
    "Write one sentence with the word river. " * 12,
)


@dataclass(frozen=True)
class Case:
    """A question with its settings, and therefore one right answer."""

    question: str
    temperature: float
    seed: int


CASES: Final = tuple(
    Case(question, temperature, seed)
    for question in _QUESTIONS
    for seed, temperature in ((1, 0.0), (2, 1.2))
)


@dataclass(frozen=True)
class Protocol:
    """payload    the request for a case, but for `stream`
    whole      the text of a JSON answer
    piece      the text that one event of a stream adds
    is_end     whether the data of an event is the stream's regular end
    error      the error that an event reports
    """

    name: str
    path: str
    payload: Callable[[Case], dict[str, Any]]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]
    is_end: Callable[[bytes], bool]
    error: Callable[[Any], Any] = lambda event: event.get("error")


def _settings(case: Case) -> dict[str, Any]:
    return {
        "temperature": case.temperature,
        "seed": case.seed,
        "min_tokens": ANSWER_TOKENS // 2,
        "max_tokens": ANSWER_TOKENS,
    }


def _messages(case: Case) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": case.question}], **_settings(case)}


def _is_done(data: bytes) -> bool:
    return data == b"[DONE]"


def _chat_whole(answer: Any) -> str:
    message = answer["choices"][0]["message"]
    return str(message.get("reasoning_content") or "") + str(message["content"])


def _chat_piece(event: Any) -> str:
    delta = event["choices"][0]["delta"]
    return str(delta.get("reasoning_content") or "") + str(delta.get("content") or "")


def _anthropic_whole(answer: Any) -> str:
    return "".join(block.get("thinking") or block.get("text") or "" for block in answer["content"])


def _anthropic_piece(event: Any) -> str:
    delta = event.get("delta", {}) if event["type"] == "content_block_delta" else {}
    return str(delta.get("thinking") or delta.get("text") or "")


def _responses_whole(answer: Any) -> str:
    parts = [part for item in answer["output"] for part in item.get("content") or ()]
    return "".join(str(part.get("text", "")) for part in parts)


_RESPONSES_DELTAS: Final = frozenset(
    {"response.output_text.delta", "response.reasoning_text.delta"}
)
_RESPONSES_ENDS: Final = (b'"type":"response.completed"', b'"type":"response.incomplete"')

PROTOCOLS: Final[Mapping[str, Protocol]] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "chat",
            "/v1/chat/completions",
            _messages,
            _chat_whole,
            _chat_piece,
            _is_done,
        ),
        Protocol(
            "completions",
            "/v1/completions",
            lambda case: {"prompt": case.question, **_settings(case)},
            lambda answer: str(answer["choices"][0]["text"]),
            lambda event: str(event["choices"][0]["text"]),
            _is_done,
        ),
        Protocol(
            "generate",
            "/generate",
            lambda case: {
                "text": case.question,
                "sampling_params": _settings(case),
                "incremental": True,
            },
            lambda answer: str(answer["text"]),
            lambda event: str(event["text"]),
            _is_done,
        ),
        Protocol(
            "anthropic",
            "/v1/messages",
            _messages,
            _anthropic_whole,
            _anthropic_piece,
            lambda data: b'"type":"message_stop"' in data,
        ),
        Protocol(
            "responses",
            "/v1/responses",
            lambda case: {
                "input": case.question,
                "temperature": case.temperature,
                "seed": case.seed,
                "max_output_tokens": ANSWER_TOKENS,
                "store": False,
            },
            _responses_whole,
            lambda event: str(event["delta"]) if event.get("type") in _RESPONSES_DELTAS else "",
            lambda data: any(end in data for end in _RESPONSES_ENDS),
            lambda event: (
                event["response"]["error"] if event["type"] == "response.failed" else None
            ),
        ),
    )
}
