"""`--spec dflash`: from `--draft-model` to a DflashModel, and what it costs.

The draft model is opened, and held against its target, before anything is planned. Its weights are
read behind the target's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ninfer.contract.arrays import Float32Array
from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelConfig, ModelSource
from ninfer.contract.units import Capacity
from ninfer.convert.dflash_checkpoint import OpenedDflash, open_dflash
from ninfer.convert.resources import num_token_ids
from ninfer.models.dflash_config import DflashConfig, target_mismatch
from ninfer.options import EngineOptions, flag_of
from ninfer.program.executors.cpu import PASS_TOKENS
from ninfer.program.executors.cpu_dflash import DflashModel
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.executors.draft_shape import dflash_shape
from ninfer.program.memory_costs import FLOAT32_BYTES, CpuCosts, object_bytes
from ninfer.program.model_fingerprint import model_fingerprint

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class DflashDraft:
    """An opened draft model of a target with so many token ids."""

    opened: OpenedDflash
    num_token_ids: int

    @property
    def weights_bytes(self) -> int:
        return sum(map(object_bytes, self.opened.objects))

    @property
    def num_parameters(self) -> int:
        return sum(prod(item.shape) for item in self.opened.objects)

    @property
    def setup(self) -> DflashSetup:
        opened = self.opened
        return DflashSetup(opened.config, opened.objects, opened.token_ids, self.num_token_ids)

    def fingerprint(self, numbers: str) -> str:
        """Of all that decides the keys in its pages, computed in `numbers`. Raises OSError."""
        return model_fingerprint(self.opened, numbers)

    def costs(self, config: ModelConfig) -> CpuCosts:
        """Of the target with this draft."""
        dflash = self.opened.config
        return DflashCosts(config, dflash_shape(dflash), dflash=dflash)

    def behind(self, progress: Progress) -> Progress:
        """For the target's weights: a total that has the draft's in it."""
        more = self.weights_bytes
        return lambda stage, done, total: progress(stage, done, total + more)

    def read(self, progress: Progress, done_bytes: int) -> Iterator[tuple[str, Float32Array]]:
        """(name, weight) of every object, behind `done_bytes` of the target. Raises
        ModelFileError."""
        total = done_bytes + self.weights_bytes
        for item, array in self.opened.read_float32():
            yield item.name, array
            done_bytes += object_bytes(item)
            progress("weights", done_bytes, total)

    def load(self, progress: Progress, done_bytes: int) -> DflashModel:
        """The model of the CPU executor. Raises ModelFileError."""
        weights, opened = dict(self.read(progress, done_bytes)), self.opened
        return DflashModel(opened.config, weights, opened.token_ids, self.num_token_ids)


def open_dflash_draft(source: ModelSource, options: EngineOptions) -> DflashDraft | None:
    """What `--draft-model` names; None without `--spec dflash`. Raises OptionError when one of the
    two is given alone, or when the draft is for another model; ModelFileError."""
    flag = flag_of("draft_model")
    if options.spec != "dflash":
        if options.draft_model is not None:
            raise OptionError(flag, f"it is for --spec dflash, and --spec is {options.spec}")
        return None
    if options.draft_model is None:
        raise OptionError(flag, "--spec dflash needs it: the directory of a DFlash draft model")
    folder = Path(options.draft_model)
    _check_folder(folder)
    opened = open_dflash(folder)
    problem = target_mismatch(opened.config, source.config)
    if problem is not None:
        raise OptionError(flag, f"{options.draft_model} does not fit {source.name}: {problem}")
    count = _num_token_ids(source)
    if opened.token_ids is not None and opened.token_ids.min() >= count:
        raise OptionError(flag, f"{options.draft_model} guesses no token of {source.name}")
    return DflashDraft(opened, count)


def _check_folder(folder: Path) -> None:
    """Raises OptionError for what is no directory, or one that cannot be looked into."""
    flag = flag_of("draft_model")
    try:
        names = os.listdir(folder)
    except NotADirectoryError as error:
        raise OptionError(
            flag, f"{folder} is a file; a draft model is a directory, as published"
        ) from error
    except OSError as error:
        raise OptionError(flag, f"{folder}: {error.strerror or error}") from error
    if not names:
        raise OptionError(flag, f"{folder} is empty")


def with_draft_tokens(options: EngineOptions, draft: DflashDraft) -> EngineOptions:
    """Options that say how many tokens are drafted: by default as many as the draft was trained
    for. Raises OptionError for more."""
    trained = draft.opened.config.block_size - 1
    wanted = options.draft_tokens
    if wanted is not None and wanted > trained:
        raise OptionError(
            flag_of("draft_tokens"), f"{wanted}: the draft model guesses at most {trained}"
        )
    if wanted is None:
        wanted = min(trained, MAX_DRAFT_TOKENS)
    return dataclasses.replace(options, draft_tokens=wanted)


def _num_token_ids(source: ModelSource) -> int:
    vocab_size = source.config.vocab_size
    tokenizer_json = source.resources.tokenizer_json
    if tokenizer_json is None:
        return vocab_size
    return min(num_token_ids(tokenizer_json), vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DflashCosts(CpuCosts):
    """CpuCosts with the passes of a DFlash draft."""

    dflash: DflashConfig

    def _draft_workspace(self, capacity: Capacity, lanes: int) -> Mapping[str, int]:
        """Taps twice and their features of a pass; of blocks, inputs and the widest layer, scores
        over the context, logits and those of the tokens."""
        config = self.dflash
        att = config.attention
        num_tokens = max(min(capacity.prefill_chunk, PASS_TOKENS), lanes)
        taps = num_tokens * config.hidden_size * (2 * len(config.tap_layers) + 2)
        widest = max(2 * config.intermediate_size, (att.num_heads + 3) * att.head_dim)
        block = 1 + capacity.max_draft_tokens
        scores = block * att.num_heads + 2 * att.num_kv_heads * att.head_dim
        blocks = lanes * (4 * config.hidden_size + 2 * widest + 3 * config.vocab_size)
        values = taps + max(blocks, scores * capacity.max_context)
        return {"draft_bytes": values * FLOAT32_BYTES}
