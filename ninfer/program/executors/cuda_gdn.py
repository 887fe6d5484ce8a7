"""GdnMixer: a Gated DeltaNet layer as launches.

projection = in_proj(norm(hidden));  y = conv, gates, delta rule, gated norm
hidden += out_proj(y)
"""

from __future__ import annotations

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import LayerConfig, ModelConfig
from ninfer.ops import gdn_decode, gdn_prefill
from ninfer.ops.gdn_device import GdnMemory, GdnRows, GdnWeights, projection_width
from ninfer.ops.gdn_fold import FoldLayer
from ninfer.ops.linear_small_t import Epilogue
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DeviceWeights
from ninfer.program.executors.cuda_workspace import Workspace


class GdnMixer:
    """One layer; its StateImages are plane `kind_index` of every slot."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        driver: CudaDriver,
        weights: DeviceWeights,
        products: Products,
        workspace: Workspace,
    ) -> None:
        gdn, conv, recurrent = config.gdn, workspace.memory.conv, workspace.memory.recurrent
        if gdn is None or conv is None or recurrent is None:
            raise InvariantError(f"layer {layer.index} is a GDN layer of a model without its sizes")
        prefix = f"layers.{layer.index}"
        vectors = weights.vectors
        self._config = gdn
        self._eps = config.rms_norm_eps
        self._norm = f"{prefix}.input_norm"
        self._in_proj = f"{prefix}.gdn.in_proj"
        self._out_proj = f"{prefix}.gdn.out_proj"
        self._weights = GdnWeights(
            vectors[f"{prefix}.gdn.conv"],
            vectors[f"{prefix}.gdn.A_log"],
            vectors[f"{prefix}.gdn.dt_bias"],
            vectors[f"{prefix}.gdn.norm"],
        )
        self._chunks = gdn_prefill.plan_chunks(gdn, driver.kernels.limits)
        self._memory = GdnMemory(conv, recurrent, layer.kind_index)
        records = None if workspace.rounds is None else workspace.rounds.records
        self._record = None if records is None else records.index(layer.kind_index)
        self._driver = driver
        self._products = products
        self._buffers = workspace.buffers

    @property
    def fold_layer(self) -> FoldLayer:
        """What gdn_fold reads of it: a unit that keeps no state leaves its projection there.
        InvariantError when nothing is drafted."""
        return FoldLayer(self._weights, self._records)

    def queue_small(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        """A unit that keeps no state leaves its projection for gdn_fold."""
        projection, y = self._outputs(hidden.shape[0])
        if not unit.keeps_state:
            projection = self._records.rows(0, hidden.shape[0])
        self._products.small(self._in_proj, hidden, projection, norm=self._norm)
        self._queue_steps(projection, y, unit)
        self._products.small(self._out_proj, y, hidden, epilogue=Epilogue.ADD_RESIDUAL)

    def queue_large(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        projection, y = self._outputs(hidden.shape[0])
        x = self._products.normalise(self._norm, hidden)
        self._products.large(self._in_proj, x, projection)
        self._queue_chunks(projection, y, unit)
        self._products.large(self._out_proj, y, hidden, adds=True)

    @property
    def _records(self) -> DeviceTensor:
        if self._record is None:
            raise InvariantError(f"{self._in_proj} keeps no records")
        return self._record

    def _outputs(self, num_tokens: int) -> tuple[DeviceTensor, DeviceTensor]:
        return (
            self._buffers.projected.as_shape(num_tokens, projection_width(self._config)),
            self._buffers.mixed.as_shape(num_tokens, self._config.value_dim),
        )

    def _queue_steps(self, projection: DeviceTensor, y: DeviceTensor, unit: UnitTensors) -> None:
        gdn_decode.launch(
            self._driver.kernels,
            self._config,
            self._weights,
            self._memory,
            GdnRows(unit.row_starts, unit.read_slots, unit.write_slots, unit.row_ends),
            projection,
            y,
            eps=self._eps,
            stream=self._driver.stream,
            keeps_state=unit.keeps_state,
            is_chained=True,
        )

    def _queue_chunks(self, projection: DeviceTensor, y: DeviceTensor, unit: UnitTensors) -> None:
        gdn_prefill.launch(
            self._driver.kernels,
            self._config,
            self._chunks,
            self._weights,
            self._memory,
            projection,
            y,
            read_slots=unit.read_slots,
            write_slots=unit.write_slots,
            workspace=self._buffers.scratch,
            eps=self._eps,
            stream=self._driver.stream,
            is_chained=True,
        )
