"""The MLPs of a layer as launches: dense, and a mixture of experts."""

from __future__ import annotations

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig
from ninfer.ops import moe_combine, moe_experts_small_t, moe_pairs, moe_router, swiglu
from ninfer.ops.linear_small_t import Epilogue
from ninfer.ops.moe_combine import SharedOutput
from ninfer.ops.moe_pairs import SortedPairs
from ninfer.ops.moe_router import SharedGate
from ninfer.program.executors.cuda_buffers import UnitBuffers
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DeviceWeights


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


class MoeMlp:
    """hidden += sum of the chosen experts' MLPs, weighted, and the shared expert's, gated.

    Experts take the same kernels in both regimes, in blocks of tokens: a column's bits depend on
    its own input alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        products: Products,
        buffers: UnitBuffers,
        driver: CudaDriver,
        weights: DeviceWeights,
    ) -> None:
        if config.moe is None or buffers.moe is None:
            raise InvariantError(f"{prefix} is a MoE layer of a model without MoE sizes")
        self._moe = config.moe
        self._norm = f"{prefix}.post_norm"
        self._prefix = f"{prefix}.moe"
        self._products = products
        self._buffers = buffers
        self._moe_buffers = buffers.moe
        self._driver = driver
        self._gate_up = weights.experts[f"{self._prefix}.experts.gate_up"]
        self._down = weights.experts[f"{self._prefix}.experts.down"]
        self._shared_gate = weights.vectors.get(f"{self._prefix}.shared_gate")

    def queue_small(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        tokens = hidden.shape[0]
        x = self._products.normalise(self._norm, hidden)
        logits = self._moe_buffers.logits.rows(0, tokens)
        self._products.small(f"{self._prefix}.router", x, logits, epilogue=Epilogue.STORE_FLOAT)
        if self._moe.shared_intermediate_size is not None:
            inner = self._buffers.mixed.as_shape(tokens, self._moe.shared_intermediate_size)
            shared = self._moe_buffers.shared.rows(0, tokens)
            self._products.small(
                f"{self._prefix}.shared.gate_up", x, inner, epilogue=Epilogue.SWIGLU
            )
            self._products.small(
                f"{self._prefix}.shared.down_proj", inner, shared, epilogue=Epilogue.STORE_FLOAT
            )
        self._queue_experts(x, hidden, leaves_sums=True)

    def queue_large(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        tokens = hidden.shape[0]
        x = self._products.normalise(self._norm, hidden)
        self._products.large(f"{self._prefix}.router", x, self._moe_buffers.logits.rows(0, tokens))
        inner_size = self._moe.shared_intermediate_size
        if inner_size is not None:
            gate_up = self._buffers.projected.as_shape(tokens, 2 * inner_size)
            inner = self._buffers.mixed.as_shape(tokens, inner_size)
            shared = self._moe_buffers.shared.rows(0, tokens)
            self._products.large(f"{self._prefix}.shared.gate_up", x, gate_up)
            swiglu.launch(
                self._driver.kernels, gate_up, inner, stream=self._driver.stream, is_chained=True
            )
            self._products.large(f"{self._prefix}.shared.down_proj", inner, shared)
        self._queue_experts(x, hidden, leaves_sums=False)

    def _queue_experts(self, x: DeviceTensor, hidden: DeviceTensor, *, leaves_sums: bool) -> None:
        step = self._moe_buffers.block_tokens
        for first in range(0, x.shape[0], step):
            last = min(first + step, x.shape[0])
            self._queue_block(x, hidden, first, last, leaves_sums=leaves_sums)

    def _queue_block(
        self, x: DeviceTensor, hidden: DeviceTensor, first: int, last: int, *, leaves_sums: bool
    ) -> None:
        """Tokens [first, last): route, sort, run the experts, add up."""
        kernels, stream = self._driver.kernels, self._driver.stream
        buffers, count, tokens = self._moe_buffers, self._moe.experts_per_token, last - first
        part, target = x.rows(first, last), hidden.rows(first, last)
        expert_ids = buffers.expert_ids.as_shape(tokens, count)
        weights = buffers.weights.as_shape(tokens, count)
        shared_gate = buffers.shared_gate.as_shape(tokens)
        gate, shared = None, None
        if self._shared_gate is not None:
            gate = SharedGate(part, self._shared_gate, shared_gate)
            shared = SharedOutput(buffers.shared.rows(first, last), shared_gate)
        moe_router.launch(
            kernels, buffers.logits.rows(first, last), expert_ids, weights,
            renormalise=self._moe.renormalise, shared=gate, stream=stream, is_chained=True,
        )  # fmt: skip
        pairs = self._pairs(tokens * count)
        moe_pairs.launch(
            kernels, expert_ids, pairs, self._moe.num_experts, stream=stream, is_chained=True
        )
        inner = buffers.inner.as_shape(tokens * count, self._moe.intermediate_size)
        routed = buffers.routed.as_shape(tokens * count, hidden.shape[1])
        moe_experts_small_t.launch(
            kernels, self._gate_up, pairs, part, inner, is_gated=True, stream=stream,
            is_chained=True,
        )  # fmt: skip
        moe_experts_small_t.launch(
            kernels, self._down, pairs, inner, routed, is_gated=False, stream=stream,
            is_chained=True,
        )  # fmt: skip
        moe_combine.launch(
            kernels, routed, weights, target, target, shared=shared, stream=stream,
            square_sums=self._buffers.square_sums.rows(first, last) if leaves_sums else None,
            is_chained=True,
        )  # fmt: skip

    def _pairs(self, num_pairs: int) -> SortedPairs:
        buffers = self._moe_buffers
        return SortedPairs(
            buffers.order.as_shape(num_pairs),
            buffers.positions.as_shape(num_pairs),
            buffers.sorted_experts.as_shape(num_pairs),
            buffers.sorted_tokens.as_shape(num_pairs),
            buffers.offsets,
        )
