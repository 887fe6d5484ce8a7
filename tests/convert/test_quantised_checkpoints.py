"""Quantised checkpoints as float32, as codes, and through an artifact; and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.weights import WeightEncoding
from ninfer.convert.opened_model import OpenedModel
from ninfer.convert.source import open_model
from tests.helpers.model_paths import golden_model
from tests.helpers.quantised_checkpoints import LAYOUTS, decode_checkpoint, quantise_checkpoint

CASES = ("qwen3-dense", "qwen3-moe", "qwen3-vl", "qwen3_5-dense", "qwen3_5-moe")
ROUNDINGS = 2 * 2.0**-23


def pair(tmp_path: Path, case: str, layout: str) -> tuple[OpenedModel, OpenedModel]:
    """The quantised golden, and its numbers by the independent formula."""
    source = golden_model(case)
    return (
        open_model(quantise_checkpoint(source, tmp_path / "q", layout)),
        open_model(decode_checkpoint(source, tmp_path / "f", layout)),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_decoded_to_the_numbers_it_stands_for(
    tmp_path: Path, case: str, layout: str
) -> None:
    quantised, plain = pair(tmp_path, case, layout)
    expected = {item.name: values for item, values in plain.read_float32()}
    found = {item.name: values for item, values in quantised.read_float32()}
    assert list(found) == list(expected)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=ROUNDINGS, atol=0, err_msg=name)
    kinds = {band.encoding for bands in quantised.bands.values() for band in bands}
    assert kinds - {WeightEncoding.FLOAT}
