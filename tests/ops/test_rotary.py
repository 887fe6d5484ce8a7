from __future__ import annotations

import math

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.contract.model import RopeConfig
from ninfer.ops import rotary
from tests.helpers.arrays import Float64Array, f32, normal
from tests.helpers.tolerance import FLOAT64_ALGORITHM, Tolerance, assert_close


def rotated(x: Float64Array, angle_of: list[list[float]], half: int) -> Float64Array:
    y = x.copy()
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            for j in range(half):
                cos, sin = math.cos(angle_of[token][j]), math.sin(angle_of[token][j])
                a, b = x[token, head, j], x[token, head, half + j]
                y[token, head, j] = a * cos - b * sin
                y[token, head, half + j] = b * cos + a * sin
    return y


def run(
    x: Float64Array, positions: np.ndarray[tuple[int, ...], np.dtype[np.int32]], rope: RopeConfig
) -> Float64Array:
    y = x.copy()
    rotary.reference(y, *rotary.angles(positions, rotary.frequencies(rope, np.float64)))
    return y


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 2), (64, 16), (128, 128), (256, 64)])
def test_first_dimensions_turn_and_the_rest_stays(head_dim: int, rotary_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = normal(rng, 4, 3, head_dim)
    ordinals = [0, 1, 77, 200]
    positions = np.broadcast_to(np.array(ordinals, np.int32), (3, 4))
    rope = RopeConfig(theta=10_000.0, rotary_dim=rotary_dim)
    half = rotary_dim // 2
    angle_of = [[p * 10_000.0 ** (-2 * j / rotary_dim) for j in range(half)] for p in ordinals]
    want = rotated(x, angle_of, half)
    assert_close(run(x, positions, rope), want, FLOAT64_ALGORITHM)
    y = f32(x)
    rotary.reference(y, *rotary.angles(positions, rotary.frequencies(rope)))
    assert y.dtype == np.float32
    assert_close(y, want, Tolerance(1e-4, 0.0))
    assert np.array_equal(y[:, :, rotary_dim:], f32(x)[:, :, rotary_dim:])


def test_interleaved_mrope_takes_the_documented_axes() -> None:
    # [11, 11, 10] of 32 frequencies: time 0,3,..,30; height 1,4,..,31; width 2,5,..,29.
    released = rotary.frequencies(RopeConfig(1e7, 64, (11, 11, 10))).axes.tolist()
    assert [j for j in range(32) if released[j] == 0] == list(range(0, 31, 3))
    assert [j for j in range(32) if released[j] == 1] == list(range(1, 32, 3))
    assert [j for j in range(32) if released[j] == 2] == list(range(2, 30, 3))
    # [24, 20, 20] of 64: height and width below 60, time takes the rest.
    vision = rotary.frequencies(RopeConfig(5e6, 128, (24, 20, 20))).axes.tolist()
    assert vision[:60] == [0, 1, 2] * 20
    assert vision[60:] == [0, 0, 0, 0]


def test_triples_use_each_axis() -> None:
    x = normal(np.random.default_rng(0), 2, 2, 32)
    rope = RopeConfig(10_000.0, 16, (3, 3, 2))
    positions = np.array([[5, 9], [1, 40], [30, 2]], np.int32)
    axes = [0, 1, 2, 0, 1, 2, 0, 1]
    angle_of = [
        [float(positions[axes[j], t]) * 10_000.0 ** (-2 * j / 16) for j in range(8)]
        for t in range(2)
    ]
    assert_close(run(x, positions, rope), rotated(x, angle_of, 8), FLOAT64_ALGORITHM)


def test_equal_axes_equal_one_axis() -> None:
    x = normal(np.random.default_rng(0), 6, 2, 32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (3, 6))
    plain = run(x, positions, RopeConfig(10_000.0, 16))
    assert np.array_equal(run(x, positions, RopeConfig(10_000.0, 16, (3, 3, 2))), plain)


def test_linear_scaling_divides_positions() -> None:
    x = normal(np.random.default_rng(0), 3, 2, 16)
    positions = np.broadcast_to(np.array([4, 8, 400], np.int32), (3, 3))
    scaled = run(x, positions, RopeConfig(10_000.0, 16, rope_type="linear", factor=4.0))
    want = run(x, np.ascontiguousarray(positions) // 4, RopeConfig(10_000.0, 16))
    assert_close(scaled, want, FLOAT64_ALGORITHM)


def test_yarn_keeps_fast_frequencies_and_slows_the_slow_ones() -> None:
    rope = RopeConfig(1e6, 128, rope_type="yarn", factor=4.0, original_max_position=32_768)
    constants = rotary.frequencies(rope, np.float64)
    plain = rotary.frequencies(RopeConfig(1e6, 128), np.float64).inverse
    ratio = constants.inverse / plain
    # Frequency j turns 32768 * plain_j / (2 pi) times; the ramp lies between 32 and 1 turns.
    turns = 32_768 * plain / (2 * math.pi)
    assert np.allclose(ratio[turns > 40], 1.0)
    assert np.allclose(ratio[turns < 0.8], 0.25)
    middle = ratio[(turns < 30) & (turns > 1.3)]
    assert (np.diff(middle) < 0).all()
    assert ((middle > 0.25) & (middle < 1.0)).all()
    low = math.floor(128 * math.log(32_768 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(32_768 / (1 * 2 * math.pi)) / (2 * math.log(1e6)))
    share = (low + 3 - low) / (high - low)
    assert ratio[low + 3] == pytest.approx(0.25 * share + 1.0 * (1 - share))
    assert constants.scale == pytest.approx(0.1 * math.log(4.0) + 1.0)
    positions = np.broadcast_to(np.array([3], np.int32), (3, 1))
    cos, sin = rotary.angles(positions, constants)
    assert_close(cos**2 + sin**2, np.full((1, 64), constants.scale**2), FLOAT64_ALGORITHM)


def test_yarn_factor_on_attention_may_be_given() -> None:
    rope = RopeConfig(
        1e6, 128, rope_type="yarn", factor=4.0, original_max_position=4096, attention_factor=1.0
    )
    assert rotary.frequencies(rope).scale == 1.0


def test_contract() -> None:
    for rope, text in (
        (RopeConfig(1e4, 7), "rotary_dim 7"),
        (RopeConfig(1e4, 8, rope_type="longrope"), "longrope"),
        (RopeConfig(1e4, 8, rope_type="yarn", factor=2.0), "original_max_position"),
    ):
        with pytest.raises(OpContractError, match=f"rotary: .*{text}"):
            rotary.frequencies(rope)
    cos = np.ones((3, 8), np.float32)
    with pytest.raises(OpContractError, match="rotary: 16 rotary dimensions"):
        rotary.reference(np.ones((3, 2, 8), np.float32), cos, cos)
    with pytest.raises(OpContractError, match="rotary: sin"):
        rotary.reference(np.ones((3, 2, 16), np.float32), cos, cos[:2])
    with pytest.raises(OpContractError, match="rotary: positions"):
        rotary.angles(np.zeros((2, 3), np.int32), rotary.frequencies(RopeConfig(1e4, 8)))
