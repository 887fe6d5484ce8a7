from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import embedding

TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)


def test_rows_are_copied_out() -> None:
    y = embedding.reference(np.array([4, 0, 4], np.int32), TABLE)
    assert y.tolist() == [[12, 13, 14], [0, 1, 2], [12, 13, 14]]
    y[:] = 0
    assert TABLE[4, 0] == 12


def test_rows_are_scaled_in_the_dtype_of_the_table() -> None:
    y = embedding.reference(np.array([4, 0], np.int32), TABLE, scale=0.1)
    assert y.dtype == np.float32
    assert (y == TABLE[[4, 0]] * np.float32(0.1)).all()
    assert TABLE[4, 0] == 12


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_scales_are_positive(scale: float) -> None:
    with pytest.raises(OpContractError, match="embedding: scale"):
        embedding.reference(np.array([1], np.int32), TABLE, scale=scale)


@pytest.mark.parametrize("ids", [[-1], [5], [], [[1]], [1.0]])
def test_bad_ids_are_refused(ids: list[object]) -> None:
    with pytest.raises(OpContractError, match="embedding: token_ids"):
        embedding.reference(np.array(ids, np.int32 if ids != [1.0] else np.float32), TABLE)
