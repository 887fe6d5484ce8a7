"""Conversation -> text by the checkpoint's own template, whatever clients put into it.

    settle spellings (conversation.py)  ->  break up literal control marks (control_text.py)
      ->  stand in for turns the template refuses  ->  render  ->  put the real turns in place

Stand-ins, for templates that raise (template_traits.py finds out):

* A system message after the first turn is given to the template as a user turn that holds one
  placeholder inside tool-response marks: such a turn is no question, so the template's rule which
  thoughts of earlier turns are kept does not move. Its rendered block is then replaced by a system
  block, in place, with the frame that the template itself gives a leading system message.
* A conversation without a user message gets an empty one at its start, whose block is cut out.
* For templates that insist on alternating roles, neighbours of one role are joined by a blank line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ninfer.contract.abandonment import stop_if_abandoned
from ninfer.contract.chat import ChatMessage, ChatPrompt, TextPart
from ninfer.contract.errors import RequestError
from ninfer.frontend.control_text import (
    ControlMarks,
    GuardedText,
    map_strings,
    strings_of,
    unused_characters,
    with_guard_unescaped,
)
from ninfer.frontend.conversation import (
    SYSTEM_SEPARATOR,
    TemplateMessage,
    num_leading_system,
    template_messages,
)
from ninfer.frontend.places import CacheMark, RenderedTurns, TextPlace
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.template_traits import TemplateTraits, TurnFrame, probe_template
from ninfer.frontend.tokenizer import replace_surrogates
from ninfer.frontend.tool_calls.call_format import CallFormat, find_call_format


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation's text, and places in `text.text` where others will part from it."""

    text: GuardedText
    places: Sequence[TextPlace]


@dataclass(slots=True)
class _Draft:
    """A conversation on its way into the template."""

    messages: list[TemplateMessage]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    placeholders: Iterator[str]
    guard: str | None = None
    replacements: list[tuple[str, str]] = field(default_factory=list)
    """(block the template will write, text to put there)"""


class ChatRenderer:
    """Renders ChatPrompts; safe to use from several threads."""

    def __init__(self, template: ChatTemplate, control_texts: Sequence[str]) -> None:
        self._template = template
        self._marks = ControlMarks(control_texts)
        self._traits: TemplateTraits = probe_template(template)
        self.call_format: CallFormat = find_call_format(template)

    def render(self, chat: ChatPrompt) -> GuardedText:
        """Raises RequestError: `invalid_template` with the template's own message,
        `invalid_prompt`, `unsupported_value`."""
        draft = self._draft(chat)
        opening_end = _leave_open(draft) if chat.continue_final_message else None
        return self._finish(draft, chat.add_generation_prompt, opening_end)

    def render_with_places(self, chat: ChatPrompt) -> RenderedChat:
        """`render`, with the places of its text. Raises the same."""
        draft = self._draft(chat)
        messages = tuple(draft.messages)
        opening_end = _leave_open(draft) if chat.continue_final_message else None
        text = self._finish(draft, chat.add_generation_prompt, opening_end)
        turns = RenderedTurns(
            text=text.text,
            messages=messages,
            user_frame=self._traits.user_frame,
            opener=lambda: self._opener(draft.template_kwargs),
            render_first=lambda count: self._render_others(draft, messages[:count]),
            render_parted=lambda count: self._render_others(draft, messages[:count], parts=True),
            has_tools=bool(draft.tools),
            tools_marked=chat.tools_end_prefix,
            is_continued=opening_end is not None,
            is_opened=chat.add_generation_prompt,
            marks=_cache_marks(chat, lambda part: self._settled(part, draft.guard)),
        )
        return RenderedChat(text, turns.places())

    def _finish(
        self, draft: _Draft, add_generation_prompt: bool, opening_end: str | None
    ) -> GuardedText:
        stop_if_abandoned()
        self._stand_in(draft)
        text = self._template.render(
            draft.messages,
            tools=draft.tools,
            template_kwargs=draft.template_kwargs,
            add_generation_prompt=add_generation_prompt and opening_end is None,
        )
        text = replace_surrogates(text)
        for block, replacement in draft.replacements:
            text = _replace_once(text, block, replacement)
        if opening_end is not None:
            text = _cut_at(text, opening_end)
        return with_guard_unescaped(text, draft.guard) if draft.guard else GuardedText(text)

    def _render_others(
        self, draft: _Draft, messages: Sequence[TemplateMessage], *, parts: bool = False
    ) -> str | None:
        """What another conversation of these messages would be; with `parts` it goes on with a
        question that begins like no other."""
        others = [dict(message) for message in messages]
        try:
            if parts:
                others.append({"role": "user", "content": next(draft.placeholders)})
            return self._finish(replace(draft, messages=others, replacements=[]), False, None).text
        except RequestError:
            return None

    def _opener(self, template_kwargs: Mapping[str, Any]) -> str | None:
        """What the template writes for a new answer; None when it takes more than a user's turn to
        find out."""
        turns = [{"role": "user", "content": "."}]
        try:
            closed, opened = (
                self._template.render(
                    turns, template_kwargs=template_kwargs, add_generation_prompt=is_open
                )
                for is_open in (False, True)
            )
        except RequestError:
            return None
        return opened.removeprefix(closed) if opened.startswith(closed) else None

    def _settled(self, text: str, guard: str | None) -> str:
        text = replace_surrogates(text)
        return self._marks.break_up(text, guard) if guard is not None else text

    def _draft(self, chat: ChatPrompt) -> _Draft:
        value: Any = [template_messages(chat.messages), chat.tools, chat.template_kwargs]
        try:
            value = map_strings(value, replace_surrogates)
        except RecursionError:
            raise RequestError("invalid_prompt", "nested too deeply", "messages") from None
        messages, tools, template_kwargs = value
        texts = list(strings_of(value))
        placeholders = unused_characters([*texts, self._template.source])
        draft = _Draft(messages, tools, template_kwargs, placeholders)
        if self._marks.occur_in(texts):
            self._guard(draft)
        return draft

    def _guard(self, draft: _Draft) -> None:
        guard = next(draft.placeholders)

        def break_up(text: str) -> str:
            return self._marks.break_up(text, guard)

        draft.guard = guard
        draft.messages = map_strings(draft.messages, break_up)
        draft.tools = map_strings(draft.tools, break_up)
        draft.template_kwargs = map_strings(draft.template_kwargs, break_up)

    def _stand_in(self, draft: _Draft) -> None:
        traits = self._traits
        if not traits.takes_repeated_role:
            draft.messages = _join_neighbours(draft.messages)
        if traits.user_frame is None:
            return
        if not traits.places_late_system and traits.system_frame is not None:
            _replace_late_system(draft, traits.user_frame, traits.system_frame)
        if not traits.takes_no_user:
            _add_missing_user(draft, traits.user_frame)


def _replace_late_system(draft: _Draft, user: TurnFrame, system: TurnFrame) -> None:
    for index, message in enumerate(draft.messages):
        if index == 0 or message["role"] != "system":
            continue
        stand_in = f"<tool_response>\n{next(draft.placeholders)}\n</tool_response>"
        draft.messages[index] = {"role": "user", "content": stand_in}
        block = system.around(message["content"].strip())
        draft.replacements.append((user.around(stand_in), block))


def _add_missing_user(draft: _Draft, user: TurnFrame) -> None:
    stand_ins = {block for block, _ in draft.replacements}
    for message in draft.messages:
        if message["role"] == "user" and user.around(message["content"]) not in stand_ins:
            return
    stand_in = next(draft.placeholders)
    place = 1 if draft.messages[0]["role"] == "system" else 0
    draft.messages.insert(place, {"role": "user", "content": stand_in})
    draft.replacements.append((user.around(stand_in), ""))


def _join_neighbours(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Join plain user and assistant texts of one role that follow each other."""
    result: list[TemplateMessage] = []
    for message in messages:
        if result and _is_joinable(result[-1], message):
            contents = (result[-1]["content"], message["content"])
            joined = "\n\n".join(content for content in contents if content)
            result[-1] = {**result[-1], "content": joined}
        else:
            result.append(message)
    return result


def _is_joinable(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    plain = {"role", "content"}
    return (
        left["role"] == right["role"]
        and left["role"] in ("user", "assistant")
        and left.keys() | right.keys() == plain
    )


def _leave_open(draft: _Draft) -> str:
    """Mark the place in the last assistant turn where the model is to go on."""
    message = draft.messages[-1]
    if message["role"] != "assistant":
        raise RequestError(
            "invalid_prompt", "only a last message of the assistant can be continued", "messages"
        )
    if message.get("tool_calls"):
        raise RequestError(
            "invalid_prompt", "a message with tool calls cannot be continued", "messages"
        )
    end = next(draft.placeholders)
    is_thought = not message["content"] and message.get("reasoning_content")
    key = "reasoning_content" if is_thought else "content"
    message[key] += end
    return end


def _replace_once(text: str, block: str, replacement: str) -> str:
    before, found, after = text.partition(block)
    if not found:
        raise RequestError(
            "invalid_template", "the chat template does not render every turn", "messages"
        )
    return before + replacement + after


def _cut_at(text: str, end: str) -> str:
    before, found, _ = text.partition(end)
    if not found:
        raise RequestError(
            "invalid_template",
            "the chat template does not render the last assistant message",
            "messages",
        )
    return before


def _cache_marks(chat: ChatPrompt, settle: Callable[[str], str]) -> list[CacheMark]:
    """The client's marks, in terms of the template's messages."""
    num_leading = num_leading_system(chat.messages)
    leading = [message for message in chat.messages[:num_leading] if message.text]
    marks = []
    said = ""
    for number, message in enumerate(leading):
        is_last = number == len(leading) - 1
        marks += _marks_of(message, 0, said, settle, is_last=is_last)
        said += message.text + SYSTEM_SEPARATOR
    shift = num_leading - 1 if num_leading else 0
    for index, message in enumerate(chat.messages[num_leading:], num_leading):
        marks += _marks_of(message, index - shift, "", settle, is_last=True)
    return marks


def _marks_of(
    message: ChatMessage, index: int, said: str, settle: Callable[[str], str], *, is_last: bool
) -> list[CacheMark]:
    """`said`: what comes before it in the same turn; `is_last`: nothing comes after it there."""
    marks = []
    for number, part in enumerate(message.content, 1):
        text = part.text if isinstance(part, TextPart) else ""
        said += text
        if isinstance(part, TextPart) and part.ends_prefix:
            ends = is_last and number == len(message.content)
            marks.append(CacheMark(index, settle(said), ends))
    return marks
