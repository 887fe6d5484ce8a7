"""embedding: y[t] = table[token_ids[t]].

Shapes     token_ids [T], table [V, C] -> y [T, C]; T >= 1
Dtypes     token_ids integer; table and y the same floating dtype
Units      token ids in [0, V); no scaling
Effects    a new array; table is only read
Errors     OpContractError for a shape, a dtype or an id outside the above
Tolerance  EXACT
Source     Qwen3 and Qwen3.5 model definitions; config key vocab_size
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.ops.checks import require_indices, require_rank

_OP = "embedding"


def reference(token_ids: NDArray[np.integer[Any]], table: FloatArray) -> FloatArray:
    """Rows of `table`, copied."""
    require_rank(_OP, "table", table, 2)
    require_indices(_OP, "token_ids", token_ids, table.shape[0])
    y: FloatArray = table[token_ids]
    return y
