from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import AttentionConfig, RopeConfig
from ninfer.models.config import parse_config
from ninfer.models.dflash_config import (
    BlockConvConfig,
    DflashConfig,
    DflashLayer,
    SelectorConfig,
    parse_dflash_config,
    target_mismatch,
)
from tests.helpers.checkpoints import CheckpointSpec, hf_config
from tests.helpers.dflash_checkpoints import DflashSpec, dflash_config

PATH = Path("d/config.json")
SPEC = DflashSpec()
SECOND = DflashSpec(is_second=True)
EXPORT = DflashSpec(style="speculators")


def parsed(spec: DflashSpec = SPEC, **changes: Any) -> DflashConfig:
    return parse_dflash_config(dflash_config(replace(spec, overrides=changes)), PATH)


def drafted(spec: DflashSpec = SPEC, **changes: Any) -> DflashConfig:
    """With keys of `dflash_config` changed."""
    return parse_dflash_config(dflash_config(replace(spec, draft_overrides=changes)), PATH)


def refused(raw: dict[str, Any], field: str) -> str:
    with pytest.raises(ModelFileError) as caught:
        parse_dflash_config(raw, PATH)
    assert (caught.value.path, caught.value.field) == (PATH, field)
    return caught.value.message.removeprefix(f"{PATH}: {field}: ")


FIRST_CONFIG = DflashConfig(
    architecture="DFlashDraftModel",
    vocab_size=512,
    head_vocab_size=512,
    hidden_size=96,
    intermediate_size=80,
    layers=(DflashLayer(8, True), DflashLayer(None, False)),
    attention=AttentionConfig(4, 2, 16, False, RopeConfig(1e4, 16)),
    rms_norm_eps=1e-6,
    tap_layers=(0, 2),
    num_target_layers=4,
    mask_token_id=500,
    block_size=6,
    value_scale=1.0,
    embedding_scale=1.0,
    logit_scale=1.0,
    logit_softcap=None,
    conv=None,
    selector=None,
)


def test_a_configuration_is_read_completely() -> None:
    assert parsed() == FIRST_CONFIG


def test_a_second_configuration_is_read_completely() -> None:
    changes = {
        "attention_value_scale": 0.5,
        "input_embedding_scale": 2,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 30.0,
    }
    assert drafted(SECOND, **changes) == replace(
        FIRST_CONFIG,
        architecture="DFlash2DraftModel",
        value_scale=0.5,
        embedding_scale=2.0,
        logit_scale=0.25,
        logit_softcap=30.0,
        conv=BlockConvConfig(2, 16),
        selector=SelectorConfig(12, 6),
    )


def test_a_second_one_is_told_by_its_keys_too() -> None:
    config = parsed(SECOND, architectures=["DFlashDraftModel"])
    assert config.conv is not None
    assert config.selector is not None


def test_exports_count_layers_from_the_embedding_and_nest_the_body() -> None:
    ids = tuple(range(0, 500, 10))
    config = parsed(replace(EXPORT, token_ids=ids))
    expected = replace(
        FIRST_CONFIG,
        architecture="DFlashSpeculator",
        head_vocab_size=50,
        num_target_layers=None,
        layers=(DflashLayer(8, False), DflashLayer(None, False)),
    )
    assert config == expected
    assert parsed(replace(EXPORT, is_second=True)).selector == SelectorConfig(12, 6)


def test_keys_of_older_files_stand_at_the_top() -> None:
    raw = dflash_config(SPEC)
    old = {**raw, **raw.pop("dflash_config")}
    assert parse_dflash_config(old, PATH) == FIRST_CONFIG
    assert parsed(block_size=3).block_size == 6, "dflash_config counts before the top"
    assert drafted(block_size=None).block_size == 16


@pytest.mark.parametrize(
    ("spec", "changes", "expected"),
    [
        (SPEC, {}, (True, False)),
        (SPEC, {"is_causal": False}, (False, False)),
        (SPEC, {"is_causal": True}, (True, True)),
        (SPEC, {"layer_types": None}, (False, False)),
        (EXPORT, {"sliding_window_non_causal": False}, (True, False)),
        (EXPORT, {"sliding_window_non_causal": True}, (False, False)),
        (EXPORT, {"sliding_window_non_causal": None}, (True, False)),
        (replace(EXPORT, is_second=True), {"sliding_window_non_causal": None}, (False, False)),
        (EXPORT, {"is_causal": True}, (True, True)),
    ],
)
def test_what_a_block_sees_of_itself(
    spec: DflashSpec, changes: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    assert tuple(layer.is_causal for layer in parsed(spec, **changes).layers) == expected


def test_a_flag_of_the_draft_counts_behind_the_one_at_the_top() -> None:
    assert [layer.is_causal for layer in drafted(causal=True).layers] == [True, True]
    spec = replace(SPEC, is_causal=False)
    assert [layer.is_causal for layer in drafted(spec, causal=True).layers] == [False, False]


def test_windows() -> None:
    def windows(config: DflashConfig) -> list[int | None]:
        return [layer.window for layer in config.layers]

    assert windows(parsed()) == [8, None]
    assert windows(drafted(swa_window_size=5)) == [5, None]
    spec = replace(SPEC, overrides={"layer_types": None})
    assert windows(drafted(spec, use_swa=True)) == [8, 8]
    assert windows(parsed(layer_types=None)) == [None, None]
    assert windows(parsed(EXPORT, layer_types=["full_attention"] * 2)) == [None, None]
    refused(dflash_config(replace(SPEC, overrides={"sliding_window": None})), "sliding_window")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", []),
        ("hidden_size", 0),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("layer_types", ["full_attention"]),
        ("num_target_layers", "4"),
        ("target_hidden_size", 64),
        ("draft_vocab_size", 513),
        ("quantization_config", {"quant_method": "fp8"}),
        ("add_swa_attention_sink_bias", True),
        ("is_causal", 1),
        ("draft_ffn_type", "moe"),
    ],
)
def test_bad_top_keys_are_named(field: str, value: Any) -> None:
    refused(dflash_config(replace(SPEC, overrides={field: value})), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_layer_ids", []),
        ("target_layer_ids", [2, 0]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", [-1]),
        ("target_layer_ids", None),
        ("mask_token_id", 512),
        ("mask_token_id", None),
        ("block_size", 1),
        ("attention_value_scale", 0),
        ("final_logit_softcapping", -1),
        ("conv_group_size", 17),
        ("selector_rank", 0),
        ("selector_top_k", 513),
        ("swa_window_size", 0),
        ("sample_from_anchor", True),
        ("attention_sink_bias", True),
        ("projector_type", "domino"),
    ],
)
def test_bad_draft_keys_are_named(field: str, value: Any) -> None:
    raw = dflash_config(replace(SECOND, draft_overrides={field: value}))
    refused(raw, f"dflash_config.{field}")


def test_bad_keys_of_exports_are_named() -> None:
    changes: dict[str, Any] = {"aux_hidden_state_layer_ids": [0, 2]}
    refused(dflash_config(replace(EXPORT, overrides=changes)), "aux_hidden_state_layer_ids")
    changes = {"speculators_model_type": "eagle3"}
    refused(dflash_config(replace(EXPORT, overrides=changes)), "speculators_model_type")
    body = {**dflash_config(EXPORT)["transformer_layer_config"], "head_dim": "x"}
    raw = dflash_config(replace(EXPORT, overrides={"transformer_layer_config": body}))
    refused(raw, "transformer_layer_config.head_dim")
    small = replace(EXPORT, is_second=True, token_ids=(1, 2, 3))
    assert "whole vocabulary" in refused(dflash_config(small), "draft_vocab_size")


@given(st.data())
def test_nothing_but_typed_errors_comes_of_damaged_values(data: st.DataObject) -> None:
    raw = dflash_config(data.draw(st.sampled_from([SPEC, SECOND, EXPORT])))
    nested = [key for key in ("dflash_config", "transformer_layer_config") if key in raw]
    place = raw[nested[0]] if data.draw(st.booleans()) else raw
    key = data.draw(st.sampled_from(sorted(place)))
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    place[key] = data.draw(scalars | st.lists(scalars, max_size=3) | st.just({}))
    with suppress(ModelFileError):
        parse_dflash_config(raw, PATH)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"num_target_layers": None}, None),
        ({"num_target_layers": 5}, None),
        ({"num_target_layers": 6}, "6 layers, and this one has 4"),
        ({"hidden_size": 64}, "hidden size 64, and this one has 96"),
        ({"vocab_size": 640}, "vocabulary 640, and this one has 512"),
        ({"tap_layers": (1, 4), "num_target_layers": None}, "reads layer 4"),
    ],
)
def test_a_draft_of_another_model_is_told(changes: dict[str, Any], words: str | None) -> None:
    spec = CheckpointSpec(vocab_size=512, hidden_size=96, num_layers=4)
    problem = target_mismatch(replace(FIRST_CONFIG, **changes), parse_config(hf_config(spec), PATH))
    assert problem is None if words is None else words in str(problem)
