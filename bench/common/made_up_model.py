"""A model directory with made-up weights of real shapes and a vocabulary of words, to be served.

    python -m bench.common.made_up_model qwen3.5-4b DIR

The tokenizer is the demo model's, filled up with one word a token, so that any token is text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ninfer.cli.loading import embedded_model_path
from ninfer.contract.model import GdnConfig, ModelConfig
from ninfer.models.synthetic import SYNTHETIC_MODELS
from tests.helpers.checkpoints import (
    CheckpointSpec,
    Values,
    encode,
    hf_config,
    stored_shapes,
    write_json,
)

_PATTERN_VALUES: Final = (1 << 24) + 8
"""Not a multiple of a row: rows of a matrix differ."""
_STANDARD_DEVIATION: Final = 0.02
_COPIED: Final = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")


def write_model(folder: Path, name: str) -> int:
    """Write a dense hybrid of SYNTHETIC_MODELS; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = _spec(SYNTHETIC_MODELS[name])
    write_json(folder / "config.json", hf_config(spec))
    for file in _COPIED:
        shutil.copy(embedded_model_path() / file, folder / file)
    write_json(folder / "tokenizer.json", _tokenizer(spec.vocab_size))
    return _write_weights(folder / "model.safetensors", spec)


def _spec(config: ModelConfig) -> CheckpointSpec:
    att, gdn = config.attention, config.gdn
    if not isinstance(gdn, GdnConfig) or config.moe is not None:
        raise SystemExit("made up are dense hybrid models only")
    return CheckpointSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(config.layers),
        num_heads=att.num_heads,
        num_kv_heads=att.num_kv_heads,
        head_dim=att.head_dim,
        intermediate_size=config.intermediate_size,
        gdn_key_heads=gdn.num_key_heads,
        gdn_value_heads=gdn.num_value_heads,
        gdn_key_dim=gdn.key_head_dim,
        gdn_value_dim=gdn.value_head_dim,
        is_tied=config.tie_word_embeddings,
        mrope_section=att.rope.mrope_section,
        rope_theta=att.rope.theta,
        max_position_embeddings=config.max_position_embeddings,
    )


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    text = (embedded_model_path() / "tokenizer.json").read_text()
    tokenizer: dict[str, Any] = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    # Added tokens keep their ids only when the vocabulary has them too.
    vocabulary.update({item["content"]: item["id"] for item in tokenizer["added_tokens"]})
    first = 1 + max(vocabulary.values())
    vocabulary.update({f"Ġword{token_id}": token_id for token_id in range(first, vocab_size)})
    return tokenizer


def _write_weights(path: Path, spec: CheckpointSpec) -> int:
    header: dict[str, Any] = {}
    size = 0
    for name, shape in stored_shapes(spec):
        stop = size + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [size, stop]}
        size = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in _pattern(size):
            file.write(part)
    return size


def _pattern(size: int) -> Iterator[memoryview]:
    values: Values = np.random.default_rng(0).standard_normal(_PATTERN_VALUES, np.float32)
    values *= np.float32(_STANDARD_DEVIATION)
    block = memoryview(encode(values, "BF16").data)
    for start in range(0, size, len(block)):
        yield block[: min(len(block), size - start)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SYNTHETIC_MODELS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(f"{write_model(arguments.folder, arguments.name):,} bytes of weights")


if __name__ == "__main__":
    main()
