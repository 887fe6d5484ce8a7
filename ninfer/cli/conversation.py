"""Conversation: the turns and settings of one chat. Pure state; nothing here writes or runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from ninfer.cli.answer import Answer
from ninfer.contract.chat import (
    ChatMessage,
    ChatPrompt,
    GenerationParams,
    Role,
    TextPart,
    ToolCall,
)
from ninfer.contract.errors import OptionError
from ninfer.gateway.tool_fields import ChatTools
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
    tools      what the model may call
    """

    system: str | None = None
    think: bool | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    tools: ChatTools = field(default_factory=ChatTools)

    def all_messages(self) -> tuple[ChatMessage, ...]:
        head = (text_message("system", self.system),) if self.system else ()
        return (*head, *self.messages)

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the last answer whose results are still to come, in their order."""
        for num_results, message in enumerate(reversed(self.messages)):
            if message.role != "tool":
                return message.tool_calls[num_results:]
        return ()

    def next_message(self, text: str) -> ChatMessage:
        """What a line says: the result of the first open call, or a user's turn."""
        calls = self.open_calls
        if not calls:
            return text_message("user", text)
        return replace(text_message("tool", text), tool_call_id=calls[0].call_id)

    def prompt_for(self, text: str) -> ChatPrompt:
        """The prompt of one more message; the conversation itself stays as it is."""
        return ChatPrompt(
            messages=(*self.all_messages(), self.next_message(text)),
            tools=self.tools.objects,
            template_kwargs=template_kwargs_of(self.think),
        )

    def params(self) -> GenerationParams:
        return GenerationParams(**self.settings, tools=self.tools.rules)

    def add_turn(self, text: str, answer: Answer) -> None:
        """Keep a turn with whatever was said; an answer that never began leaves no trace."""
        if not answer.text and not answer.reasoning and not answer.calls:
            return
        self.messages.append(self.next_message(text))
        said = text_message("assistant", answer.text, answer.reasoning or None)
        self.messages.append(replace(said, tool_calls=answer.calls))

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
