"""The MLPs of a layer as launches: dense, and a mixture of experts."""

from __future__ import annotations

from ninfer.contract.model import ModelConfig
from ninfer.ops import swiglu
from ninfer.ops.linear_small_t import Epilogue
from ninfer.program.executors.cuda_buffers import UnitBuffers
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import DeviceTensor


class DenseMlp:
    """hidden += down(silu(gate x) * up x), x = norm(hidden)."""

    def __init__(
        self, config: ModelConfig, prefix: str, products: Products, buffers: UnitBuffers,
        driver: CudaDriver,
    ) -> None:  # fmt: skip
        self._inner = config.intermediate_size
        self._prefix = prefix
        self._products = products
        self._buffers = buffers
        self._driver = driver

    def queue_small(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        inner = self._buffers.mixed.as_shape(hidden.shape[0], self._inner)
        self._products.small(
            f"{self._prefix}.mlp.gate_up", hidden, inner,
            norm=f"{self._prefix}.post_norm", epilogue=Epilogue.SWIGLU,
        )  # fmt: skip
        self._products.small(
            f"{self._prefix}.mlp.down_proj", inner, hidden, epilogue=Epilogue.ADD_RESIDUAL
        )

    def queue_large(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        tokens = hidden.shape[0]
        x = self._products.normalise(f"{self._prefix}.post_norm", hidden)
        gate_up = self._buffers.projected.as_shape(tokens, 2 * self._inner)
        self._products.large(f"{self._prefix}.mlp.gate_up", x, gate_up)
        inner = self._buffers.mixed.as_shape(tokens, self._inner)
        swiglu.launch(
            self._driver.kernels, gate_up, inner, stream=self._driver.stream, is_chained=True
        )
        self._products.large(f"{self._prefix}.mlp.down_proj", inner, hidden, adds=True)
