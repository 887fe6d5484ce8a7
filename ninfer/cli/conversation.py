"""Conversation: the turns and settings of one chat. Pure state; nothing here writes or runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ninfer.cli.answer import Answer
from ninfer.contract.chat import ChatMessage, ChatPrompt, GenerationParams, Role, TextPart
from ninfer.contract.errors import OptionError
from ninfer.options import SamplingOptions, parse_value, specs_of

SETTINGS: Final = tuple(specs_of(SamplingOptions))
"""Names `/set` knows: all sampling options."""
THINKING_KEY: Final = "enable_thinking"
"""Template variable of the Qwen families that opens a thought."""


def text_message(role: Role, text: str, reasoning: str | None = None) -> ChatMessage:
    """A message of one text."""
    return ChatMessage(role, (TextPart(text),) if text else (), reasoning)


@dataclass(slots=True)
class Conversation:
    """What the next prompt is made of.

    messages   finished turns, without the system message
    think      None leaves it to the template
    settings   sampling values that were set by name; what is missing has the model's default
    """

    system: str | None = None
    think: bool | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def all_messages(self) -> tuple[ChatMessage, ...]:
        head = (text_message("system", self.system),) if self.system else ()
        return (*head, *self.messages)

    def prompt_for(self, user_text: str) -> ChatPrompt:
        """The prompt of one more user turn; the conversation itself stays as it is."""
        return ChatPrompt(
            messages=(*self.all_messages(), text_message("user", user_text)),
            template_kwargs=template_kwargs_of(self.think),
        )

    def params(self) -> GenerationParams:
        return GenerationParams(**self.settings)

    def add_turn(self, user_text: str, answer: Answer) -> None:
        """Keep a turn with whatever was said; an answer that never began leaves no trace."""
        if not answer.text and not answer.reasoning:
            return
        self.messages.append(text_message("user", user_text))
        self.messages.append(text_message("assistant", answer.text, answer.reasoning or None))

    def set(self, name: str, text: str) -> None:
        """Set a sampling option from text; `default` unsets it. Raises OptionError."""
        spec = specs_of(SamplingOptions).get(name)
        if spec is None:
            raise OptionError(name, f"no such setting; there are {', '.join(SETTINGS)}")
        if text == "default":
            self.settings.pop(name, None)
        else:
            self.settings[name] = parse_value(spec, name, text)

    def reset(self) -> None:
        """Forget the turns; system prompt and settings stay."""
        self.messages.clear()


def template_kwargs_of(think: bool | None) -> dict[str, Any]:
    return {} if think is None else {THINKING_KEY: think}
