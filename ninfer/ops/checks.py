"""Checks that Ops make of their arguments: cheap comparisons, one typed error."""

from __future__ import annotations

from typing import Any, NoReturn

from numpy.typing import NDArray

from ninfer.contract.errors import OpContractError


def fail(op: str, message: str) -> NoReturn:
    """Raise OpContractError with the Op's name in front."""
    raise OpContractError(f"{op}: {message}")


def require_shape(op: str, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    """`array` has exactly this shape."""
    if array.shape != shape:
        fail(op, f"{name} has shape {array.shape}, expected {shape}")


def require_rank(op: str, name: str, array: NDArray[Any], rank: int) -> None:
    """`array` has `rank` axes and none of them is empty."""
    if array.ndim != rank or 0 in array.shape:
        fail(op, f"{name} has shape {array.shape}, expected {rank} axes, none empty")


def require_same_dtype(op: str, first: NDArray[Any], *others: NDArray[Any]) -> None:
    """All arrays are floating point of one dtype."""
    dtype = first.dtype
    if dtype.kind != "f":
        fail(op, f"dtype {dtype} is not floating point")
    for other in others:
        if other.dtype != dtype:
            fail(op, f"dtypes {dtype} and {other.dtype} are mixed")


def require_indices(op: str, name: str, indices: NDArray[Any], count: int) -> None:
    """`indices` [n], n >= 1, are integers in [0, count)."""
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu":
        fail(op, f"{name} must be a non-empty integer vector, got {indices.dtype} {indices.shape}")
    if indices.min() < 0 or indices.max() >= count:
        fail(op, f"{name} holds an index outside [0, {count})")
