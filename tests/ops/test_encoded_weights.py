"""encoded_weights: codes and scales against sums over single numbers, in every encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError
from ninfer.contract.weights import EncodedBand, EncodedExperts, WeightEncoding, band_shapes
from ninfer.ops import encoded_weights
from tests.helpers.quantised_checkpoints import E2M1, e4m3_values

FP8_ROW, FP8_BLOCK, NVFP4 = WeightEncoding.FP8_ROW, WeightEncoding.FP8_BLOCK, WeightEncoding.NVFP4
SHAPES = [(1, 16), (128, 128), (129, 144), (300, 400), (5, 8208)]


def random_band(encoding: WeightEncoding, rows: int, columns: int) -> EncodedBand:
    """Any codes that are no NaN; scales around 1."""
    rng = np.random.default_rng([rows, columns])
    shapes = band_shapes(encoding, rows, columns)
    magnitudes = rng.integers(0, 0x7F, shapes["codes"], np.uint8)
    codes = magnitudes | rng.integers(0, 2, shapes["codes"], np.uint8) << np.uint8(7)
    if encoding is NVFP4:
        codes = rng.integers(0, 256, shapes["codes"], np.uint8)
        scales = rng.integers(0, 0x7F, shapes["scales"], np.uint8)
        factors = rng.uniform(0.5, 2.0, shapes["row_factors"]).astype(np.float32)
        return EncodedBand(encoding, codes, scales, factors)
    return EncodedBand(encoding, codes, rng.uniform(0.5, 2.0, shapes["scales"]).astype(np.float32))


def number(band: EncodedBand, row: int, column: int) -> float:
    """One element, from the definition."""
    assert band.scales is not None
    if band.encoding is NVFP4:
        assert band.row_factors is not None
        byte = int(band.codes[row, column // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        value = float(E2M1[nibble & 7]) * (-1.0 if nibble & 8 else 1.0)
        scale = float(e4m3_values(band.scales[row : row + 1, column // 16])[0])
        return value * scale * float(band.row_factors[row])
    value = float(e4m3_values(band.codes[row : row + 1, column])[0])
    if band.encoding is FP8_ROW:
        return value * float(band.scales[row])
    return value * float(band.scales[row // 128, column // 128])


@pytest.mark.parametrize("encoding", [FP8_ROW, FP8_BLOCK, NVFP4])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_number_is_code_times_scales(
    encoding: WeightEncoding, rows: int, columns: int
) -> None:
    band = random_band(encoding, rows, columns)
    got = encoded_weights.reference(band)
    assert got.shape == (rows, columns)
    rng = np.random.default_rng(1)
    picks = zip(rng.integers(0, rows, 200), rng.integers(0, columns, 200), strict=True)
    places = [(0, 0), (rows - 1, columns - 1), *((int(row), int(column)) for row, column in picks)]
    for row, column in places:
        assert got[row, column] == np.float32(number(band, row, column)), (row, column)


@pytest.mark.parametrize("encoding", [FP8_ROW, FP8_BLOCK, NVFP4])
def test_large_matrices_are_decoded_in_pieces_of_whole_blocks(
    encoding: WeightEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    band = random_band(encoding, 700, 400)
    whole = encoded_weights.reference(band)
    monkeypatch.setattr(encoded_weights, "_CHUNK_ELEMENTS", 1)
    np.testing.assert_array_equal(encoded_weights.reference(band), whole)


@pytest.mark.parametrize("encoding", [FP8_ROW, FP8_BLOCK, NVFP4])
def test_experts_are_decoded_one_by_one(encoding: WeightEncoding) -> None:
    bands = [random_band(encoding, rows, 32) for rows in (48, 48)]
    got = encoded_weights.reference(EncodedExperts(tuple(bands)))
    for index, band in enumerate(bands):
        np.testing.assert_array_equal(got[index], encoded_weights.reference(band))


def without(band: EncodedBand, **changes: NDArray[Any] | None) -> EncodedBand:
    fields = {"codes": band.codes, "scales": band.scales, "row_factors": band.row_factors}
    return EncodedBand(band.encoding, **{**fields, **changes})  # type: ignore[arg-type]


def test_planes_that_do_not_belong_together_are_refused() -> None:
    band = random_band(NVFP4, 16, 32)
    for bad in (
        without(band, row_factors=None),
        without(band, scales=np.ones((16, 2), np.float32)),
        without(band, scales=np.ones((16, 3), np.uint8)),
        without(random_band(FP8_BLOCK, 16, 32), scales=np.ones((2, 1), np.float32)),
    ):
        with pytest.raises(OpContractError, match="encoded_weights"):
            encoded_weights.reference(bad)
