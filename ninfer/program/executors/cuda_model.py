"""CudaModel: the layers of a text model as launches on one stream.

    hidden = embed(tokens);  each layer: hidden += mixer(norm(hidden)); hidden += mlp(norm(hidden))
    logits = lm_head(norm(hidden))

Two regimes of rounding. A small unit (at most SMALL_TOKENS columns a row, so all decode batches)
takes kernels whose columns never depend on one another, with norms, gates and residuals fused. A
large unit (a longer prefill chunk) multiplies row-major weights, unpacked matrix by matrix. Which
regime a unit takes depends on its own columns alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ninfer.contract.model import LayerConfig, MixerKind, ModelConfig
from ninfer.ops import copy_rows, embedding
from ninfer.ops.gdn_fold import FoldLayer
from ninfer.ops.linear_small_t import Epilogue
from ninfer.program.executors.cuda_attention import AttentionMixer
from ninfer.program.executors.cuda_buffers import SMALL_TOKENS
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_gdn import GdnMixer
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_mlp import make_mlp
from ninfer.program.executors.cuda_products import NormRule, Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import EMBED, HEAD, DeviceWeights
from ninfer.program.executors.cuda_workspace import Workspace


class Block(Protocol):
    """A mixer or an MLP: queues what adds its contribution to hidden [T, C] in place."""

    def queue_small(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        """hidden's square sums are there before and after."""

    def queue_large(self, hidden: DeviceTensor, unit: UnitTensors) -> None: ...


@dataclass(frozen=True, slots=True)
class Taps:
    """columns bf16 [N, len(layers) * C]: the residual stream behind each of `layers`, side by
    side."""

    layers: tuple[int, ...]
    columns: DeviceTensor


class CudaModel:
    """The text model over weights and workspace on the device."""

    def __init__(
        self,
        config: ModelConfig,
        driver: CudaDriver,
        weights: DeviceWeights,
        workspace: Workspace,
        taps: Taps | None = None,
    ) -> None:
        """taps   what a draft model reads of every unit"""
        self._taps = taps
        self._driver = driver
        self._weights = weights
        self._buffers = workspace.buffers
        self._products = Products(NormRule.of(config), driver, weights, workspace.buffers)
        self._layers = tuple(
            (self._mixer(config, layer, workspace), self._mlp(config, layer))
            for layer in config.layers
        )

    def queue_embedding(self, unit: UnitTensors) -> DeviceTensor:
        """The residual stream [T, C] in front of the first layer. Follows a copy, not a kernel, and
        waits for all before it: kernels of the layers read the unit's inputs, states and older keys
        before they wait themselves."""
        hidden = self._buffers.hidden.rows(0, unit.num_tokens)
        sums = self._buffers.square_sums
        embedding.launch(
            self._driver.kernels,
            unit.token_ids,
            self._weights.vectors[EMBED],
            hidden,
            stream=self._driver.stream,
            square_sums=sums.rows(0, unit.num_tokens) if is_small(unit) else None,
        )
        return hidden

    def queue_layers(self, unit: UnitTensors, hidden: DeviceTensor) -> Iterator[None]:
        """Queue all layers, in place; yields between blocks so that others get a turn."""
        are_few = is_small(unit)
        for index, blocks in enumerate(self._layers):
            for block in blocks:
                if are_few:
                    block.queue_small(hidden, unit)
                else:
                    block.queue_large(hidden, unit)
                yield
            if self._taps is not None and index in self._taps.layers:
                self._queue_tap(self._taps, index, hidden)

    def queue_hidden(self, unit: UnitTensors) -> DeviceTensor:
        """Queue embedding and all layers at once; the residual stream [T, C] behind the last."""
        hidden = self.queue_embedding(unit)
        for _ in self.queue_layers(unit, hidden):
            pass
        return hidden

    def _queue_tap(self, taps: Taps, index: int, hidden: DeviceTensor) -> None:
        """Keep the residual stream behind layer `index`."""
        count, width = hidden.shape
        place = taps.layers.index(index) * width
        copy_rows.launch(
            self._driver.kernels,
            hidden,
            taps.columns.rows(0, count).columns(place, place + width),
            num_rows=count,
            stream=self._driver.stream,
            is_chained=True,
        )

    @property
    def fold_layers(self) -> list[FoldLayer]:
        """Of the GDN layers in order."""
        return [mixer.fold_layer for mixer, _ in self._layers if isinstance(mixer, GdnMixer)]

    def queue_decode_logits(self, hidden: DeviceTensor, logits: DeviceTensor) -> None:
        """logits f32 [R, V] of a small unit's columns, all of them."""
        self._products.small(HEAD, hidden, logits, norm="norm", epilogue=Epilogue.STORE_FLOAT)

    def queue_logits(self, hidden: DeviceTensor, logits: DeviceTensor) -> None:
        """logits f32 [R, V] of any R columns of the last residual stream."""
        x = self._products.normalise("norm", hidden)
        self._products.small(HEAD, x, logits, epilogue=Epilogue.STORE_FLOAT)

    def _mixer(self, config: ModelConfig, layer: LayerConfig, workspace: Workspace) -> Block:
        if layer.mixer is MixerKind.ATTENTION:
            return AttentionMixer(
                config,
                f"layers.{layer.index}",
                workspace.memory.kv[layer.kind_index],
                self._driver,
                self._weights,
                self._products,
                workspace,
            )
        return GdnMixer(config, layer, self._driver, self._weights, self._products, workspace)

    def _mlp(self, config: ModelConfig, layer: LayerConfig) -> Block:
        prefix = f"layers.{layer.index}"
        return make_mlp(
            config, layer.mlp, prefix, self._products, self._buffers, self._driver, self._weights
        )


def is_small(unit: UnitTensors) -> bool:
    """At most SMALL_TOKENS columns in every row: a prefill unit has one row, a decode unit has one
    column a row."""
    return unit.num_tokens <= SMALL_TOKENS * unit.num_rows
