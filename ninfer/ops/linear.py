"""linear: y[t, n] = sum_k x[t, k] * weight[n, k].

Shapes     x [T, K], weight [N, K] -> y [T, N]; T >= 1
Dtypes     all the same floating dtype
Effects    a new array
Errors     OpContractError for a shape or dtype outside the above
Tolerance  FLOAT32_REDUCTION
Source     the definition

`reference` is one matrix product. Its rounding may depend on T, because a BLAS picks its blocking
by the shape. `tiled` computes products of one shape for a weight: of single rows where the weight
stays in a cache between them, else of TILE_ROWS rows, padded with zeros. So a row of it is bit for
bit the same whatever T is, wherever the row stands and whatever the other rows hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import require_rank, require_same_dtype, require_shape

_OP = "linear"

TILE_ROWS: Final = 8
"""Rows of one product of `tiled` with a large weight."""
CACHED_BYTES: Final = 8 << 20
"""Largest weight that is read anew for each row. A product of few rows copies the weight into
another order first: measured on 0.8 MiB, eight rows take as long either way, one an eighth."""

Projection: TypeAlias = Callable[[FloatArray, FloatArray], FloatArray]
"""`reference` or `tiled`."""


def reference(x: FloatArray, weight: FloatArray) -> FloatArray:
    """x @ weight.T in one product."""
    _check(x, weight)
    y: FloatArray = x @ weight.T
    return y


def tiled(x: FloatArray, weight: FloatArray) -> FloatArray:
    """x @ weight.T; rows do not influence each other's rounding."""
    _check(x, weight)
    num_rows, columns = x.shape
    tile_rows = 1 if weight.nbytes <= CACHED_BYTES else TILE_ROWS
    num_tiles = -(-num_rows // tile_rows)
    padded = np.ascontiguousarray(x)
    if num_rows % tile_rows:
        padded = np.zeros((num_tiles * tile_rows, columns), x.dtype)
        padded[:num_rows] = x
    y: FloatArray = np.matmul(padded.reshape(num_tiles, tile_rows, columns), weight.T)
    return y.reshape(num_tiles * tile_rows, weight.shape[0])[:num_rows]


def _check(x: FloatArray, weight: FloatArray) -> None:
    require_rank(_OP, "x", x, 2)
    require_rank(_OP, "weight", weight, 2)
    require_shape(_OP, "weight", weight, (weight.shape[0], x.shape[1]))
    require_same_dtype(_OP, x, weight)
