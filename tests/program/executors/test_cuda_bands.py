"""Which bands share an image, and which objects cannot keep their codes."""

from __future__ import annotations

import pytest

from ninfer.contract.weights import WeightBand, WeightEncoding
from ninfer.ops.linear_packing import WeightFormat
from ninfer.program.executors.cuda_bands import BandGroup, group_bands, undivided_reason

FLOAT, ROW, BLOCK, NVFP4 = WeightEncoding
Pairs = list[tuple[WeightEncoding, int]]


def bands(pairs: Pairs) -> list[WeightBand]:
    return [WeightBand(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(ROW, 64), (ROW, 24), (ROW, 8)], [(0, 96)]),
        ([(NVFP4, 64), (NVFP4, 24)], [(0, 88)]),
        ([(BLOCK, 256), (BLOCK, 128), (BLOCK, 40)], [(0, 424)]),
        ([(BLOCK, 128), (BLOCK, 40), (BLOCK, 128)], [(0, 168), (168, 128)]),
        ([(BLOCK, 8192), (BLOCK, 4096), (FLOAT, 32), (FLOAT, 32)], [(0, 12288), (12288, 64)]),
        ([(FLOAT, 8), (ROW, 8), (FLOAT, 8)], [(0, 8), (8, 8), (16, 8)]),
        ([(ROW, 32), (NVFP4, 32)], [(0, 32), (32, 32)]),
    ],
)
def test_bands_of_one_encoding_share_an_image(
    pairs: Pairs, expected: list[tuple[int, int]]
) -> None:
    groups = group_bands(bands(pairs))
    assert [(group.first_row, group.num_rows) for group in groups] == expected
    assert [group.first_band for group in groups[1:]] == [group.last_band for group in groups[:-1]]
    assert (groups[0].first_band, groups[-1].last_band) == (0, len(pairs))


def test_a_group_has_the_format_of_its_codes() -> None:
    assert group_bands(bands([(FLOAT, 8), (BLOCK, 8)])) == (
        BandGroup(WeightFormat.BF16, 0, 8, 0, 1),
        BandGroup(WeightFormat.FP8_BLOCK, 8, 8, 1, 2),
    )


@pytest.mark.parametrize(
    ("pairs", "is_gate_up", "reason"),
    [
        ([(ROW, 24), (ROW, 24)], True, None),
        ([(NVFP4, 24), (NVFP4, 24)], True, None),
        ([(BLOCK, 24), (BLOCK, 24)], True, None),
        ([(BLOCK, 256)], True, None),
        ([(BLOCK, 192)], True, "its blocks do not start with the up rows"),
        ([(BLOCK, 64)], True, "its blocks do not start with the up rows"),
        ([(ROW, 24), (NVFP4, 24)], True, "its parts are stored as fp8_row and nvfp4"),
        ([(FLOAT, 24), (NVFP4, 24)], True, "its parts are stored as float and nvfp4"),
        ([(BLOCK, 40)], False, None),
        ([(BLOCK, 40), (BLOCK, 40)], False, "its blocks do not start with its parts"),
    ],
)
def test_what_must_be_one_image_is_or_says_why_not(
    pairs: Pairs, is_gate_up: bool, reason: str | None
) -> None:
    assert undivided_reason(bands(pairs), is_gate_up=is_gate_up) == reason
