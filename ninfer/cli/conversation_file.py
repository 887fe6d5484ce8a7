"""Saved conversations: a JSON file with messages, settings and what wrote it.

{"format": "ninfer-conversation", "version": 1, "model": NAME,
 "messages": [OpenAI messages, the system message first], "think": true | false | null,
 "settings": {"temperature": 0.7, ...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ninfer.cli.conversation import Conversation
from ninfer.cli.input_files import parse_json, read_file
from ninfer.cli.message_json import dump_message, read_messages
from ninfer.cli.output_files import write_file
from ninfer.contract.errors import OptionError, RequestError

_FORMAT: Final = "ninfer-conversation"
_VERSION: Final = 1


def dump_conversation(conversation: Conversation, model_name: str) -> bytes:
    """What `load_conversation` reads back."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model_name,
        "messages": [dump_message(message) for message in conversation.all_messages()],
        "think": conversation.think,
        "settings": conversation.settings,
    }
    text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    # A lone surrogate becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace")


def save_conversation(path: Path, data: bytes) -> None:
    """Blocking. Write whole or not at all. Raises OutputError."""
    write_file("/save", path, lambda file: file.write(data))


def load_conversation(path: Path) -> Conversation:
    """Blocking. Raises OptionError that names the file and what is wrong with it."""
    document = parse_json("/load", read_file("/load", path), str(path))
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise OptionError("/load", f"{path} is not a saved conversation")
    if document.get("version") != _VERSION:
        raise OptionError("/load", f"{path} has version {document.get('version')}, not {_VERSION}")
    try:
        return _parse(document)
    except (OptionError, RequestError) as error:
        raise OptionError("/load", f"{path}: {error}") from error


def _parse(document: Mapping[str, Any]) -> Conversation:
    think, settings = document.get("think"), document.get("settings")
    if think is not None and not isinstance(think, bool):
        raise OptionError("think", "true, false or null is needed")
    if not isinstance(settings, dict):
        raise OptionError("settings", "an object is needed")
    messages = document.get("messages")
    is_empty = isinstance(messages, list) and not messages
    conversation = Conversation(
        think=think, messages=[] if is_empty else list(read_messages(messages).messages)
    )
    if conversation.messages and conversation.messages[0].role == "system":
        conversation.system = conversation.messages.pop(0).text
    for name, value in settings.items():
        conversation.set(name, str(value))
    return conversation
