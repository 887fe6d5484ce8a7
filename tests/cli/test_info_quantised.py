"""`ninfer info` and `ninfer convert` on a quantised checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.command import ninfer
from tests.helpers.model_paths import golden_model
from tests.helpers.quantised_checkpoints import quantise_checkpoint


def test_formats_are_shown_and_kept(tmp_path: Path) -> None:
    folder = quantise_checkpoint(golden_model("qwen3-dense"), tmp_path / "q", "modelopt-nvfp4")
    artifact = tmp_path / "m.ninfer"
    text = ninfer("info", str(folder)).stdout
    (row,) = [line for line in text.splitlines() if line.startswith("quantised")]
    assert row.split(maxsplit=1)[1] == (
        "0.25 M nvfp4; 21 scales of activations and KV cache not used"
    )
    assert ninfer("convert", str(folder), "--out", str(artifact)).returncode == 0
    shown = json.loads(ninfer("info", "--json", str(artifact)).stdout)
    assert shown["kind"] == "ninfer"
    assert list(shown["encoded_parameters"]) == ["nvfp4"]
    assert set(shown["bytes_by_dtype"]) == {"BF16", "U8", "F8_E4M3", "F32"}
