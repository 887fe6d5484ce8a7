"""What the speculation options ask of a load: components, a draft model or none, lengths.

Used by the planner and by the loaders of both executors.
"""

from __future__ import annotations

from typing import Final

from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig
from ninfer.options import EngineOptions, flag_of

_DEFAULT_DRAFT_TOKENS: Final = 7
"""Room for copies. How much of it is worth its time, chains of a module too, is found while
running."""


def has_draft_model(options: EngineOptions) -> bool:
    """Whether a model drafts, and not the text alone."""
    return options.spec not in ("none", "ngram")


def draft_tokens(options: EngineOptions) -> int:
    """Most drafted tokens of a row, 0 without speculation. Raises OptionError for a length where
    nothing drafts."""
    wanted = options.draft_tokens
    if options.spec == "none":
        if wanted is not None:
            raise OptionError(flag_of("draft_tokens"), f"it is for --spec, which is {options.spec}")
        return 0
    return _DEFAULT_DRAFT_TOKENS if wanted is None else wanted


def components_of(config: ModelConfig, options: EngineOptions) -> tuple[str, ...]:
    """Components of the model that are read. Raises OptionError for an MTP module that the model
    lacks or that cannot be used."""
    if options.spec != "mtp":
        return ("text",)
    if config.num_mtp_layers == 0:
        raise OptionError(
            flag_of("spec"), "mtp needs an MTP module, and the model's files have none"
        )
    if config.num_mtp_layers > 1:
        raise OptionError(
            flag_of("spec"),
            f"mtp is for a module of one layer, and the model's has {config.num_mtp_layers}",
        )
    return ("text", "mtp")
