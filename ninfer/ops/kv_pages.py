"""KV pages on the device: how keys and values of 64 tokens are stored, for the Ops that touch them.

    pages   [P, 2, Hk, 64, D]: keys, then values; bf16 (uint16), e4m3 codes (uint8) or int8
    scales  e4m3: f32 [P, 2, Hk, 64]; int8: f16 [P, 2, Hk, 64, D / 64], a group of 64 numbers each

    e4m3    scale = amax / 448;       code = e4m3(x / scale), saturating
    int8    scale = f16(amax / 127);  code = round(x / scale) within [-127, 127]

x is what bf16 would have stored; where scale is 0 so are the codes. Keys are stored normed and
rotated. Heads of 32 numbers lie in places of D = 64, the rest of them zeros: these add nothing to
a product of a query and a key, and stay zeros in a sum of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.contract.units import PAGE_TOKENS
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_view
from ninfer.ops.float_codecs import E4M3_MAX, ByteArray, e4m3_to_float, float_to_e4m3

HEAD_DIMS: Final = (32, 64, 128, 256)
"""Numbers of a head that there are kernels for."""
_STORED_DIMS: Final = (64, 128, 256)
SCALE_GROUP: Final = 64
"""Numbers of a head that share a scale in int8 pages."""
_FORMATS: Final = {"uint16": "bf16", "uint8": "fp8", "int8": "int8"}
_INT8_MAX: Final = 127.0
_HALF_MAX: Final = 65504.0


class KvPages(Protocol):
    """Pages of one layer; `scales` is None for bf16."""

    @property
    def pages(self) -> DeviceArray: ...

    @property
    def scales(self) -> DeviceArray | None: ...


@dataclass(frozen=True, slots=True)
class KvPagesView:
    """Checked pages. format is bf16, fp8 or int8; head_dim as stored; scales_address 0 for bf16."""

    format: str
    num_pages: int
    num_kv_heads: int
    head_dim: int
    address: int
    scales_address: int

    @property
    def scale_bytes(self) -> int:
        """Of one page and head."""
        return PAGE_TOKENS * {"bf16": 0, "fp8": 4, "int8": self.head_dim // 32}[self.format]

    @property
    def row_bytes(self) -> int:
        """Of one token's head."""
        return self.head_dim * (2 if self.format == "bf16" else 1)


def stored_dim(head_dim: int) -> int:
    """Numbers that the place of a head of HEAD_DIMS has."""
    return max(head_dim, _STORED_DIMS[0])


def view_pages(op: str, kv: KvPages) -> KvPagesView:
    """Check dtypes, shapes and alignment. Raises OpContractError."""
    interface = kv.pages.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"]).name
    if dtype not in _FORMATS:
        fail(op, f"pages are {dtype}, expected one of {', '.join(_FORMATS)}")
    shape = view_of(op, "pages", kv.pages, dtype, 5).shape
    num_pages, parts, kv_heads, tokens, head_dim = shape
    if parts != 2 or tokens != PAGE_TOKENS or head_dim not in _STORED_DIMS or 0 in shape:
        wanted = f"[P, 2, Hk, {PAGE_TOKENS}, one of {_STORED_DIMS}]"
        fail(op, f"pages have shape {shape}, expected {wanted}")
    pages = require_view(op, "pages", kv.pages, dtype, shape, alignment_bytes=16)
    scales = _view_scales(op, kv.scales, _FORMATS[dtype], shape)
    return KvPagesView(_FORMATS[dtype], num_pages, kv_heads, head_dim, pages.address, scales)


def encode(values: Float32Array, kv_format: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes and scales of heads [.., D] that bf16 holds exactly, for fp8 or int8."""
    if kv_format == "fp8":
        scales = (np.abs(values).max(-1) / np.float32(E4M3_MAX)).astype(np.float32)
        return float_to_e4m3(_quotient(values, scales[..., None])), scales
    groups = values.reshape(*values.shape[:-1], -1, SCALE_GROUP)
    largest = np.abs(groups).max(-1) / np.float32(_INT8_MAX)
    scales = np.minimum(largest, np.float32(_HALF_MAX)).astype(np.float16)
    quotient = _quotient(groups, scales.astype(np.float32)[..., None])
    codes = np.clip(np.rint(quotient), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return codes.reshape(values.shape), scales


def decode(codes: NDArray[Any], scales: NDArray[Any], kv_format: str) -> NDArray[np.float64]:
    """What codes [.., D] stand for."""
    if kv_format == "fp8":
        numbers: ByteArray = codes
        return e4m3_to_float(numbers).astype(np.float64) * scales.astype(np.float64)[..., None]
    groups = codes.astype(np.float64).reshape(*codes.shape[:-1], -1, SCALE_GROUP)
    scaled: NDArray[np.float64] = groups * scales.astype(np.float64)[..., None]
    return scaled.reshape(codes.shape)


def _view_scales(
    op: str, scales: DeviceArray | None, kv_format: str, shape: tuple[int, ...]
) -> int:
    if (scales is None) != (kv_format == "bf16"):
        fail(op, f"scales come with fp8 and int8 pages, these are {kv_format}")
    if scales is None:
        return 0
    if kv_format == "fp8":
        return require_view(op, "scales", scales, "float32", shape[:-1], alignment_bytes=16).address
    groups = (*shape[:-1], shape[-1] // SCALE_GROUP)
    return require_view(op, "scales", scales, "float16", groups, alignment_bytes=16).address


def _quotient(values: Float32Array, scales: Float32Array) -> Float32Array:
    positive = np.where(scales > 0.0, scales, np.float32(1.0))
    return np.where(scales > 0.0, values / positive, np.float32(0.0))
