"""The MLPs of a layer as launches: dense, and a mixture of experts."""

from __future__ import annotations

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import MlpKind, ModelConfig
from ninfer.ops import (
    moe_combine,
    moe_grouped,
    moe_pairs,
    moe_router,
    moe_small_t,
    swiglu,
)
from ninfer.ops.linear_small_t import Epilogue
from ninfer.ops.moe_combine import SharedOutput
from ninfer.ops.moe_router import SharedGate
from ninfer.ops.moe_small_t import MoeWeights, MoeWorkspace, SharedExpert
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS, UnitBuffers
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

    Few tokens take three launches, many a sort by expert and products of what an expert has. A
    token's bits never depend on others in the unit; the two regimes add in different orders.
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
        self._has_shared = self._moe.shared_intermediate_size is not None
        self._weights = self._moe_weights(weights)

    def _moe_weights(self, weights: DeviceWeights) -> MoeWeights:
        (router,) = weights.linears[f"{self._prefix}.router"]
        gate_up = weights.experts[f"{self._prefix}.experts.gate_up"]
        down = weights.experts[f"{self._prefix}.experts.down"]
        shared = None
        if self._has_shared:
            gate_up_parts = weights.linears[f"{self._prefix}.shared.gate_up"]
            down_parts = weights.linears[f"{self._prefix}.shared.down_proj"]
            whole = SharedExpert(gate_up_parts[0].linear, down_parts[0].linear)
            is_whole = gate_up_parts[0].is_whole and down_parts[0].is_whole
            if is_whole and moe_small_t.can_fuse(gate_up, down, whole):
                shared = whole
        return MoeWeights(
            router.linear, gate_up, down, self._moe.experts_per_token, self._moe.renormalise,
            shared_gate=weights.vectors.get(f"{self._prefix}.shared_gate"), shared=shared,
        )  # fmt: skip

    def queue_small(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        for first in range(0, hidden.shape[0], SMALL_TOKENS):
            last = min(first + SMALL_TOKENS, hidden.shape[0])
            self._queue_few(hidden.rows(first, last), self._buffers.square_sums.rows(first, last))

    def _queue_few(self, hidden: DeviceTensor, sums: DeviceTensor) -> None:
        tokens, buffers = hidden.shape[0], self._moe_buffers
        is_apart = self._has_shared and self._weights.shared is None
        workspace = MoeWorkspace(
            normed=self._buffers.normed.rows(0, tokens),
            logits=buffers.logits.rows(0, tokens),
            shared_gate=buffers.shared_gate.as_shape(tokens),
            inner=buffers.inner.as_shape(
                tokens * self._moe.experts_per_token, self._moe.intermediate_size
            ),
            shared=buffers.shared.rows(0, tokens) if is_apart else self._shared_inner(tokens),
        )
        kernels, stream = self._driver.kernels, self._driver.stream
        moe_small_t.launch_router(
            kernels, self._weights, hidden, self._products.input_norm(self._norm, sums), workspace,
            stream=stream, is_chained=True,
        )  # fmt: skip
        if is_apart:
            self._queue_few_shared(tokens)
        moe_small_t.launch_experts(
            kernels, self._weights, hidden, hidden, workspace, square_sums=sums, stream=stream,
            is_chained=True,
        )  # fmt: skip

    def _queue_few_shared(self, tokens: int) -> None:
        """A shared expert whose formats the routed ones do not have."""
        inner = self._shared_inner(tokens)
        if inner is None:
            raise InvariantError(f"{self._prefix} has no shared expert")
        x, shared = self._buffers.normed.rows(0, tokens), self._moe_buffers.shared.rows(0, tokens)
        self._products.small(f"{self._prefix}.shared.gate_up", x, inner, epilogue=Epilogue.SWIGLU)
        self._products.small(f"{self._prefix}.shared.down_proj", inner, shared)

    def _shared_inner(self, tokens: int) -> DeviceTensor | None:
        size = self._moe.shared_intermediate_size
        return None if size is None else self._buffers.mixed.as_shape(tokens, size)

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
        self._queue_experts(x, hidden)

    def _queue_experts(self, x: DeviceTensor, hidden: DeviceTensor) -> None:
        step = self._moe_buffers.block_tokens
        for first in range(0, x.shape[0], step):
            last = min(first + step, x.shape[0])
            self._queue_block(x, hidden, first, last)

    def _queue_block(self, x: DeviceTensor, hidden: DeviceTensor, first: int, last: int) -> None:
        """Tokens [first, last): route, sort, run the experts, add up."""
        kernels, stream = self._driver.kernels, self._driver.stream
        buffers, count, tokens = self._moe_buffers, self._moe.experts_per_token, last - first
        part, target = x.rows(first, last), hidden.rows(first, last)
        expert_ids = buffers.expert_ids.as_shape(tokens, count)
        weights = buffers.weights.as_shape(tokens, count)
        shared_gate = buffers.shared_gate.as_shape(tokens)
        gate, shared = None, None
        if self._weights.shared_gate is not None:
            gate = SharedGate(part, self._weights.shared_gate, shared_gate)
            shared = SharedOutput(buffers.shared.rows(first, last), shared_gate)
        moe_router.launch(
            kernels, buffers.logits.rows(first, last), expert_ids, weights,
            renormalise=self._moe.renormalise, shared=gate, stream=stream, is_chained=True,
        )  # fmt: skip
        pairs = buffers.pairs(tokens * count, self._moe.num_experts)
        moe_pairs.launch(
            kernels, expert_ids, pairs, self._moe.num_experts, stream=stream, is_chained=True
        )
        inner = buffers.inner.as_shape(tokens * count, self._moe.intermediate_size)
        routed = buffers.routed.as_shape(tokens * count, hidden.shape[1])
        moe_grouped.launch(
            kernels, self._weights.gate_up, pairs, part, inner, is_gated=True, stream=stream,
            is_chained=True,
        )  # fmt: skip
        moe_grouped.launch(
            kernels, self._weights.down, pairs, inner, routed, is_gated=False, stream=stream,
            is_chained=True,
        )  # fmt: skip
        moe_combine.launch(
            kernels, routed, weights, target, target, positions=pairs.positions, shared=shared,
            stream=stream, is_chained=True,
        )  # fmt: skip


def make_mlp(
    config: ModelConfig,
    kind: MlpKind,
    prefix: str,
    products: Products,
    buffers: UnitBuffers,
    driver: CudaDriver,
    weights: DeviceWeights,
) -> DenseMlp | MoeMlp:
    """The MLP of the layer whose weights are named `prefix`."""
    if kind is MlpKind.DENSE:
        return DenseMlp(config, prefix, products, buffers, driver)
    return MoeMlp(config, prefix, products, buffers, driver, weights)
