"""encoded_weights: the float32 matrix that the codes of a quantised checkpoint stand for.

    fp8_row    W[n, k] = e4m3(code) * scale[n]
    fp8_block  W[n, k] = e4m3(code) * scale[n // 128, k // 128]
    nvfp4      W[n, k] = e2m1(code) * e4m3(scale[n, k // 16]) * row_factor[n]

Each product but the first of nvfp4, which is exact, rounds once to float32.

Shapes     arrays of EncodedBand, with or without a leading axis E -> W [.., N, K]
Dtypes     as EncodedBand; W float32
Errors     OpContractError for another shape or dtype
Source     OCP 8-bit and 4-bit floating point; ninfer/contract/weights.py
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.weights import (
    BLOCK_SIZE,
    GROUP_SIZE,
    AnyBand,
    WeightEncoding,
    band_dtypes,
    band_shapes,
)
from ninfer.ops.checks import fail
from ninfer.ops.float_codecs import ByteArray, e2m1_to_float, e4m3_to_float

_OP: Final = "encoded_weights"
_CHUNK_ELEMENTS: Final = 1 << 20
"""Elements decoded at a time, so that temporaries stay small."""


def reference(band: AnyBand) -> Float32Array:
    """W as a new array."""
    is_packed = band.encoding is WeightEncoding.NVFP4
    *outer, columns = band.codes.shape
    out = np.empty((*outer, columns * (2 if is_packed else 1)), np.float32)
    decode_into(band, out)
    return out


def decode_into(band: AnyBand, out: Float32Array) -> None:
    """Write W to `out`."""
    if out.ndim == 3:
        for index, matrix in enumerate(out):
            decode_into(band.expert(index), matrix)
        return
    _check(band, out)
    step = max(1, _CHUNK_ELEMENTS // out.shape[1]) // BLOCK_SIZE * BLOCK_SIZE or BLOCK_SIZE
    for first in range(0, out.shape[0], step):
        rows = slice(first, first + step)
        _decode_rows(band, rows, out[rows])


def _decode_rows(band: AnyBand, rows: slice, out: Float32Array) -> None:
    """`rows` starts at a whole block."""
    codes, scales = band.codes[rows], band.scales
    if scales is None:
        out[...] = codes
    elif band.encoding is WeightEncoding.FP8_ROW:
        np.multiply(e4m3_to_float(codes), scales[rows, None], out=out)
    elif band.encoding is WeightEncoding.FP8_BLOCK:
        first, last = rows.start // BLOCK_SIZE, -(-rows.stop // BLOCK_SIZE)
        by_row = np.repeat(scales[first:last], BLOCK_SIZE, axis=0)[: out.shape[0]]
        spread = np.repeat(by_row, BLOCK_SIZE, axis=1)[:, : out.shape[1]]
        np.multiply(e4m3_to_float(codes), spread, out=out)
    elif band.row_factors is not None:
        groups = e4m3_to_float(scales[rows])
        by_group = out.reshape(*groups.shape, GROUP_SIZE)
        np.multiply(_nibbles(codes).reshape(by_group.shape), groups[..., None], out=by_group)
        np.multiply(out, band.row_factors[rows, None], out=out)


def _nibbles(codes: ByteArray) -> Float32Array:
    """e2m1 numbers [N, K] of bytes [N, K / 2]."""
    pairs = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    return e2m1_to_float(pairs.reshape(codes.shape[0], -1))


def _check(band: AnyBand, out: Float32Array) -> None:
    arrays = {"codes": band.codes, "scales": band.scales, "row_factors": band.row_factors}
    found = {name: array for name, array in arrays.items() if array is not None}
    shapes = {name: array.shape for name, array in found.items()}
    dtypes = {name: array.dtype for name, array in found.items()}
    if shapes != band_shapes(band.encoding, *out.shape) or dtypes != band_dtypes(band.encoding):
        fail(_OP, f"{band.encoding.value}: {shapes} of {dtypes} for {out.shape}")
