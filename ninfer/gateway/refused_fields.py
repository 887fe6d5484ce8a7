"""Fields of the known APIs that change what an answer means and that are not supported.

Dropping one silently would break a promise, so each is a 400 that names it; fields that only
advise are ignored elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ninfer.gateway.fields import Fields, unsupported_parameter

_CONSTRAINTS: Final = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
)
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    # which model, and which context
    "lora_path": (),
    "session_params": (),
    "truncate_prompt_tokens": (),
    # which tokens may come, and where the answer ends
    "allowed_token_ids": ([],),
    "bad_words": ([], ""),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "logits_processors": ([],),
    "no_repeat_ngram_size": (0,),
    "stop_regex": ([], ""),
    # how tokens are drawn
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "typical_p": (0, 1),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    # what the answer reports
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "token_ids_logprob": ([],),
}
"""Values that ask for nothing, beside null: clients send some of these fields always."""


def refuse_unsupported(fields: Fields, *, takes_constraints: bool = False) -> None:
    """Raises RequestError `unsupported_parameter` naming the field. `takes_constraints`: the
    spellings of structured output are read elsewhere."""
    for name in () if takes_constraints else _CONSTRAINTS:
        refuse(fields, name, ("", False), "this API asks for structured output in another field")
    refuse(fields, "structural_tag", ("",), "use tools instead")
    for name, neutral in _NEUTRAL.items():
        refuse(fields, name, neutral, "the answer would not honour it")


def refuse(fields: Fields, name: str, neutral: tuple[Any, ...], why: str) -> None:
    """Refuse a field unless it is absent, null or one of `neutral`."""
    value = fields.get(name)
    if value is not None and not any(_is_same(value, item) for item in neutral):
        raise unsupported_parameter(fields.path_of(name), why)


def _is_same(value: object, other: object) -> bool:
    """Equal, without 0 being false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
