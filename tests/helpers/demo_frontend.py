"""The embedded demo model's frontend, without its weights."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from ninfer.contract.chat import ChatMessage, ChatPrompt, Role, TextPart, ToolCall
from ninfer.contract.model import FrontendResources, ModelConfig
from ninfer.frontend.frontend import ModelFrontend
from ninfer.frontend.tokenizer import TextTokenizer
from ninfer.options import SamplingOptions
from tests.helpers.model_configs import hybrid_config
from tests.helpers.model_paths import DEMO_MODEL

DEMO_VOCAB_SIZE: Final = 4096
DEMO_MAX_POSITIONS: Final = 2048
IM_START, IM_END, END_OF_TEXT = 4084, 4085, 4083
THINK, THINK_END = 4094, 4095


def demo_config(vocab_size: int = DEMO_VOCAB_SIZE) -> ModelConfig:
    return dataclasses.replace(hybrid_config(vocab_size=vocab_size), eos_token_ids=(IM_END,))


RESOURCES: Final = FrontendResources(
    tokenizer_json=(DEMO_MODEL / "tokenizer.json").read_bytes(),
    tokenizer_config=json.loads((DEMO_MODEL / "tokenizer_config.json").read_text()),
    chat_template=(DEMO_MODEL / "chat_template.jinja").read_text(),
    generation_config=json.loads((DEMO_MODEL / "generation_config.json").read_text()),
)
"""The demo model's own files."""


def demo_frontend(
    defaults: SamplingOptions | None = None, *, vocab_size: int = DEMO_VOCAB_SIZE, **changes: Any
) -> ModelFrontend:
    """`changes` replace resources of the demo model."""
    resources = dataclasses.replace(RESOURCES, **changes)
    return ModelFrontend(demo_config(vocab_size), resources, defaults or SamplingOptions())


def demo_tokenizer() -> TextTokenizer:
    return TextTokenizer((DEMO_MODEL / "tokenizer.json").read_bytes(), DEMO_VOCAB_SIZE)


def turn(role: Role, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),) if text else (), **fields)


def call(name: str, arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def chat(*messages: ChatMessage, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, **fields)
