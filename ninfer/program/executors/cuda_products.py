"""Products: matrix products of both regimes of rounding, and the norms in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ninfer.contract.model import ModelConfig
from ninfer.ops import dequantise, linear_small_t, rms_norm
from ninfer.ops.linear_small_t import Epilogue, InputNorm
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS, UnitBuffers
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DeviceWeights


@dataclass(frozen=True, slots=True)
class NormRule:
    """RMSNorm of a model: y = x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    eps: float
    offset: float

    @classmethod
    def of(cls, config: ModelConfig) -> NormRule:
        return cls(config.rms_norm_eps, config.norm_offset)


class Products:
    """`small` for columns whose bits must not depend on one another, `large` for many columns."""

    def __init__(
        self, norm: NormRule, driver: CudaDriver, weights: DeviceWeights, buffers: UnitBuffers
    ) -> None:
        self._norm = norm
        self._driver = driver
        self._weights = weights
        self._buffers = buffers

    def small(
        self,
        name: str,
        x: DeviceTensor,
        y: DeviceTensor,
        *,
        norm: str | None = None,
        epilogue: Epilogue = Epilogue.STORE_BF16,
        leaves_sums: bool = False,
    ) -> None:
        """y = epilogue(W x), with RMSNorm of x in front when `norm` names its weight. A residual
        is y itself; its square sums are left for the next norm, as those of any y if asked for."""
        for first, last in self._blocks(name, x.shape[0]):
            sums = self._buffers.square_sums.rows(first, last)
            adds = epilogue is Epilogue.ADD_RESIDUAL
            for part in self._weights.linears[name]:
                target = part.columns_of(y.rows(first, last))
                linear_small_t.launch(
                    self._driver.kernels,
                    part.linear,
                    x.rows(first, last),
                    target,
                    workspace=self._buffers.partials,
                    stream=self._driver.stream,
                    epilogue=epilogue,
                    residual=target if adds else None,
                    square_sums=sums if adds or leaves_sums else None,
                    norm=None if norm is None else self.input_norm(norm, sums),
                    is_chained=True,
                )

    def _blocks(self, name: str, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Columns [first, last) of each launch: as few as the weight allows, of about one size."""
        most = SMALL_TOKENS
        if num_tokens > SMALL_TOKENS:
            limits, parts = self._driver.kernels.limits, self._weights.linears[name]
            most = min(linear_small_t.max_tokens(part.linear.plan, limits) for part in parts)
        size = -(-num_tokens // -(-num_tokens // most))
        for first in range(0, num_tokens, size):
            yield first, min(first + size, num_tokens)

    def large(self, name: str, x: DeviceTensor, y: DeviceTensor, *, adds: bool = False) -> None:
        """y = W x, or y += W x; gate and up rows in natural order."""
        for part in self._weights.linears[name]:
            layout = part.matrix.layout
            weight = self._buffers.unpacked.as_shape(layout.rows, layout.columns)
            dequantise.launch(
                self._driver.kernels,
                layout,
                part.linear.image,
                weight,
                row_scale=part.linear.row_scale,
                is_interleaved=part.matrix.is_interleaved,
                stream=self._driver.stream,
                is_chained=True,
            )
            self._driver.multiply(x, weight, part.columns_of(y), adds=adds)

    def normalise(self, name: str, x: DeviceTensor, y: DeviceTensor | None = None) -> DeviceTensor:
        """RMSNorm of x in y, by default the buffer for it."""
        y = y or self._buffers.normed.rows(0, x.shape[0])
        rms_norm.launch(
            self._driver.kernels,
            x,
            self._weights.vectors[name],
            y,
            eps=self._norm.eps,
            offset=self._norm.offset,
            stream=self._driver.stream,
            is_chained=True,
        )
        return y

    def input_norm(self, name: str, square_sums: DeviceTensor) -> InputNorm:
        """RMSNorm in front of a kernel, by the sums that the Op before has left."""
        rule = self._norm
        return InputNorm(square_sums, self._weights.vectors[name], rule.eps, rule.offset)
