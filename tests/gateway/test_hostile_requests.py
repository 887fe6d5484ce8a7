"""Random bytes and random field values: never a 5xx, never a hang, healthy afterwards."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest

from tests.helpers.gateway_rig import Rig

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "none",
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1,
    "logit_bias": {"5": 1},
    "seed": 1,
    "stop": ["a"],
    "stop_token_ids": [1],
    "max_tokens": 5,
    "min_tokens": 1,
    "n": 2,
    "best_of": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "thinking": {"type": "enabled"},
    "metadata": {},
    "timeout_s": 5,
}
NATIVE: dict[str, Any] = {
    "input_ids": [[1, 2], [3]],
    "sampling_params": {"max_new_tokens": 3, "n": 2, "stop": "x", "sampling_seed": 4},
    "stream": False,
    "rid": ["a", "b"],
    "return_logprob": True,
    "top_logprobs_num": 1,
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 5.5, 1e308, -1e308, 2**63, 10**40, "", "x", "\x00", "5", [], {},
    [None], [[]], {"a": None}, {"type": "x"}, "\ufffd", ["x"] * 50, {"role": "user"}, -(2**63),
]  # fmt: skip


def mutated(template: dict[str, Any], source: random.Random) -> Any:
    """The template with one to three places replaced, removed or doubled."""
    root = copy.deepcopy(template)
    for _ in range(source.randint(1, 3)):
        holder: Any = root
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = source.choice(keys)
            if isinstance(holder[key], dict | list) and holder[key] and source.random() < 0.7:
                holder = holder[key]
                continue
            if source.random() < 0.2:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(source.choice(VALUES))
            break
    return root


@pytest.mark.parametrize(
    ("path", "template"), [("/v1/chat/completions", CHAT), ("/generate", NATIVE)]
)
async def test_mutated_fields(rig: Rig, path: str, template: dict[str, Any]) -> None:
    source = random.Random(7)
    assert (await rig.post(path, template)).status == 200
    statuses = set()
    for _ in range(400):
        request = mutated(template, source)
        answer = await rig.post_bytes(path, json.dumps(request).encode())
        statuses.add(answer.status)
        assert answer.status in (200, 400), (request, answer.body)
        if answer.status == 400:
            assert answer.error["code"]
            root = re.split(r"[.\[]", answer.error["param"])[0]
            is_missing = answer.error["code"] == "missing_required_parameter"
            assert root in request or is_missing, (request, answer.error)
    assert statuses == {200, 400}
    assert rig.engine.num_open == 0
    assert (await rig.get("/health")).status == 200


async def test_mutated_bytes(rig: Rig) -> None:
    source = random.Random(8)
    whole = json.dumps(CHAT).encode()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        encoding = source.choice(["identity", "gzip", "zstd", "deflate", "nonsense"])
        answer = await rig.post_bytes(
            "/v1/chat/completions", bytes(data), Content_Encoding=encoding
        )
        assert answer.status in (200, 400, 415), answer.body
    assert rig.engine.num_open == 0
    assert (await rig.chat()).status == 200
