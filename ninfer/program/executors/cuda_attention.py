"""AttentionMixer: a layer of gated or plain attention as launches.

qkv = qkv_proj(norm(hidden));  q normed and rotated, k and v into the pages
hidden += o_proj(attention(q, pages) * sigmoid(gate))
"""

from __future__ import annotations

from ninfer.contract.model import ModelConfig
from ninfer.ops import attention_prepare, paged_attention_decode, paged_attention_prefill
from ninfer.ops.attention_prepare import HeadNorms
from ninfer.ops.kv_pages import stored_dim
from ninfer.ops.linear_small_t import Epilogue
from ninfer.program.executors.cuda_buffers import qkv_width
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_memory import KvLayer
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DeviceWeights
from ninfer.program.executors.cuda_workspace import Workspace


class AttentionMixer:
    """The layer whose weights are named `prefix`, over its pages."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        kv: KvLayer,
        driver: CudaDriver,
        weights: DeviceWeights,
        products: Products,
        workspace: Workspace,
    ) -> None:
        vectors = weights.vectors
        self._config = config.attention
        self._qkv_width = qkv_width(config)
        self._scale = config.attention.head_dim**-0.5
        self._norm = f"{prefix}.input_norm"
        self._qkv_proj = f"{prefix}.attn.qkv_proj"
        self._o_proj = f"{prefix}.attn.o_proj"
        self._norms = HeadNorms(
            vectors[f"{prefix}.attn.q_norm"],
            vectors[f"{prefix}.attn.k_norm"],
            config.rms_norm_eps,
            config.norm_offset,
        )
        self._kv = kv
        self._rope = workspace.rope
        self._driver = driver
        self._products = products
        self._buffers = workspace.buffers

    def queue_small(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        qkv, q, y = self._outputs(hidden.shape[0])
        self._products.small(self._qkv_proj, hidden, qkv, norm=self._norm)
        self._queue_prepare(qkv, q, unit)
        paged_attention_decode.launch(
            self._driver.kernels,
            q,
            self._kv,
            y,
            page_tables=unit.page_tables,
            row_starts=unit.row_starts,
            ordinals=unit.ordinals,
            workspace=self._buffers.attention,
            scale=self._scale,
            columns_per_row=unit.num_tokens // unit.num_rows,
            stream=self._driver.stream,
            gate=qkv if self._config.has_output_gate else None,
            is_chained=True,
        )
        self._products.small(self._o_proj, y, hidden, epilogue=Epilogue.ADD_RESIDUAL)

    def queue_large(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        qkv, q, y = self._outputs(hidden.shape[0])
        x = self._products.normalise(self._norm, hidden)
        self._products.large(self._qkv_proj, x, qkv)
        self._queue_prepare(qkv, q, unit)
        paged_attention_prefill.launch(
            self._driver.kernels,
            q,
            self._kv,
            y,
            page_table=unit.page_tables.index(0),
            ordinals=unit.ordinals,
            scale=self._scale,
            stream=self._driver.stream,
            gate=qkv if self._config.has_output_gate else None,
            is_chained=True,
        )
        self._products.large(self._o_proj, y, hidden, adds=True)

    def queue_keys(self, hidden: DeviceTensor, unit: UnitTensors, *, is_small: bool) -> None:
        """Only the keys and values of the unit's columns; hidden stays."""
        qkv, q, _ = self._outputs(hidden.shape[0])
        if is_small:
            self._products.small(self._qkv_proj, hidden, qkv, norm=self._norm)
        else:
            self._products.large(self._qkv_proj, self._products.normalise(self._norm, hidden), qkv)
        self._queue_prepare(qkv, q, unit)

    def _outputs(self, num_tokens: int) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor]:
        """The projection, q and the attention's result, in their buffers."""
        att, buffers = self._config, self._buffers
        return (
            buffers.projected.as_shape(num_tokens, self._qkv_width),
            buffers.query.as_shape(num_tokens, att.num_heads, stored_dim(att.head_dim)),
            buffers.mixed.as_shape(num_tokens, att.num_heads * att.head_dim),
        )

    def _queue_prepare(self, qkv: DeviceTensor, q: DeviceTensor, unit: UnitTensors) -> None:
        attention_prepare.launch(
            self._driver.kernels,
            qkv,
            q,
            self._kv,
            norms=self._norms,
            rotary_tables=self._rope,
            rope_positions=unit.rope_positions,
            ordinals=unit.ordinals,
            column_rows=unit.column_rows,
            page_tables=unit.page_tables,
            stream=self._driver.stream,
            is_chained=True,
        )
