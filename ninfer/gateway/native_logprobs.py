"""Log probabilities as /generate has them: [logprob, token id, text or null]."""

from __future__ import annotations

from typing import Any

from ninfer.contract.chat import Frontend
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import GeneratedToken, PromptScores
from ninfer.gateway.answer_parts import finite_logprob, require_logprobs


class LogprobTriples:
    """`frontend` is None when texts are not wanted."""

    def __init__(self, frontend: Frontend | None) -> None:
        self._frontend = frontend

    def triple(self, token_id: int, logprob: float | None) -> list[Any]:
        text = None if self._frontend is None else self._frontend.token_text(token_id)
        return [None if logprob is None else finite_logprob(logprob), token_id, text]

    def of_token(self, token: GeneratedToken) -> tuple[list[Any], list[list[Any]]]:
        """Of the token itself, and of the best in its place."""
        logprobs = require_logprobs(token)
        own = self.triple(token.token_id, logprobs.logprob)
        return own, [self.triple(token_id, logprob) for token_id, logprob in logprobs.top]


class ScoredPrompt:
    """Triples of a prompt's tokens from `start` on, of which the first has no logprob: nobody was
    asked to predict it. Shared by the choices of the prompt."""

    def __init__(self, prompt: PreparedPrompt, start: int, triples: LogprobTriples) -> None:
        self._token_ids = prompt.token_ids
        self._triples = triples
        self.token_logprobs = [triples.triple(int(prompt.token_ids[start]), None)]
        self.top_logprobs: list[list[list[Any]] | None] = [None]

    def add(self, scores: PromptScores) -> None:
        triple = self._triples.triple
        token_ids = self._token_ids[scores.first : scores.stop].tolist()
        self.token_logprobs += map(triple, token_ids, scores.logprobs.tolist())
        tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        self.top_logprobs += (list(map(triple, ids, logprobs)) for ids, logprobs in tops)
