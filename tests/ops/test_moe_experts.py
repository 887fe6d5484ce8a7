from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.errors import OpContractError
from ninfer.ops import linear, moe_experts
from tests.helpers.arrays import Float64Array, f32, normal
from tests.helpers.tolerance import FLOAT32_REDUCTION, FLOAT64_ALGORITHM, assert_close

HIDDEN, INNER = 12, 7


def expert(x: Float64Array, gate_up: Float64Array, down: Float64Array) -> Float64Array:
    gate, up = gate_up[:INNER] @ x, gate_up[INNER:] @ x
    y: Float64Array = down @ (gate / (1.0 + np.exp(-gate)) * up)
    return y


class Case:
    def __init__(self, num_tokens: int, num_experts: int, k: int) -> None:
        rng = np.random.default_rng(num_tokens)
        self.x = normal(rng, num_tokens, HIDDEN)
        self.ids = np.stack([rng.permutation(num_experts)[:k] for _ in range(num_tokens)])
        self.weights = normal(rng, num_tokens, k) ** 2
        self.gate_up = normal(rng, num_experts, 2 * INNER, HIDDEN, scale=0.3)
        self.down = normal(rng, num_experts, HIDDEN, INNER, scale=0.3)

    def want(self) -> Float64Array:
        y = np.zeros_like(self.x)
        for t in range(self.x.shape[0]):
            for e, weight in zip(self.ids[t], self.weights[t], strict=True):
                y[t] += weight * expert(self.x[t], self.gate_up[e], self.down[e])
        return y

    def float32(self, rows: Any = slice(None)) -> tuple[NDArray[Any], ...]:
        return (
            f32(self.x[rows]),
            self.ids[rows],
            f32(self.weights[rows]),
            f32(self.gate_up),
            f32(self.down),
        )


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (3, 3), (8, 2), (64, 8)])
@pytest.mark.parametrize("num_tokens", [1, 9, 40])
@pytest.mark.parametrize("project", [linear.reference, linear.tiled])
def test_against_plain_loops(
    experts: int, k: int, num_tokens: int, project: linear.Projection
) -> None:
    case = Case(num_tokens, experts, k)
    got = moe_experts.reference(
        case.x, case.ids, case.weights, case.gate_up, case.down, project=project
    )
    assert_close(got, case.want(), FLOAT64_ALGORITHM)
    got = moe_experts.reference(*case.float32(), project=project)
    assert_close(got, case.want(), FLOAT32_REDUCTION)


def test_tiled_rows_are_the_same_bits_in_any_company() -> None:
    case = Case(11, 4, 2)
    together = moe_experts.reference(*case.float32(), project=linear.tiled)
    rng = np.random.default_rng(0)
    for size in (1, 3, 8, 11):
        rows = rng.permutation(11)[:size]
        part = moe_experts.reference(*case.float32(rows), project=linear.tiled)
        assert np.array_equal(part, together[rows])


def test_shared_expert_is_scaled_by_its_gate() -> None:
    case = Case(9, 1, 1)
    gate = normal(np.random.default_rng(1), 1, HIDDEN)
    want = np.stack(
        [expert(x, case.gate_up[0], case.down[0]) / (1.0 + np.exp(-(gate[0] @ x))) for x in case.x]
    )
    arguments = (case.x, gate, case.gate_up[0], case.down[0])
    for project in (linear.reference, linear.tiled):
        assert_close(moe_experts.shared(*arguments, project=project), want, FLOAT64_ALGORITHM)
        got = moe_experts.shared(*(f32(x) for x in arguments), project=project)
        assert_close(got, want, FLOAT32_REDUCTION)


def test_contract() -> None:
    case = Case(3, 4, 2)

    def fails(
        text: str,
        *,
        x: FloatArray = case.x,
        ids: NDArray[Any] = case.ids,
        weights: FloatArray = case.weights,
        gate_up: FloatArray = case.gate_up,
        down: FloatArray = case.down,
    ) -> None:
        with pytest.raises(OpContractError, match=f"moe_experts: {text}"):
            moe_experts.reference(x, ids, weights, gate_up, down)

    fails("expert_ids hold an index", ids=case.ids + 4)
    fails("expert_ids has shape", ids=case.ids[:2])
    fails("weights", weights=case.weights[:, :1])
    fails("gate_up", gate_up=case.gate_up[:, :, :5])
    fails("down", down=case.down[:2])
    fails("dtypes", x=f32(case.x))
    with pytest.raises(OpContractError, match="moe_experts: gate"):
        moe_experts.shared(case.x, np.ones((1, 5)), case.gate_up[0], case.down[0])
