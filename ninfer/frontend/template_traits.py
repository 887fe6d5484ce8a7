"""What a chat template can do by itself, found out once by rendering small conversations.

Strict templates refuse ordinary client input: a system message after the first turn, no user
message at all, two user messages in a row. The answers here depend on the template alone, never on
a conversation, so that a history is always rendered in the same way while it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.frontend.conversation import TemplateMessage
from ninfer.frontend.template import ChatTemplate

_FIRST, _SECOND, _THIRD, _FOURTH = "\U000f0001", "\U000f0002", "\U000f0003", "\U000f0004"


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """What the template writes round the text of a turn."""

    head: str
    tail: str

    def around(self, text: str) -> str:
        return self.head + text + self.tail


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Abilities and frames.

    places_late_system   a system message after the first turn is rendered there
    takes_no_user        a conversation without a user message is rendered
    takes_repeated_role  two messages of one role may follow each other
    user_frame, system_frame   None when the template's turns have no fixed frame
    """

    places_late_system: bool
    takes_no_user: bool
    takes_repeated_role: bool
    user_frame: TurnFrame | None
    system_frame: TurnFrame | None


def probe_template(template: ChatTemplate) -> TemplateTraits:
    """Raises ModelFileError when the template exceeds its bounds on a few words."""
    user_frame, lead = _user_frame(template)
    return TemplateTraits(
        places_late_system=_places_late_system(template),
        takes_no_user=_takes_no_user(template),
        takes_repeated_role=_takes_repeated_role(template),
        user_frame=user_frame,
        system_frame=_system_frame(template, user_frame, lead) if user_frame else None,
    )


def _message(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


def _probe(template: ChatTemplate, messages: Sequence[TemplateMessage]) -> str | None:
    return template.probe(messages, add_generation_prompt=False)


def _places_late_system(template: ChatTemplate) -> bool:
    text = _probe(
        template,
        [
            _message("user", _FIRST),
            _message("assistant", _SECOND),
            _message("system", _THIRD),
            _message("user", _FOURTH),
        ],
    )
    if text is None:
        return False
    places = [text.find(mark) for mark in (_FIRST, _SECOND, _THIRD, _FOURTH)]
    return min(places) >= 0 and places == sorted(places)


def _takes_no_user(template: ChatTemplate) -> bool:
    system, assistant = _message("system", _FIRST), _message("assistant", _SECOND)
    conversations = ([system], [assistant], [system, assistant])
    return all(_probe(template, messages) is not None for messages in conversations)


def _takes_repeated_role(template: ChatTemplate) -> bool:
    once, twice = [_message("user", _FIRST)], [_message("user", _FIRST), _message("user", _SECOND)]
    return _probe(template, twice) is not None or _probe(template, once) is None


def _user_frame(template: ChatTemplate) -> tuple[TurnFrame | None, str]:
    """The frame, and what the template writes before the first turn (a BOS mark, for example)."""
    text = _probe(template, [_message("user", _FIRST), _message("user", _SECOND)])
    if text is None or _FIRST not in text or _SECOND not in text:
        return None, ""
    lead, _, rest = text.partition(_FIRST)
    between, _, tail = rest.partition(_SECOND)
    head = between.removeprefix(tail)
    if not tail or not head or between == head or not lead.endswith(head):
        return None, ""
    return TurnFrame(head, tail), lead.removesuffix(head)


def _system_frame(template: ChatTemplate, user_frame: TurnFrame, lead: str) -> TurnFrame | None:
    text = _probe(template, [_message("system", _FIRST), _message("user", _SECOND)])
    if text is None or _FIRST not in text or _SECOND not in text:
        return None
    head, _, rest = text.partition(_FIRST)
    between = rest.partition(_SECOND)[0]
    tail = between.removesuffix(user_frame.head)
    return TurnFrame(head.removeprefix(lead), tail) if tail != between else None
