"""kernels/sampling.cu in NumPy: distances, histograms, radix cuts, ties and the draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops import philox
from ninfer.ops.device_sampling import ROW

TAIL = 0xFFFFFFFF
LISTS = ("bias", "suppressed", "prompt", "generated")


@dataclass(frozen=True, slots=True)
class Cut:
    distance: int
    ties: int
    mass: int


def sampled(
    logits: NDArray[np.float32], row: Any, ids: NDArray[np.int32], values: NDArray[np.float32]
) -> int:
    """The token id the kernel chooses, -1 for none. `row` is an element of ROW."""
    assert row.dtype == ROW
    scores = adjusted(logits, row, ids, values)
    if not np.isfinite(logits).all() or scores.max() == -np.inf:
        return -1
    peak = scores.max()
    if row["is_greedy"]:
        return int(np.flatnonzero(scores == peak)[0])
    scale = np.float32(64.0 / row["temperature"])
    with np.errstate(over="ignore"):
        v = (peak - scores) * scale
    near = v < 2047.0
    distances = np.full(scores.size, TAIL, np.uint32)
    distances[near] = (v[near] * np.float32(2.0**21)).astype(np.uint32)
    cut = find_cut(distances, row)
    inverse = np.float32(1.0 / row["temperature"])
    with np.errstate(under="ignore"):
        alive = near & (np.exp((scores - peak) * inverse) >= row["min_p"])
    if cut is not None:
        alive &= distances <= cut.distance
        tied = np.flatnonzero(distances == cut.distance)
        alive[tied[cut.ties :]] = False
    survivors = np.flatnonzero(alive)
    uniforms = philox.token_uniforms(
        int(row["seed"]), int(row["position"]), survivors, int(row["purpose"])
    )
    gaps = scores[survivors].astype(np.float64) - np.float64(peak)
    noisy = gaps / row["temperature"] - np.log(-np.log(uniforms))
    return int(survivors[noisy.argmax()])


def adjusted(
    logits: NDArray[np.float32], row: Any, ids: NDArray[np.int32], values: NDArray[np.float32]
) -> NDArray[np.float32]:
    scores = logits.copy()
    places = {n: slice(row[f"{n}_begin"], row[f"{n}_begin"] + row[f"{n}_count"]) for n in LISTS}
    scores[ids[places["bias"]]] += values[places["bias"]]
    scores[ids[places["suppressed"]]] = -np.inf
    if row["repetition"] != 1.0:
        seen = np.zeros(scores.size, np.bool_)
        seen[ids[places["prompt"]]] = seen[ids[places["generated"]]] = True
        by = row["repetition"]
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / by, scores[seen] * by)
    generated = places["generated"]
    scores[ids[generated]] -= row["presence"] + row["frequency"] * values[generated]
    return scores


def mass_of(distances: NDArray[np.uint32]) -> NDArray[np.int64]:
    with np.errstate(under="ignore"):
        weights = np.exp(-(distances.astype(np.float32) * np.float32(2.0**-27)))
    masses: NDArray[np.int64] = (weights * np.float32(2.0**35)).astype(np.int64)
    return masses


def find_cut(distances: NDArray[np.uint32], row: Any) -> Cut | None:
    near = distances[distances != TAIL]
    top_k, top_p = int(row["top_k"]), float(row["top_p"])
    mass = int(mass_of(near).sum())
    cut = None
    if top_k and near.size >= top_k:
        cut = _refined(near, top_k, by_mass=False)
        mass = cut.mass + cut.ties * int(mass_of(np.array([cut.distance], np.uint32))[0])
    if top_p < 1.0:
        wanted = min(max(1, int(np.ceil(top_p * float(mass)))), mass)
        cut = _refined(near, wanted, by_mass=True)
    return cut


def _refined(near: NDArray[np.uint32], wanted: int, *, by_mass: bool) -> Cut:
    """Three digits of 11, 11 and 10 bits, each from the histogram of those before it."""
    prefix, count_before, mass_before = 0, 0, 0
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        inside = near[(near.astype(np.uint64) >> np.uint64(shift + bits)) == prefix]
        digits = (inside >> np.uint32(shift)) & np.uint32((1 << bits) - 1)
        counts = np.bincount(digits, minlength=2048)
        masses = np.zeros(2048, np.int64)
        np.add.at(masses, digits, mass_of(inside))
        left = wanted - (mass_before if by_mass else count_before)
        bucket = int(np.searchsorted(np.cumsum(masses if by_mass else counts), left))
        prefix = prefix << bits | bucket
        count_before += int(counts[:bucket].sum())
        mass_before += int(masses[:bucket].sum())
    ties = wanted - count_before
    if by_mass:
        ties = -(-(wanted - mass_before) // int(mass_of(np.array([prefix], np.uint32))[0]))
    return Cut(prefix, ties, mass_before)
