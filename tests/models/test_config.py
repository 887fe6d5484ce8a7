from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import (
    AttentionConfig,
    GdnConfig,
    LayerConfig,
    MixerKind,
    MlpKind,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)
from ninfer.models.config import FAMILIES, parse_config
from tests.helpers.checkpoints import CheckpointSpec, Family, hf_config
from tests.helpers.model_paths import GOLDEN_CASES, golden_model

PATH = Path("m/config.json")
ALL_FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
Document = dict[str, Any]


def document(family: Family = "qwen3_5", **changes: Any) -> Document:
    """A flat configuration with keys changed; None removes one."""
    merged = {**hf_config(CheckpointSpec(family=family)), **changes}
    return {key: value for key, value in merged.items() if value is not None}


def parsed(family: Family = "qwen3_5", **changes: Any) -> ModelConfig:
    return parse_config(document(family, **changes), PATH)


def refused(raw: Document, field: str) -> str:
    with pytest.raises(ModelFileError) as caught:
        parse_config(raw, PATH)
    assert (caught.value.path, caught.value.field) == (PATH, field)
    return caught.value.message.removeprefix(f"{PATH}: {field}: ")


def mixers_of(config: ModelConfig) -> list[str]:
    return [layer.mixer.value for layer in config.layers]


def test_a_golden_hybrid_configuration_is_read_completely() -> None:
    raw = json.loads((golden_model("qwen3_5-moe") / "config.json").read_bytes())
    gdn, attention, moe = MixerKind.GDN, MixerKind.ATTENTION, MlpKind.MOE
    assert parse_config(raw, PATH) == ModelConfig(
        architecture="Qwen3_5MoeForCausalLM",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=0,
        layers=(
            LayerConfig(0, gdn, moe, 0),
            LayerConfig(1, gdn, moe, 1),
            LayerConfig(2, gdn, moe, 2),
            LayerConfig(3, attention, moe, 0),
        ),
        attention=AttentionConfig(4, 1, 64, True, RopeConfig(1e7, 16, (3, 3, 2))),
        gdn=GdnConfig(2, 4, 32, 32, 4),
        moe=MoeConfig(8, 2, 32, 48, True),
        rms_norm_eps=1e-6,
        norm_offset=1.0,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        num_mtp_layers=1,
        eos_token_ids=(383,),
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_every_golden_configuration_is_read(case: str) -> None:
    raw = json.loads((golden_model(case) / "config.json").read_bytes())
    config = parse_config(raw, PATH)
    text = raw.get("text_config", raw)
    assert config.architecture == raw["architectures"][0]
    assert len(config.layers) == text["num_hidden_layers"]
    assert config.attention.head_dim == text["head_dim"]
    assert config.norm_offset == (1.0 if case.startswith("qwen3_5") else 0.0)
    assert config.attention.has_output_gate is case.startswith("qwen3_5")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_wrapped_and_flat_files_mean_the_same(family: Family) -> None:
    flat = hf_config(CheckpointSpec(family=family))
    nested = hf_config(CheckpointSpec(family=family, is_wrapper=True))
    wrapped = parse_config(nested, PATH)
    assert replace(wrapped, architecture=flat["architectures"][0]) == parse_config(flat, PATH)
    crossed = {**nested, "architectures": flat["architectures"]}
    assert parse_config(crossed, PATH) == parse_config(flat, PATH)


def test_keys_of_a_wrapper_are_named_with_their_place() -> None:
    raw = hf_config(CheckpointSpec(is_wrapper=True, overrides={"hidden_size": "32"}))
    assert "expected an integer" in refused(raw, "text_config.hidden_size")
    assert "expected an object" in refused({**raw, "text_config": []}, "text_config")


@pytest.mark.parametrize(
    "names", [["LlamaForCausalLM"], [], ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]]
)
def test_an_unknown_architecture_is_answered_with_the_supported_ones(names: list[str]) -> None:
    message = refused(document(architectures=names), "architectures")
    assert all(name in message for name in (*FAMILIES, *names))


def test_a_file_without_architecture_is_refused() -> None:
    assert refused(document(architectures=None), "architectures") == "missing"
    assert "array of strings" in refused(document(architectures=[1]), "architectures")


@pytest.mark.parametrize(
    ("top", "text", "is_tied"),
    [
        (True, None, True),
        (None, True, True),
        (True, True, True),
        (False, True, False),
        (True, False, True),
        (False, None, False),
        (None, None, False),
    ],
)
def test_the_tie_is_read_from_either_place_and_a_wrapper_has_the_last_word(
    top: bool | None, text: bool | None, is_tied: bool
) -> None:
    raw = hf_config(CheckpointSpec(is_wrapper=True))
    raw["tie_word_embeddings"] = top
    raw["text_config"]["tie_word_embeddings"] = text
    assert parse_config(raw, PATH).tie_word_embeddings is is_tied


def test_layer_types_win_over_the_interval() -> None:
    types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    config = parsed(layer_types=types, full_attention_interval=2)
    assert mixers_of(config) == types
    assert [layer.kind_index for layer in config.layers] == [0, 0, 1, 2]
    assert (config.num_attention_layers, config.num_gdn_layers) == (3, 1)


@pytest.mark.parametrize(
    ("interval", "attention"), [(None, [3]), (1, [0, 1, 2, 3, 4]), (2, [1, 3])]
)
def test_without_layer_types_the_interval_decides(
    interval: int | None, attention: list[int]
) -> None:
    config = parsed(layer_types=None, num_hidden_layers=5, full_attention_interval=interval)
    found = [layer.index for layer in config.layers if layer.mixer is MixerKind.ATTENTION]
    assert found == attention


def test_a_hybrid_of_attention_layers_only_needs_no_gdn_sizes() -> None:
    config = parsed(layer_types=["full_attention"] * 4, linear_num_key_heads=None)
    assert config.gdn is None


def test_plain_families_have_attention_only() -> None:
    assert set(mixers_of(parsed("qwen3"))) == {"full_attention"}
    listed = parsed("qwen3", layer_types=["full_attention"] * 4)
    assert set(mixers_of(listed)) == {"full_attention"}
    for kind in ("linear_attention", "sliding_attention"):
        raw = document("qwen3", layer_types=["full_attention"] * 3 + [kind])
        assert kind in refused(raw, "layer_types[3]")


def test_layer_types_must_fit_the_layers() -> None:
    raw = document(layer_types=["full_attention"] * 3)
    assert refused(raw, "layer_types") == "3 entries for 4 layers"


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": [0, 3]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [0, 1, 2]),
    ],
)
def test_dense_and_expert_layers_are_mixed_as_the_keys_say(
    changes: Document, dense: list[int]
) -> None:
    config = parsed("qwen3_moe", intermediate_size=40, **changes)
    assert [item.index for item in config.layers if item.mlp is MlpKind.DENSE] == dense
    assert config.intermediate_size == 40


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [0, 3]}, {"decoder_sparse_step": 2}])
def test_hybrids_have_experts_in_every_layer_whatever_the_keys_say(changes: Document) -> None:
    config = parsed("qwen3_5_moe", **changes)
    assert all(item.mlp is MlpKind.MOE for item in config.layers)


def test_dense_layers_need_an_intermediate_size_and_expert_layers_do_not() -> None:
    assert parsed("qwen3_moe", intermediate_size=None).intermediate_size == 0
    raw = document("qwen3_moe", intermediate_size=None, mlp_only_layers=[1])
    assert refused(raw, "intermediate_size") == "missing"
    assert "4 is not in [0, 3]" in refused({**raw, "mlp_only_layers": [4]}, "mlp_only_layers")


def test_expert_weights_are_renormalised_by_family_and_key() -> None:
    def renormalises(family: Family, value: bool | None) -> bool:
        moe = parsed(family, norm_topk_prob=value).moe
        assert moe is not None
        return moe.renormalise

    assert renormalises("qwen3_5_moe", None)
    assert renormalises("qwen3_moe", True)
    assert not renormalises("qwen3_moe", False)
    assert not renormalises("qwen3_moe", None)
    refused(document("qwen3_5_moe", norm_topk_prob=False), "norm_topk_prob")


def test_only_hybrids_have_a_shared_expert() -> None:
    hybrid, plain = parsed("qwen3_5_moe").moe, parsed("qwen3_moe").moe
    assert hybrid is not None
    assert plain is not None
    assert hybrid.shared_intermediate_size == 16
    assert plain.shared_intermediate_size is None


def test_the_number_of_experts_has_two_spellings() -> None:
    moe = parsed("qwen3_moe", num_experts=None, num_local_experts=6).moe
    assert moe is not None
    assert moe.num_experts == 6
    assert refused(document("qwen3_moe", num_experts=None), "num_experts") == "missing"
    raw = document("qwen3_moe", num_experts=2, num_experts_per_tok=3)
    assert "3 is not in [1, 2]" in refused(raw, "num_experts_per_tok")


@pytest.mark.parametrize(
    ("family", "head_dim"), [("qwen3", 128), ("qwen3_vl", 128), ("qwen3_moe", 8), ("qwen3_5", 256)]
)
def test_a_missing_head_dim_takes_the_default_of_its_class(family: Family, head_dim: int) -> None:
    raw = hf_config(CheckpointSpec(family=family, overrides={"head_dim": None}))
    assert parse_config(raw, PATH).attention.head_dim == head_dim


def test_missing_keys_take_the_defaults_of_the_released_classes() -> None:
    config = parsed(
        rms_norm_eps=None,
        max_position_embeddings=None,
        num_key_value_heads=None,
        mtp_num_hidden_layers=None,
        eos_token_id=None,
        linear_num_key_heads=None,
        linear_num_value_heads=None,
        linear_key_head_dim=None,
        linear_value_head_dim=None,
        linear_conv_kernel_dim=None,
    )
    assert config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 32_768
    assert config.attention.num_kv_heads == config.attention.num_heads
    assert config.num_mtp_layers == 0
    assert config.eos_token_ids == ()
    assert config.gdn == GdnConfig(16, 32, 128, 128, 4)


@pytest.mark.parametrize(
    ("value", "ids"), [(3, (3,)), ([3, 5], (3, 5)), ([5, 3, 5], (5, 3)), ([], ()), (None, ())]
)
def test_end_tokens_may_be_one_or_a_list(value: Any, ids: tuple[int, ...]) -> None:
    assert parsed(eos_token_id=value).eos_token_ids == ids


def test_end_tokens_of_a_wrapper_may_stand_at_the_top() -> None:
    raw = hf_config(CheckpointSpec(is_wrapper=True, overrides={"eos_token_id": None}))
    assert parse_config({**raw, "eos_token_id": [7]}, PATH).eos_token_ids == (7,)


@pytest.mark.parametrize("value", [128, -1, "7", [1, 128], [1.5], True])
def test_end_tokens_outside_the_vocabulary_are_refused(value: Any) -> None:
    refused(document(eos_token_id=value), "eos_token_id")


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3", "attention_bias", True),
        ("qwen3_5", "attention_bias", True),
        ("qwen3", "use_sliding_window", True),
        ("qwen3_5", "mtp_use_dedicated_embeddings", True),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3", "attn_output_gate", True),
        ("qwen3_5", "output_gate_type", "sigmoid"),
        ("qwen3_5", "mamba_ssm_dtype", "bfloat16"),
        ("qwen3", "mtp_num_hidden_layers", 1),
        ("qwen3", "dtype", "float8_e4m3fn"),
        ("qwen3", "torch_dtype", 16),
        ("qwen3", "num_key_value_heads", 3),
        ("qwen3_5", "linear_num_key_heads", 3),
        ("qwen3", "vocab_size", 0),
        ("qwen3", "vocab_size", None),
        ("qwen3", "hidden_size", 2**40),
        ("qwen3", "hidden_size", 32.0),
        ("qwen3", "num_hidden_layers", 10**6),
        ("qwen3", "num_hidden_layers", True),
        ("qwen3", "num_attention_heads", None),
        ("qwen3", "intermediate_size", None),
        ("qwen3", "rms_norm_eps", 0),
        ("qwen3", "rms_norm_eps", "1e-6"),
        ("qwen3", "tie_word_embeddings", "true"),
        ("qwen3", "max_position_embeddings", 0),
        ("qwen3_5", "full_attention_interval", 0),
        ("qwen3_5", "linear_conv_kernel_dim", 0),
        ("qwen3_5", "linear_conv_kernel_dim", 1),
        ("qwen3_moe", "moe_intermediate_size", None),
        ("qwen3_moe", "decoder_sparse_step", 0),
    ],
)
def test_settings_we_cannot_run_are_refused_by_key(family: Family, key: str, value: Any) -> None:
    changes: Document = {key: value}
    if key == "full_attention_interval":
        changes["layer_types"] = None
    refused(document(family, **changes), key)


@pytest.mark.parametrize("gate", ["silu", "swish", None])
def test_both_names_of_the_gate_activation_are_known(gate: str | None) -> None:
    assert parsed(output_gate_type=gate) == parsed()


def test_how_weights_are_stored_does_not_change_the_geometry() -> None:
    quantised = {**document(), "quantization_config": {"quant_method": "fp8"}}
    assert parse_config(quantised, PATH) == parsed()


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats()
    | st.sampled_from(["yarn", "linear", "default", "silu", "full_attention", "x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "mrope_section", "x"]), inner)
    ),
    max_leaves=5,
)


@given(st.data(), st.sampled_from(ALL_FAMILIES))
def test_any_value_of_any_key_is_read_or_refused_with_its_name(
    data: st.DataObject, family: Family
) -> None:
    raw = hf_config(CheckpointSpec(family=family))
    target = raw.get("text_config", raw)
    keys = [*sorted(target), "rope_scaling", "partial_rotary_factor", "quantization_config"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True)):
        target[key] = data.draw(JSON_VALUES, key)
    try:
        config = parse_config(raw, PATH)
    except ModelFileError as error:
        named = error.field
    else:
        named = "" if len(config.layers) == target["num_hidden_layers"] else None
    assert named is not None
