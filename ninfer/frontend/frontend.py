"""ModelFrontend: the contract's Frontend over one model's tokenizer, template and defaults."""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from ninfer.contract.chat import ChatPrompt, GenerationParams, ToolRules
from ninfer.contract.errors import ModelFileError, RequestError
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.model import FrontendResources, ModelConfig
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import (
    GREEDY_BELOW,
    MIN_TEMPERATURE,
    PromptScoring,
    SamplingParams,
)
from ninfer.frontend.chat_renderer import ChatRenderer
from ninfer.frontend.constraints.guided_session import GuidedSession
from ninfer.frontend.constraints.guides import Guides
from ninfer.frontend.control_text import strings_of
from ninfer.frontend.generation_defaults import GENERATION_CONFIG_FILE, read_generation_config
from ninfer.frontend.host_work import MAX_SHARED_CHARACTERS, HostWork
from ninfer.frontend.load_checks import check_marks, check_renders, checked_eos_ids
from ninfer.frontend.output_session import TextOutputSession
from ninfer.frontend.output_state import SessionRules
from ninfer.frontend.prompt import PromptBuilder
from ninfer.frontend.prompt_size import check_num_messages
from ninfer.frontend.stops import StopMatcher
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.tokenizer import (
    THINK_CLOSE,
    THINK_OPEN,
    TOKENIZER_FILE,
    TextTokenizer,
    replace_surrogates,
)
from ninfer.frontend.tool_calls.call_format import CALL_CLOSE, CALL_OPEN, JsonCallFormat
from ninfer.frontend.tool_calls.call_state import CallRules
from ninfer.frontend.tool_calls.parameter_types import DeclaredTools
from ninfer.options import SamplingOptions

UNLIMITED_TOKENS: Final = 2**31 - 1
"""Output budget of a request that names none: the context limit ends it."""
_SCAFFOLDING: Final = 20
"""Characters that a template writes round a message, about."""
_SEED_MASK: Final = 2**64 - 1
_CONSTANT_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
T = TypeVar("T")


class ModelFrontend:
    """Text and tokens of one model; see contract Frontend."""

    def __init__(
        self, config: ModelConfig, resources: FrontendResources, defaults: SamplingOptions
    ) -> None:
        """Raises ModelFileError for a bad tokenizer, chat template or generation_config."""
        self._vocab_size = config.vocab_size
        self._options = defaults
        self._model = read_generation_config(
            resources.generation_config, resources.folder / GENERATION_CONFIG_FILE
        )
        self._tokenizer = _load_tokenizer(config, resources)
        self._eos_ids = checked_eos_ids(config, self._model, self._tokenizer, resources.folder)
        self._renderer = _load_renderer(resources, self._tokenizer)
        self._prompts = PromptBuilder(config.vocab_size, None, self._tokenizer, self._renderer)
        self._guides = Guides(
            self._tokenizer,
            config.vocab_size,
            self._eos_ids,
            JsonCallFormat() if self._renderer is None else self._renderer.call_format,
        )
        self._max_context: int | None = None
        self._template_defaults: Mapping[str, Any] = {}
        self._work = HostWork()

    def for_context(self, max_context: int | None) -> ModelFrontend:
        """The same frontend, but prompts of more than `max_context` tokens are refused; with None,
        as it is made, it takes any length."""
        frontend = copy.copy(self)
        frontend._prompts = self._prompts.for_context(max_context)
        frontend._max_context = max_context
        return frontend

    def with_template_defaults(self, template_kwargs: Mapping[str, Any]) -> ModelFrontend:
        """The same frontend, but these template variables are set where a prompt does not."""
        frontend = copy.copy(self)
        frontend._template_defaults = {**self._template_defaults, **template_kwargs}
        return frontend

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self._renderer is not None

    async def prepare_chat(self, chat: ChatPrompt) -> PreparedPrompt:
        """Render and tokenise. Raises RequestError: invalid_template, invalid_prompt,
        unsupported_value (media), tokenizer_unavailable, context_length_exceeded."""
        self.check_num_messages(len(chat.messages))
        chat = self._with_defaults(chat)
        return await self._work.run(partial(self._prompts.from_chat, chat), _num_characters(chat))

    def check_num_messages(self, num_messages: int, param: str = "messages") -> None:
        """Raises RequestError, context_length_exceeded, when so many messages cannot fit."""
        check_num_messages(num_messages, self._max_context, param)

    async def render_chat(self, chat: ChatPrompt) -> str:
        """The text `prepare_chat` tokenises; control marks in it need not be control tokens."""
        chat = self._with_defaults(chat)
        return await self._work.run(partial(self._prompts.render, chat), _num_characters(chat))

    def _with_defaults(self, chat: ChatPrompt) -> ChatPrompt:
        kwargs = {**self._template_defaults, **chat.template_kwargs}
        return replace(chat, template_kwargs=kwargs) if self._template_defaults else chat

    async def prepare_text(
        self, text: str, param: str = "prompt", *, parses_special: bool = True
    ) -> PreparedPrompt:
        """Raw text; special tokens in it are parsed, or with False taken as plain characters.
        Raises RequestError naming `param`: invalid_prompt, tokenizer_unavailable,
        context_length_exceeded."""
        prepare = partial(self._prompts.from_text, text, param, parses_special=parses_special)
        return await self._work.run(prepare, len(text))

    def prepare_ids(self, token_ids: Sequence[int], param: str = "input_ids") -> PreparedPrompt:
        """Ids as they are. Raises RequestError naming `param`: invalid_value when empty or outside
        the vocabulary, context_length_exceeded."""
        return self._prompts.from_ids(token_ids, param)

    def build_request(
        self, request_id: str, prompt: PreparedPrompt, params: GenerationParams, *, now: float
    ) -> GenerationRequest:
        """Resolve defaults: request > options > generation_config > neutral.

        Neutral samples from the model's own distribution: temperature 1, nothing cut, no penalty.
        Raises RequestError (`invalid_value`) for ids outside the vocabulary.
        """
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias))
        eos_ids = () if params.ignore_eos else self._eos_ids
        stop_ids = tuple(sorted({*eos_ids, *params.stop_token_ids}))
        max_tokens = _first(params.max_tokens, self._options.max_tokens, UNLIMITED_TOKENS)
        session = TextOutputSession(self._session_rules(prompt, params, frozenset(stop_ids)))
        guide = self._guides.guide(
            prompt,
            params,
            end_ids=frozenset(stop_ids),
            budget=_first(params.thinking_budget, self._options.thinking_budget, None),
            max_output=self._max_output(prompt, max_tokens),
        )
        suppresses_ends = params.min_tokens > 0 and not (guide and guide.decides_ends)
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=self._sampling(params),
            session=session if guide is None else GuidedSession(session, guide),
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            suppressed_ids=stop_ids if suppresses_ends else (),
            deadline_s=None if params.timeout_s is None else now + params.timeout_s,
            cache=params.cache,
            scoring=self._usable_scoring(prompt, params.scoring),
            mask=guide,
            prepare=None if guide is None else guide.prepare,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; b"" for an id without a text or without a tokenizer."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` decoded with replacement."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _check_ids(self, param: str, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    "invalid_value",
                    f"token id {token_id} is outside 0 to {self._vocab_size - 1}",
                    param,
                )

    def _max_output(self, prompt: PreparedPrompt, max_tokens: int) -> int:
        if self._max_context is None:
            return max_tokens
        return max(0, min(max_tokens, self._max_context - prompt.num_tokens))

    def _sampling(self, params: GenerationParams) -> SamplingParams:
        options, model = self._options, self._model
        temperature = _first(params.temperature, options.temperature, model.temperature, 1.0)
        seed = _first(params.seed, options.seed, None)
        return SamplingParams(
            temperature=_usable_temperature(temperature),
            top_k=self._usable_top_k(_first(params.top_k, options.top_k, model.top_k, 0)),
            top_p=_first(params.top_p, options.top_p, model.top_p, 1.0),
            min_p=_first(params.min_p, options.min_p, model.min_p, 0.0),
            presence_penalty=_first(
                params.presence_penalty, options.presence_penalty, model.presence_penalty, 0.0
            ),
            frequency_penalty=_first(
                params.frequency_penalty, options.frequency_penalty, model.frequency_penalty, 0.0
            ),
            repetition_penalty=_first(
                params.repetition_penalty, options.repetition_penalty, model.repetition_penalty, 1.0
            ),
            logit_bias=params.logit_bias
            + tuple((token_id, -math.inf) for token_id in self._guides.banned_ids(params.tools)),
            seed=secrets.randbits(64) if seed is None else seed & _SEED_MASK,
            top_logprobs=self._usable_top_logprobs(params.top_logprobs),
        )

    def _usable_top_logprobs(self, top_logprobs: int | None) -> int | None:
        return None if top_logprobs is None else min(top_logprobs, self._vocab_size)

    def _usable_scoring(
        self, prompt: PreparedPrompt, scoring: PromptScoring | None
    ) -> PromptScoring | None:
        """None when there is no token to score."""
        if scoring is None or scoring.first >= prompt.num_tokens:
            return None
        return PromptScoring(scoring.first, min(scoring.num_top, self._vocab_size))

    def _usable_top_k(self, top_k: int) -> int:
        return top_k if 0 < top_k < self._vocab_size else 0

    def _session_rules(
        self, prompt: PreparedPrompt, params: GenerationParams, stop_ids: frozenset[int]
    ) -> SessionRules:
        stops = tuple(replace_surrogates(stop) for stop in params.stop)
        return SessionRules(
            token_bytes=self.token_bytes,
            hidden_ids=self._hidden_ids(params),
            stop_ids=stop_ids,
            stops=StopMatcher(stops) if stops else None,
            min_tokens=params.min_tokens,
            includes_stop_string=params.include_stop_string,
            stops_in_reasoning=params.stop_in_reasoning,
            splits_reasoning=params.split_reasoning and _may_think(prompt, params),
            opens_in_reasoning=prompt.opens_in_reasoning,
            reports_stop_token=params.reports_stop_token,
            calls=_call_rules(params.tools),
        )

    def _hidden_ids(self, params: GenerationParams) -> frozenset[int]:
        """Special tokens, except the marks that the session itself has to see."""
        tokenizer = self._tokenizer
        if tokenizer is None or not params.skip_special_tokens:
            return frozenset()
        marks = [THINK_OPEN, THINK_CLOSE] if params.split_reasoning else []
        marks += [CALL_OPEN, CALL_CLOSE] if _call_rules(params.tools) else []
        return tokenizer.special_ids - {tokenizer.added_id(mark) for mark in marks}


def _may_think(prompt: PreparedPrompt, params: GenerationParams) -> bool:
    """Where a grammar holds from the first token, <think> is part of the answer."""
    return prompt.opens_in_reasoning or params.constraint is None


def _call_rules(tools: ToolRules | None) -> CallRules | None:
    """None when no call may come: what looks like one is text."""
    if tools is None or tools.choice == "none":
        return None
    return CallRules(DeclaredTools(tools), tools.parallel)


def _num_characters(chat: ChatPrompt) -> int:
    """About how much text there is; every message counts, an empty one has its scaffolding. Of many
    messages the scaffolding alone is counted: it says enough, and this runs on the event loop."""
    least = _SCAFFOLDING * len(chat.messages)
    if least > MAX_SHARED_CHARACTERS:
        return least
    num_characters = least + sum(map(len, strings_of([chat.tools, chat.template_kwargs])))
    for message in chat.messages:
        num_characters += len(message.text) + len(message.reasoning_content or "")
        for call in message.tool_calls:
            num_characters += sum(map(len, strings_of(call.arguments)))
    return num_characters


def _first(*candidates: T | None) -> Any:
    """The first that is not None, else the last."""
    return next((value for value in candidates if value is not None), candidates[-1])


def _usable_temperature(temperature: float) -> float:
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, MIN_TEMPERATURE)


def _load_tokenizer(config: ModelConfig, resources: FrontendResources) -> TextTokenizer | None:
    if resources.tokenizer_json is None:
        return None
    path = resources.folder / TOKENIZER_FILE
    return TextTokenizer(resources.tokenizer_json, config.vocab_size, path=path)


def _load_renderer(
    resources: FrontendResources, tokenizer: TextTokenizer | None
) -> ChatRenderer | None:
    if resources.chat_template is None:
        return None
    path = resources.folder / resources.template_file
    template = ChatTemplate(resources.chat_template, _constant_tokens(resources), path=path)
    check_renders(template)
    if tokenizer is not None:
        check_marks(template, tokenizer, resources.folder)
    return ChatRenderer(template, tokenizer.control_texts if tokenizer else ())


def _constant_tokens(resources: FrontendResources) -> dict[str, str]:
    """eos_token and its like, which templates may use; each a text or {"content": text}."""
    result: dict[str, str] = {}
    for name in _CONSTANT_TOKENS:
        value = resources.tokenizer_config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            path = resources.folder / "tokenizer_config.json"
            raise ModelFileError(path, name, f"{value!r} is not a text")
        if value is not None:
            result[name] = value
    return result
