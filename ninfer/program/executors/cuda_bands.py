"""From the bands of a stored object to the images that keep its codes.

Bands that follow one another and have the same encoding share an image. Row scales and NVFP4's
factors are numbers of a row, so parts with different ones stay exact. An object whose parts lie
in several images is multiplied image by image.

Gate and up rows take turns in one image, and an expert is one image. Where the two have different
encodings, or blocks that do not start with the up rows, the object is decoded to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from ninfer.contract.weights import BLOCK_SIZE, WeightBand, WeightEncoding
from ninfer.ops.linear_packing import WeightFormat

IMAGE_FORMATS: Final = MappingProxyType(
    {
        WeightEncoding.FLOAT: WeightFormat.BF16,
        WeightEncoding.FP8_ROW: WeightFormat.FP8_ROW,
        WeightEncoding.FP8_BLOCK: WeightFormat.FP8_BLOCK,
        WeightEncoding.NVFP4: WeightFormat.NVFP4,
    }
)


@dataclass(frozen=True, slots=True)
class BandGroup:
    """Bands [first_band, last_band) of an object as one image; rows from `first_row` on."""

    format: WeightFormat
    first_row: int
    num_rows: int
    first_band: int
    last_band: int


def group_bands(bands: Sequence[WeightBand]) -> tuple[BandGroup, ...]:
    """As few images as keep every code and scale."""
    groups: list[BandGroup] = []
    row = 0
    for index, band in enumerate(bands):
        last = groups[-1] if groups else None
        if last is not None and _can_join(bands[index - 1], band):
            groups[-1] = BandGroup(
                last.format, last.first_row, last.num_rows + band.num_rows, last.first_band,
                index + 1,
            )  # fmt: skip
        else:
            fmt = IMAGE_FORMATS[band.encoding]
            groups.append(BandGroup(fmt, row, band.num_rows, index, index + 1))
        row += band.num_rows
    return tuple(groups)


def undivided_reason(bands: Sequence[WeightBand], *, is_gate_up: bool) -> str | None:
    """Why the codes of an object cannot lie in one image, None if they can."""
    encodings = list(dict.fromkeys(band.encoding for band in bands))
    if len(encodings) > 1:
        names = " and ".join(encoding.value for encoding in encodings)
        return f"its parts are stored as {names}"
    if encodings[0] is WeightEncoding.FP8_BLOCK and is_gate_up:
        if len(bands) == 2 and bands[0].num_rows == bands[1].num_rows:
            return None
        if len(bands) > 1 or bands[0].num_rows % (2 * BLOCK_SIZE):
            return "its blocks do not start with the up rows"
        return None
    if not all(_can_join(*pair) for pair in pairwise(bands)):
        return "its blocks do not start with its parts"
    return None


def _can_join(band: WeightBand, following: WeightBand) -> bool:
    if band.encoding is not following.encoding:
        return False
    return band.encoding is not WeightEncoding.FP8_BLOCK or band.num_rows % BLOCK_SIZE == 0
