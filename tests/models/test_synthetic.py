"""The sizes of synthetic models give the published numbers of parameters."""

from __future__ import annotations

from math import prod

import pytest

from ninfer.contract.model import MixerKind
from ninfer.models.parameters import model_objects
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.options import BenchOptions, specs_of

BILLIONS = {
    "qwen3.5-0.8b": 0.752,
    "qwen3.5-2b": 1.882,
    "qwen3.5-4b": 4.206,
    "qwen3.5-9b": 8.954,
    "qwen3.5-27b": 26.896,
    "qwen3.5-35b-a3b": 34.661,
    "qwen3-8b": 8.191,
}


def test_the_option_names_all_of_them() -> None:
    assert specs_of(BenchOptions)["synthetic"].choices == tuple(SYNTHETIC_MODELS)


@pytest.mark.parametrize("name", SYNTHETIC_MODELS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    """Those of the text model; the hybrid families have an MTP module of one layer besides."""
    objects = model_objects(SYNTHETIC_MODELS[name])
    count = sum(prod(item.shape) for item in objects if item.component == "text")
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=6e-4)
    has_module = any(item.component == "mtp" for item in objects)
    assert has_module == name.startswith("qwen3.5")


@pytest.mark.parametrize("name", SYNTHETIC_MODELS)
def test_layers_of_a_kind_are_counted_without_gaps(name: str) -> None:
    layers = SYNTHETIC_MODELS[name].layers
    assert [layer.index for layer in layers] == list(range(len(layers)))
    for kind in MixerKind:
        indices = [layer.kind_index for layer in layers if layer.mixer is kind]
        assert indices == list(range(len(indices)))
