"""Layers of a DFlash draft model as launches: keys of the context, and passes of blocks over it.

    context   k and v of ordinal p from what the target made of token p, the same for every layer
    blocks    hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
              a DFlash2:  z = norm(hidden);  hidden += conv(attention(conv(z)))  and so for the MLP

A block's own keys lie in the pages behind the frontier, where its columns read them; the next unit
writes these places anew. Every column sees an interval of keys: windows and blocks that look ahead
are nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ninfer.models.dflash_config import DflashConfig
from ninfer.ops import attention_prepare, dflash_conv, paged_attention_decode
from ninfer.ops.attention_prepare import HeadNorms, RotaryTables
from ninfer.ops.kv_pages import stored_dim
from ninfer.ops.linear_small_t import Epilogue
from ninfer.program.executors.cuda_buffers import UnitBuffers
from ninfer.program.executors.cuda_dflash_buffers import SecondBuffers
from ninfer.program.executors.cuda_dflash_weights import PREFIX
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_memory import KvLayer
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DeviceWeights


@dataclass(frozen=True, slots=True)
class BlockUnit:
    """Blocks of W columns a row. firsts, lasts int32 [R * W]: the keys that each column sees in
    layers of one kind."""

    unit: UnitTensors
    firsts: DeviceTensor
    lasts: DeviceTensor

    @property
    def columns(self) -> int:
        return self.unit.num_tokens // self.unit.num_rows


_Run: TypeAlias = Callable[[DeviceTensor, str | None, BlockUnit], DeviceTensor]
"""(x [T, C], the norm that it still needs, blocks) -> what goes into the output projection."""


class DflashLayerModel:
    """Layer `index` over its pages."""

    def __init__(
        self,
        config: DflashConfig,
        index: int,
        kv: KvLayer,
        rope: RotaryTables,
        driver: CudaDriver,
        weights: DeviceWeights,
        products: Products,
        buffers: UnitBuffers,
        second: SecondBuffers | None,
    ) -> None:
        att, prefix = config.attention, f"{PREFIX}layers.{index}"
        self._config = config
        self._heads = att.num_heads * att.head_dim
        self._kv_width = 2 * att.num_kv_heads * att.head_dim
        self._prefix = prefix
        self._norms = HeadNorms(
            weights.vectors[f"{prefix}.attn.q_norm"],
            weights.vectors[f"{prefix}.attn.k_norm"],
            config.rms_norm_eps,
            0.0,
        )
        self._kv = kv
        self._rope = rope
        self._driver = driver
        self._products = products
        self._buffers = buffers
        self._attention = _Sublayer(
            f"{prefix}.input_norm",
            BlockConv.of(f"{prefix}.attention_conv", driver, weights, products, second),
            products,
        )
        self._mlp = _Sublayer(
            f"{prefix}.post_norm",
            BlockConv.of(f"{prefix}.mlp_conv", driver, weights, products, second),
            products,
        )

    def queue_keys(self, context: DeviceTensor, unit: UnitTensors, *, is_small: bool) -> None:
        """Keys and values of a unit's columns, whose context features are `context` [T, C]."""
        kv = self._buffers.projected.as_shape(context.shape[0], self._kv_width)
        if is_small:
            self._products.small(f"{self._prefix}.attn.kv_proj", context, kv)
        else:
            self._products.large(f"{self._prefix}.attn.kv_proj", context, kv)
        self._queue_prepare(kv, None, unit)

    def queue_blocks(self, hidden: DeviceTensor, block: BlockUnit) -> None:
        """Add this layer's two contributions to hidden [R * W, C] in place. Its square sums are
        there before and after, but in a DFlash2."""
        self._attention.queue(hidden, block, self._queue_heads, f"{self._prefix}.attn.o_proj")
        self._mlp.queue(hidden, block, self._queue_inner, f"{self._prefix}.mlp.down_proj")

    def _queue_heads(self, x: DeviceTensor, norm: str | None, block: BlockUnit) -> DeviceTensor:
        """What attention makes of x, [T, H * D]."""
        att, tokens, unit = self._config.attention, x.shape[0], block.unit
        qkv = self._buffers.projected.as_shape(tokens, self._heads + self._kv_width)
        queries, keys = qkv.columns(0, self._heads), qkv.columns(self._heads, qkv.shape[1])
        self._products.small(f"{self._prefix}.attn.q_proj", x, queries, norm=norm)
        self._products.small(f"{self._prefix}.attn.kv_proj", x, keys, norm=norm)
        q = self._buffers.query.as_shape(tokens, att.num_heads, stored_dim(att.head_dim))
        self._queue_prepare(qkv, q, unit)
        y = self._buffers.mixed.as_shape(tokens, self._heads)
        paged_attention_decode.launch(
            self._driver.kernels,
            q,
            self._kv,
            y,
            page_tables=unit.page_tables,
            row_starts=unit.row_starts,
            firsts=block.firsts,
            ordinals=block.lasts,
            workspace=self._buffers.attention,
            scale=att.head_dim**-0.5,
            columns_per_row=block.columns,
            stream=self._driver.stream,
        )
        return y

    def _queue_inner(self, x: DeviceTensor, norm: str | None, block: BlockUnit) -> DeviceTensor:
        """silu(gate x) * up x, [T, I]."""
        inner = self._buffers.mixed.as_shape(x.shape[0], self._config.intermediate_size)
        self._products.small(
            f"{self._prefix}.mlp.gate_up", x, inner, norm=norm, epilogue=Epilogue.SWIGLU
        )
        return inner

    def _queue_prepare(self, qkv: DeviceTensor, q: DeviceTensor | None, unit: UnitTensors) -> None:
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
            value_scale=self._config.value_scale,
            is_chained=True,
        )


class BlockConv:
    """The two convolutions round a sublayer; their taps follow from what goes into the first."""

    def __init__(
        self,
        prefix: str,
        driver: CudaDriver,
        weights: DeviceWeights,
        products: Products,
        buffers: SecondBuffers,
    ) -> None:
        self._base = weights.vectors[f"{prefix}.base"]
        self._kernel = f"{prefix}.kernel"
        self._driver = driver
        self._products = products
        self._buffers = buffers

    @classmethod
    def of(
        cls,
        prefix: str,
        driver: CudaDriver,
        weights: DeviceWeights,
        products: Products,
        buffers: SecondBuffers | None,
    ) -> BlockConv | None:
        """None for a first DFlash."""
        return None if buffers is None else cls(prefix, driver, weights, products, buffers)

    def queue_before(self, z: DeviceTensor, columns: int) -> DeviceTensor:
        """The sublayer's input [T, C] from z, its input without convolutions."""
        tokens = z.shape[0]
        self._products.small(self._kernel, z, self._buffers.dynamic.rows(0, tokens))
        x = self._buffers.convolved.rows(0, tokens)
        self._queue(z, x, columns, side=0)
        return x

    def output(self, num_tokens: int) -> DeviceTensor:
        """[T, C] where the sublayer's output belongs."""
        return self._buffers.output.rows(0, num_tokens)

    def queue_behind(self, hidden: DeviceTensor, columns: int) -> None:
        """hidden += what the second convolution makes of the output."""
        self._queue(self.output(hidden.shape[0]), hidden, columns, side=1)

    def _queue(self, x: DeviceTensor, y: DeviceTensor, columns: int, *, side: int) -> None:
        dflash_conv.launch(
            self._driver.kernels,
            x,
            self._buffers.dynamic.rows(0, x.shape[0]),
            self._base,
            y,
            side=side,
            columns=columns,
            is_residual=side == 1,
            stream=self._driver.stream,
            is_chained=True,
        )


class _Sublayer:
    """Norm and residual round attention or MLP, in a DFlash2 with the convolutions."""

    def __init__(self, norm: str, conv: BlockConv | None, products: Products) -> None:
        self._norm = norm
        self._conv = conv
        self._products = products

    def queue(self, hidden: DeviceTensor, block: BlockUnit, run: _Run, out_proj: str) -> None:
        """hidden += out_proj(run(norm(hidden)))"""
        if self._conv is None:
            y = run(hidden, self._norm, block)
            self._products.small(out_proj, y, hidden, epilogue=Epilogue.ADD_RESIDUAL)
            return
        z = self._products.normalise(self._norm, hidden)
        y = run(self._conv.queue_before(z, block.columns), None, block)
        self._products.small(out_proj, y, self._conv.output(hidden.shape[0]))
        self._conv.queue_behind(hidden, block.columns)
