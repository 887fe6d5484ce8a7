"""Conversations and generation settings as Gateway and CLI hand them to the Frontend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from ninfer.contract.cache import CacheRequest
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import PromptScoring

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """`ends_prefix`: the client expects to send all up to the end of this part again."""

    text: str
    ends_prefix: bool = False


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A picture or video of a message; `data` is the acquired file."""

    kind: Literal["image", "video"]
    data: bytes = field(repr=False)


ContentPart: TypeAlias = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call an assistant turn made. `arguments` is an object, or the raw text when it is none."""

    name: str
    arguments: Mapping[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. Parts join without a separator; no parts means empty text."""

    role: Role
    content: tuple[ContentPart, ...] = ()
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to render.

    tools             OpenAI tool objects, given to the template as they are
    template_kwargs   extra template variables (enable_thinking, ...)
    continue_final_message   the last assistant turn is left open and continued
    tools_end_prefix  as TextPart.ends_prefix, of the tools
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools_end_prefix: bool = False


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function the model may call. `parameters` is its JSON Schema, None when it takes none;
    `path` is where it stands in the request, for errors."""

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    path: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRules:
    """Which calls an answer may have.

    tools      what the prompt declares
    choice     `auto`; `none`: no call, the tools are only described; `required`: at least one
    allowed    names that may be called, None for all; naming one function is `required` with it
    parallel   False: the answer ends with its first complete call
    """

    tools: tuple[ToolSpec, ...]
    choice: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True


ConstraintKind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer's text must match, from its first token behind the thought on.

    text     the grammar; a schema and the list of a choice as JSON; "" for any JSON object
    param    the field it came in, for errors
    is_strict   unsupported keywords of a schema are an error, not ignored
    """

    kind: ConstraintKind
    text: str
    param: str
    is_strict: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What one request asks for; None means "not asked". Values are already range-checked.

    temperature .. repetition_penalty   as SamplingParams; top_k -1 and 0 = off
    max_tokens          None or larger than the context: the rest of the context
    stop                non-empty stop strings
    ignore_eos          do not end at the model's EOS tokens (stop_token_ids still end)
    stop_in_reasoning   stop strings also match inside reasoning
    split_reasoning     False: everything is content (raw-text endpoints)
    timeout_s           deadline for the whole request from submit on
    cache               what the request asks of the context cache
    tools               None: no tools, markup of calls is text
    constraint          None: any text
    thinking_budget     most tokens of thought, None for the option's default or no limit
    scoring             log probabilities of the prompt's tokens
    reports_stop_token  the token that ends the output is reported too, without a text
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    stop_in_reasoning: bool = False
    split_reasoning: bool = True
    timeout_s: float | None = None
    cache: CacheRequest = field(default_factory=CacheRequest)
    tools: ToolRules | None = None
    constraint: Constraint | None = None
    thinking_budget: int | None = None
    scoring: PromptScoring | None = None
    reports_stop_token: bool = False


class Frontend(Protocol):
    """Text and tokens of one model. Long work runs in threads; nothing here touches the device."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_tokenizer(self) -> bool: ...

    @property
    def has_chat_template(self) -> bool: ...

    async def prepare_chat(self, chat: ChatPrompt) -> PreparedPrompt:
        """Render and tokenise. Raises RequestError: invalid_template, invalid_prompt,
        unsupported_value (media), tokenizer_unavailable, context_length_exceeded."""

    async def render_chat(self, chat: ChatPrompt) -> str:
        """The text `prepare_chat` tokenises."""

    def check_num_messages(self, num_messages: int, param: str = "messages") -> None:
        """To be asked before a long conversation is read. Raises RequestError naming `param`,
        context_length_exceeded, when so many messages cannot fit, whatever they say."""

    def for_context(self, max_context: int | None) -> Frontend:
        """The same, but prompts of more than `max_context` tokens are refused; None: of no
        length."""

    async def prepare_text(
        self, text: str, param: str = "prompt", *, parses_special: bool = True
    ) -> PreparedPrompt:
        """Raw text; special tokens in it are parsed, or with False taken as plain characters.
        Raises RequestError naming `param`, the field it came in: invalid_prompt,
        tokenizer_unavailable, context_length_exceeded."""

    def prepare_ids(self, token_ids: Sequence[int], param: str = "input_ids") -> PreparedPrompt:
        """Ids as they are. Raises RequestError naming `param`: invalid_value when empty or
        outside the vocabulary, context_length_exceeded."""

    def build_request(
        self, request_id: str, prompt: PreparedPrompt, params: GenerationParams, *, now: float
    ) -> GenerationRequest:
        """Resolve defaults (request > options > generation_config > neutral), draw a seed if none
        was given and create the output session. `now` is the Engine's clock for `timeout_s`."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; b"" for an id without a text or without a tokenizer."""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` decoded with replacement."""
