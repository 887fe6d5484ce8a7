"""model_fingerprint: the same for the same model wherever it lies, another one for another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ninfer.convert.source import open_model
from ninfer.program.model_fingerprint import SAMPLE_BYTES, SAMPLES, model_fingerprint
from tests.helpers.model_paths import DEMO_MODEL, golden_model

NUMBERS = "cpu float32"


def copied(folder: Path, name: str = "qwen3_5-dense") -> Path:
    return Path(shutil.copytree(golden_model(name), folder / "elsewhere"))


def weight_file(model: Path) -> Path:
    return next(model.glob("*.safetensors"))


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    original = model_fingerprint(open_model(golden_model("qwen3_5-dense")), NUMBERS)
    assert len(original) == 32
    assert model_fingerprint(open_model(copied(tmp_path)), NUMBERS) == original


def test_formats_and_other_models_are_told_apart() -> None:
    names = ("qwen3_5-dense", "qwen3_5-moe", "qwen3-dense")
    found = [model_fingerprint(open_model(golden_model(name)), NUMBERS) for name in names]
    found.append(model_fingerprint(open_model(golden_model(names[0])), "cuda bf16 fp8"))
    assert len(set(found)) == 4


@pytest.mark.parametrize("where", [0.1, 0.5, 0.999])
def test_changed_weights_are_another_model(tmp_path: Path, where: float) -> None:
    """Small files are covered whole."""
    model = copied(tmp_path)
    before = model_fingerprint(open_model(model), NUMBERS)
    path = weight_file(model)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + int((len(content) - header) * where)] ^= 1
    assert len(content) <= SAMPLES * SAMPLE_BYTES
    path.write_bytes(content)
    assert model_fingerprint(open_model(model), NUMBERS) != before


def test_a_changed_configuration_is_another_model(tmp_path: Path) -> None:
    model = copied(tmp_path)
    before = model_fingerprint(open_model(model), NUMBERS)
    text = (model / "config.json").read_text()
    changed = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06')
    assert changed != text
    (model / "config.json").write_text(changed)
    assert model_fingerprint(open_model(model), NUMBERS) != before


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "demo"))
    before = model_fingerprint(open_model(model), NUMBERS)
    path = weight_file(model)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert model_fingerprint(open_model(model), NUMBERS) != before
