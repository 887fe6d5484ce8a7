"""Parts that answers of several protocols share: finish reasons, usage, timings, logprobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal

from ninfer.contract.cache import CacheUse
from ninfer.contract.drafting import DraftCounts
from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import Finish, FinishReason, Timings, Usage
from ninfer.contract.sampling import GeneratedToken, TokenLogprobs

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finish_reason(finish: Finish) -> Literal["stop", "length"]:
    match finish.reason:
        case FinishReason.STOP_TOKEN | FinishReason.STOP_STRING | FinishReason.TOOL_CALL:
            return "stop"
        case FinishReason.OUTPUT_LIMIT | FinishReason.CONTEXT_CAPACITY:
            return "length"
        case FinishReason.CANCELLED:
            raise InvariantError("a request was cancelled while its client was still reading")


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """Usage of all choices of one prompt: the prompt counts once, completions add up."""
    prompt_tokens = max(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)
        },
    }


def summed_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Usage of several prompts from that of each."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            if isinstance(value, dict):
                total[name] = summed_usage([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total


def cache_object(use: CacheUse) -> dict[str, Any]:
    """Where cached prompt tokens came from, and why there are not more."""
    return {
        "tokens": use.num_tokens,
        "kind": None if use.kind is None else use.kind.value,
        "tier": None if use.tier is None else use.tier.value,
        "miss": None if use.miss is None else use.miss.value,
        "first_difference": use.first_difference,
    }


def timings_object(timings: Sequence[Timings], completion_tokens: int) -> dict[str, Any]:
    """Seconds; of several choices the longest. The first token of each belongs to prefill. `drafts`
    add up, and are there when something was drafted."""
    decode_s = max(item.decode_s for item in timings)
    num_decoded = completion_tokens - len(timings)
    rate = num_decoded / decode_s if decode_s > 0.0 and num_decoded > 0 else None
    parts = [item.drafts for item in timings if item.drafts is not None]
    drafts = sum(parts, DraftCounts())
    return {
        "queue_s": max(item.queue_s for item in timings),
        "prefill_s": max(item.prefill_s for item in timings),
        "decode_s": decode_s,
        "total_s": max(item.total_s for item in timings),
        "tokens_per_second": rate,
        **({"drafts": asdict(drafts)} if parts else {}),
    }


def require_logprobs(token: GeneratedToken) -> TokenLogprobs:
    if token.logprobs is None:
        raise InvariantError("logprobs were asked for but a token has none")
    return token.logprobs


def finite_logprob(value: float) -> float:
    if math.isnan(value):
        raise InvariantError("a logprob is not a number")
    return max(value, LOGPROB_FLOOR)


def chat_logprob_entry(
    token: GeneratedToken, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """One element of `logprobs.content`; joined `bytes` rebuild the text."""
    logprobs = require_logprobs(token)
    entry = _scored_token(token.token_id, logprobs.logprob, token_bytes)
    entry["top_logprobs"] = [
        _scored_token(token_id, logprob, token_bytes) for token_id, logprob in logprobs.top
    ]
    return entry


def _scored_token(
    token_id: int, logprob: float, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    data = token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": finite_logprob(logprob),
        "bytes": list(data),
    }
