from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.errors import ModelFileError
from ninfer.convert.dflash_checkpoint import OpenedDflash, open_dflash
from tests.helpers.checkpoints import RawTensor, read_tensors, write_safetensors
from tests.helpers.dflash_checkpoints import DflashSpec, dflash_values, write_dflash

SPEC = DflashSpec()
TOKEN_IDS = tuple(range(3, 511, 4))
Tensors = dict[str, RawTensor]


def refused(folder: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        list(open_dflash(folder).read_float32())
    return caught.value


def edited(folder: Path, edit: Callable[[Tensors], object], spec: DflashSpec = SPEC) -> Path:
    path = write_dflash(folder, spec) / "model.safetensors"
    tensors = read_tensors(path)
    edit(tensors)
    write_safetensors(path, tensors)
    return folder


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        DflashSpec(is_second=True, dtype="F32", conv_taps=3),
        DflashSpec(style="speculators", token_ids=TOKEN_IDS, has_embedding=True, dtype="F16"),
        DflashSpec(style="speculators", is_second=True),
    ],
)
def test_every_stored_value_is_in_exactly_one_object(tmp_path: Path, spec: DflashSpec) -> None:
    model = open_dflash(write_dflash(tmp_path, spec))
    read = {item.name: array for item, array in model.read_float32()}
    assert [item.name for item in model.objects] == list(read)
    assert all(read[item.name].shape == item.shape for item in model.objects)
    assert {item.component for item in model.objects} == {"draft"}
    stored = dflash_values(spec)
    assert_same_numbers(list(read.values()), list(stored.values()))


def assert_same_numbers(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    flat = [
        np.sort(np.concatenate([array.reshape(-1) for array in part])) for part in (ours, theirs)
    ]
    np.testing.assert_array_equal(flat[0], flat[1])


def test_parts_of_fused_objects_follow_one_another(tmp_path: Path) -> None:
    spec = DflashSpec(is_second=True)
    stored = dflash_values(spec)
    read = {
        item.name: array for item, array in open_dflash(write_dflash(tmp_path, spec)).read_float32()
    }
    queries, *keys = (stored[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(read["layers.1.attn.q_proj"], queries)
    np.testing.assert_array_equal(read["layers.1.attn.kv_proj"], np.concatenate(keys))
    mlp = [stored[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(read["layers.0.mlp.gate_up"], np.concatenate(mlp))
    for ours, theirs in (
        ("fc", "fc.weight"),
        ("hidden_norm", "hidden_norm.weight"),
        ("layers.0.input_norm", "layers.0.input_layernorm.weight"),
        ("layers.0.post_norm", "layers.0.post_attention_layernorm.weight"),
        ("layers.1.attention_conv.base", "layers.1.attention_conv.base_kernel"),
        ("layers.1.mlp_conv.kernel", "layers.1.mlp_conv.kernel_projection.weight"),
        ("selector.predecessors", "candidate_selector.predecessor_codebook"),
        ("selector.successors", "candidate_selector.successor_codebook"),
    ):
        np.testing.assert_array_equal(read[ours], stored[theirs])


def test_the_token_map_is_a_distance_from_the_row(tmp_path: Path) -> None:
    def token_ids(model: OpenedDflash) -> list[int] | None:
        return None if model.token_ids is None else model.token_ids.tolist()

    small = replace(SPEC, style="speculators", token_ids=TOKEN_IDS)
    assert token_ids(open_dflash(write_dflash(tmp_path / "small", small))) == list(TOKEN_IDS)
    assert token_ids(open_dflash(write_dflash(tmp_path / "whole", SPEC))) is None


def offsets(values: list[int], dtype: str = "I64") -> RawTensor:
    data = np.array(values, "<i8" if dtype == "I64" else "<i4").tobytes()
    return RawTensor(dtype, (len(values),), data)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (offsets([0, 0, 510]), "outside 0 to 511"),
        (offsets([0, -2, 0]), "outside"),
        (offsets([0, 2**63 - 1, 0]), "outside"),
        (offsets([1, 0, 0]), "one token from two rows"),
        (offsets([0, 0]), "shape [2]"),
        (RawTensor("F32", (3,), bytes(12)), "dtype F32"),
        (None, "missing tensor"),
    ],
)
def test_bad_token_maps_are_refused(tmp_path: Path, tensor: RawTensor | None, words: str) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["d2t"]
        if tensor is not None:
            tensors["d2t"] = tensor

    small = replace(SPEC, style="speculators", token_ids=(1, 2, 3))
    error = refused(edited(tmp_path, edit, small))
    assert error.field == "d2t"
    assert words in error.message


def test_short_integers_are_read(tmp_path: Path) -> None:
    small = replace(SPEC, style="speculators", token_ids=(1, 2, 3))
    folder = edited(tmp_path, lambda tensors: tensors.update(d2t=offsets([5, 5, 6], "I32")), small)
    token_ids = open_dflash(folder).token_ids
    assert token_ids is not None
    assert token_ids.tolist() == [5, 6, 8]


def test_what_is_wrong_with_a_tensor_is_said(tmp_path: Path) -> None:
    missing = refused(edited(tmp_path / "a", lambda tensors: tensors.pop("fc.weight")))
    assert (missing.field, "missing tensor" in missing.message) == ("fc.weight", True)
    extra = RawTensor("BF16", (2,), bytes(4))
    unexpected = refused(edited(tmp_path / "b", lambda tensors: tensors.update({"gate": extra})))
    assert (unexpected.field, "unexpected" in unexpected.message) == ("gate", True)
    wrong = refused(edited(tmp_path / "c", lambda tensors: tensors.update({"norm.weight": extra})))
    assert (wrong.field, "shape [2]" in wrong.message) == ("norm.weight", True)
    nan = np.full((96,), np.nan, np.float32)
    poisoned = replace(SPEC, values={"norm.weight": nan})
    infinite = refused(write_dflash(tmp_path / "d", poisoned))
    assert (infinite.field, "NaN" in infinite.message) == ("norm.weight", True)


def test_a_first_one_with_the_tensors_of_a_second_is_refused(tmp_path: Path) -> None:
    second = replace(SPEC, is_second=True)
    config = tmp_path / "config.json"
    write_dflash(tmp_path, SPEC)
    text = config.read_text()
    write_dflash(tmp_path, second)
    config.write_text(text)
    assert "unexpected tensor" in refused(tmp_path).message


def test_what_is_no_draft_model_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path).message
    assert "config.json" in refused(tmp_path / "nothing").message
    (write_dflash(tmp_path, SPEC) / "mask_embedding.pt").write_bytes(b"")
    assert refused(tmp_path).path == tmp_path / "mask_embedding.pt"
