"""What tokenizer, template and configuration say of the same tokens must agree; checked at load.

A mark that the template writes and the tokenizer splits into letters, or an end token that the
tokenizer does not have, loads well and answers badly; a template that renders nothing answers
nobody.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import ModelConfig
from ninfer.frontend.generation_defaults import GENERATION_CONFIG_FILE, GenerationDefaults
from ninfer.frontend.template import ChatTemplate, Refusal
from ninfer.frontend.tokenizer import TOKENIZER_FILE, TextTokenizer

CONFIG_FILE: Final = "config.json"
_MARK: Final = re.compile(r"<\|[^<>|\s]+\|>")
_QUESTION: Final = ({"role": "user", "content": "Hello"},)

_SAID: Final = "4817350629"
"""A text that no filter changes and no template contains."""
_USER: Final = {"role": "user", "content": _SAID}
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_ANSWER: Final = {"role": "assistant", "content": "Yes."}
_SIMPLE: Final = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ANSWER, _USER),
    (_SYSTEM, _USER, _ANSWER, _USER),
)
"""Conversations of which a usable template renders at least one."""


def checked_eos_ids(
    config: ModelConfig,
    defaults: GenerationDefaults,
    tokenizer: TextTokenizer | None,
    folder: Path,
) -> tuple[int, ...]:
    """The ids in force: those of generation_config, else of config.json.

    Ids outside the vocabulary are left out, since nothing can generate them. Raises ModelFileError
    when none is left then, and for an id in the part of the vocabulary that only pads the matrices,
    where the tokenizer has no token.
    """
    ids, path = defaults.eos_token_ids, folder / GENERATION_CONFIG_FILE
    if ids is None:
        ids, path = config.eos_token_ids, folder / CONFIG_FILE
    usable = tuple(token_id for token_id in dict.fromkeys(ids) if token_id < config.vocab_size)
    if ids and not usable:
        message = f"{ids[0]} is outside 0 to {config.vocab_size - 1}"
        raise ModelFileError(path, "eos_token_id", message)
    for token_id in usable:
        if tokenizer is not None and not tokenizer.token_bytes(token_id):
            message = f"{token_id} is no token of {TOKENIZER_FILE}"
            raise ModelFileError(path, "eos_token_id", message)
    return usable


def check_marks(template: ChatTemplate, tokenizer: TextTokenizer, folder: Path) -> None:
    """Raises ModelFileError for a mark (`<|im_start|>`) that the template writes round a question
    and that is not one token."""
    text = template.probe(_QUESTION, add_generation_prompt=True) or ""
    for mark in dict.fromkeys(_MARK.findall(text)):
        if len(tokenizer.encode(mark)) != 1:
            raise ModelFileError(
                folder / TOKENIZER_FILE,
                "added_tokens",
                f"{mark!r} is missing, which {template.path.name} writes",
            )


def check_renders(template: ChatTemplate) -> None:
    """Raises ModelFileError for a template that fails on every simple conversation, or leaves out
    what the user says."""
    outcomes = [template.attempt(messages, add_generation_prompt=True) for messages in _SIMPLE]
    if any(isinstance(outcome, str) and _SAID in outcome for outcome in outcomes):
        return
    match outcomes[0]:
        case Refusal(reason, line):
            raise template.error(f"unusable: it renders no conversation: {reason}", line)
        case _:
            raise template.error("unusable: it leaves out the message of the user")
