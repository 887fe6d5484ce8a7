"""Quantisation configurations: the scheme of every module, and what is refused by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.artifact.json_document import Fields
from ninfer.contract.errors import ModelFileError
from ninfer.models.quantisation import (
    Producer,
    Quantisation,
    WeightScheme,
    parse_modelopt_file,
    parse_quantisation,
)
from tests.helpers.quantised_checkpoints import LAYOUTS

PATH = Path("m/config.json")
Document = dict[str, Any]
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


def parsed(config: Document) -> Quantisation:
    found = parse_quantisation(Fields(PATH, {"quantization_config": config}))
    assert found is not None
    return found


def refused(config: Document) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        parsed(config)
    return caught.value


def compressed(*groups: Document, **changes: Any) -> Document:
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **changes}


def group(bits: int, strategy: str, *targets: str, **changes: Any) -> Document:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, **changes}
    return {"targets": list(targets) or ["Linear"], "weights": weights}


@pytest.mark.parametrize(
    ("layout", "producer", "scheme"),
    [
        ("fp8-block", Producer.FP8, WeightScheme.FP8_BLOCK),
        ("fp8-tensor", Producer.FP8, WeightScheme.FP8_TENSOR),
        ("ct-channel", Producer.COMPRESSED_TENSORS, WeightScheme.FP8_CHANNEL),
        ("ct-tensor", Producer.COMPRESSED_TENSORS, WeightScheme.FP8_TENSOR),
        ("ct-block", Producer.COMPRESSED_TENSORS, WeightScheme.FP8_BLOCK),
        ("ct-nvfp4", Producer.COMPRESSED_TENSORS, WeightScheme.NVFP4),
        ("modelopt-fp8", Producer.MODELOPT, WeightScheme.FP8_TENSOR),
        ("modelopt-nvfp4", Producer.MODELOPT, WeightScheme.NVFP4),
    ],
)
def test_one_scheme_for_all_but_the_ignored(
    layout: str, producer: Producer, scheme: WeightScheme
) -> None:
    found = parsed(LAYOUTS[layout][0])
    assert found.producer is producer
    assert found.scheme_of(UP) is scheme
    assert found.scheme_of("lm_head") is None


def test_a_model_without_a_configuration_is_not_quantised() -> None:
    assert parse_quantisation(Fields(PATH, {"quantization_config": None})) is None
    assert parse_quantisation(Fields(PATH, {"text_config": {}})) is None


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_wrapper_may_keep_it_with_its_text_model(key: str) -> None:
    nested = {"text_config": {key: LAYOUTS["fp8-block"][0]}}
    found = parse_quantisation(Fields(PATH, nested))
    assert found is not None
    assert found.field == f"text_config.{key}.modules_to_not_convert"


def test_groups_of_a_mixed_checkpoint_apply_from_names_to_classes() -> None:
    found = parsed(
        compressed(
            group(8, "channel", "Linear"),
            group(4, "tensor_group", "re:.*mlp.*", group_size=16),
            group(8, "tensor", UP),
            format="mixed-precision",
            ignore=["re:.*gate$"],
        )
    )
    assert found.scheme_of(Q) is WeightScheme.FP8_CHANNEL
    assert found.scheme_of("model.layers.0.mlp.down_proj") is WeightScheme.NVFP4
    assert found.scheme_of(UP) is WeightScheme.FP8_TENSOR
    assert found.scheme_of("model.layers.0.mlp.gate") is None


def test_modelopt_lists_the_layers_of_a_mixed_checkpoint() -> None:
    layers = {
        Q: {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    found = parsed(
        {"quant_method": "modelopt", "quant_algo": "mixed_precision", "quantized_layers": layers}
    )
    assert found.scheme_of(Q) is WeightScheme.FP8_TENSOR
    assert found.scheme_of("model.layers.0.mlp.experts.3.up_proj") is WeightScheme.NVFP4
    assert found.scheme_of(UP) is None


def test_modelopt_groups_serve_where_layers_are_not_listed() -> None:
    found = parsed(
        {
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": {
                "a": {"targets": [Q], "weights": {"num_bits": 8, "type": "float"}},
                "b": {"targets": ["*.mlp.*"], "weights": {"num_bits": 4, "type": "float"}},
            },
        }
    )
    assert found.scheme_of(Q) is WeightScheme.FP8_TENSOR
    assert found.scheme_of(UP) is WeightScheme.NVFP4


@pytest.mark.parametrize(
    ("algorithm", "scheme"),
    [
        ("FP8", WeightScheme.FP8_TENSOR),
        ("fp8_pb_wo", WeightScheme.FP8_BLOCK),
        ("FP8_PER_CHANNEL_PER_TOKEN", WeightScheme.FP8_CHANNEL),
        ("W4A16_NVFP4", WeightScheme.NVFP4),
    ],
)
def test_modelopt_has_a_file_of_its_own(algorithm: str, scheme: WeightScheme) -> None:
    document = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head", "*.mlp.gate"]},
    }
    found = parse_modelopt_file(Fields(Path("m/hf_quant_config.json"), document))
    assert found.scheme_of(UP) is scheme
    assert found.scheme_of("model.layers.0.mlp.gate") is None
    assert found.field == "quantization.exclude_modules"


FP8 = LAYOUTS["fp8-block"][0]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "quant_method"),
        ({"quant_method": "awq"}, "quant_method"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "weight_block_size": [64, 128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (compressed(group(8, "channel"), format="pack-quantized"), "format"),
        (compressed({**group(8, "channel"), "format": "mxfp4"}), "config_groups.group_0.format"),
        (compressed(), "config_groups"),
        (compressed(group(8, "token")), "config_groups.group_0.weights.strategy"),
        (compressed(group(4, "group")), "config_groups.group_0.weights.strategy"),
        (
            compressed(group(4, "tensor_group", group_size=32)),
            "config_groups.group_0.weights.group_size",
        ),
        (
            compressed(group(8, "block", block_structure=[1, 128])),
            "config_groups.group_0.weights.block_structure",
        ),
        (
            compressed(group(8, "channel", symmetric=False)),
            "config_groups.group_0.weights.symmetric",
        ),
        (
            compressed({"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}),
            "config_groups.group_0.weights.type",
        ),
        (compressed(group(8, "channel", "re:[")), "config_groups.group_0.targets"),
        (compressed(group(8, "channel"), ignore=["re:*"]), "ignore"),
        (
            compressed(group(8, "channel"), transform_config={"config_groups": {"u": {"x": 1}}}),
            "transform_config.config_groups",
        ),
        (
            compressed(group(8, "channel"), sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format",
        ),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "config_groups"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_key(config: Document, key: str) -> None:
    assert refused(config).field == f"quantization_config.{key}"


@pytest.mark.parametrize(
    "extra",
    [
        {"transform_config": {"config_groups": {}}, "sparsity_config": {"format": "dense"}},
        {"transform_config": {}, "sparsity_config": {}, "kv_cache_scheme": {"num_bits": 8}},
    ],
)
def test_what_does_nothing_is_no_reason_to_refuse(extra: Document) -> None:
    assert parsed(compressed(group(8, "channel"), **extra)).scheme_of(Q) is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from(["float", "Linear", "re:("]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weights", "targets", "num_bits", "a"]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from(list(LAYOUTS)), st.data())
def test_any_value_of_any_key_is_read_or_refused_with_its_name(
    layout: str, data: st.DataObject
) -> None:
    config = dict(LAYOUTS[layout][0])
    keys = [*config, "ignore", "config_groups", "quantized_layers", "sparsity_config"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        config[key] = data.draw(VALUES, key)
    try:
        found = parse_quantisation(Fields(PATH, {"quantization_config": config}))
    except ModelFileError as error:
        named = error.field or ""
    else:
        named = "quantization_config"
        assert found is not None
        found.scheme_of(Q)
    assert named.startswith("quantization_config")


def test_text_configurations_inside_each_other_are_not_followed() -> None:
    config: Document = {"quantization_config": {"quant_method": "fp8"}}
    for _ in range(1000):
        config = {"text_config": config}
    assert parse_quantisation(Fields(Path("config.json"), config)) is None
