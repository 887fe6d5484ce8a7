"""CudaDflash: a DFlash or DFlash2 draft model on the device.

    every unit   taps of the target -> fc -> norm -> keys and values of every layer, at the tokens'
                 own ordinals
    a round      once it is known what was chosen: one pass of [newest token, MASK, .. MASK] at
                 ordinals E .. E + n over the context; column i guesses the token at E + i

Keys of ordinal p follow from the taps of p alone, so those of wrong columns are just junk behind
the frontier, and StateImages do not grow. A graph serves blocks of up to W columns a row: how many
guesses a row gets is data.
"""

from __future__ import annotations

from functools import partial

from ninfer.contract.errors import InvariantError
from ninfer.contract.units import Capacity
from ninfer.ops import dflash_block, embedding
from ninfer.ops.dflash_block import BlockInputs
from ninfer.program.executors.cuda_dflash_buffers import DflashBuffers
from ninfer.program.executors.cuda_dflash_head import CudaDflashHead
from ninfer.program.executors.cuda_dflash_layers import BlockUnit, DflashLayerModel
from ninfer.program.executors.cuda_dflash_weights import PREFIX, block_rules
from ninfer.program.executors.cuda_driver import CudaDriver, Graph
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_model import is_small
from ninfer.program.executors.cuda_products import NormRule, Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import EMBED, DeviceWeights
from ninfer.program.executors.cuda_window import Size, WindowTensors, widths
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.graphs import capture_warm


class CudaDflash:
    """Implements RoundDraft."""

    def __init__(
        self,
        setup: DflashSetup,
        capacity: Capacity,
        driver: CudaDriver,
        weights: DeviceWeights,
        workspace: Workspace,
    ) -> None:
        rounds = workspace.rounds
        if rounds is None or rounds.dflash is None:
            raise InvariantError("a DFlash model without its memory")
        config = setup.config
        self._config = config
        self._rules = block_rules(setup)
        self._driver = driver
        self._workspace = workspace
        self._match = rounds.match
        self._buffers: DflashBuffers = rounds.dflash
        own_table = weights.vectors.get(f"{PREFIX}embed_tokens")
        self._embed = weights.vectors[EMBED] if own_table is None else own_table
        rule = NormRule(config.rms_norm_eps, 0.0)
        self._products = Products(rule, driver, weights, workspace.buffers)
        self._head = CudaDflashHead(
            setup, driver, weights, self._products, workspace, self._buffers
        )
        self._widths = tuple(width for width in widths(capacity.max_draft_tokens) if width > 1)
        self._graphs: dict[Size, Graph] = {}
        self._layers = self._build_layers(weights)

    @property
    def proposals(self) -> DeviceTensor:
        return self._buffers.proposals

    def queue_absorb(self, unit: UnitTensors, hidden: DeviceTensor, num_inputs: int) -> None:
        """The keys of the inputs."""
        self._queue_keys(unit, is_small=is_small(unit))

    def queue_settled(self, window: WindowTensors) -> None:
        """The keys of all inputs: those of wrong ones lie behind the frontier."""
        self._queue_keys(window.unit, is_small=True)

    def queue_rewound(self, window: WindowTensors) -> None:
        """StateImages have nothing of it."""

    def capture_unit(self, window: WindowTensors) -> None:
        """Blocks follow from the rows alone."""

    def capture_rows(self, window: WindowTensors) -> None:
        for columns in self._widths:
            size = window.num_rows, columns
            enqueue = partial(self.queue_guesses, window, columns)
            self._graphs[size] = capture_warm(self._driver, enqueue)

    def replay(self, size: Size, num_proposed: int) -> None:
        if num_proposed:
            columns = next(width for width in self._widths if width > num_proposed)
            self._driver.replay(self._graphs[size[0], columns])

    def queue_guesses(self, window: WindowTensors, columns: int) -> None:
        """One pass of blocks of so many columns behind the rows of a settled round."""
        unit = self._queue_block(window, columns)
        hidden = self._workspace.buffers.hidden.rows(0, unit.num_tokens)
        # Waits for all before it: kernels read a unit's ordinals before they wait themselves.
        embedding.launch(
            self._driver.kernels,
            unit.token_ids,
            self._embed,
            hidden,
            stream=self._driver.stream,
            square_sums=self._workspace.buffers.square_sums.rows(0, unit.num_tokens),
            scale=self._config.embedding_scale,
        )
        block = self._buffers.block(window.num_rows, columns)
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            layer.queue_blocks(
                hidden, BlockUnit(unit, block.firsts.index(kind), block.lasts.index(kind))
            )
        normed = self._buffers.normed.rows(0, unit.num_tokens)
        self._products.normalise(f"{PREFIX}norm", hidden, normed)
        chain = self._match.outputs(window.num_rows, 1).chain
        self._head.queue(normed, block, chain.rows)

    def _queue_block(self, window: WindowTensors, columns: int) -> UnitTensors:
        """The blocks' inputs, as a unit."""
        match = self._match.outputs(*window.size)
        block = self._buffers.block(window.num_rows, columns)
        dflash_block.launch(
            self._driver.kernels,
            BlockInputs(
                match.chain,
                match.pairs.token_ids,
                match.pairs.last_columns,
                window.proposed,
                window.limits,
            ),
            block,
            self._rules,
            stream=self._driver.stream,
            is_chained=True,
        )
        return UnitTensors(
            token_ids=block.token_ids,
            ordinals=block.ordinals,
            column_rows=block.column_rows,
            rope_positions=block.rope_positions,
            row_starts=block.row_starts,
            read_slots=window.unit.read_slots,
            write_slots=window.unit.write_slots,
            page_tables=window.unit.page_tables,
        )

    def _queue_keys(self, unit: UnitTensors, *, is_small: bool) -> None:
        count = unit.num_tokens
        taps = self._buffers.taps.rows(0, count)
        features = self._workspace.buffers.hidden.rows(0, count)
        if is_small:
            self._products.small(f"{PREFIX}fc", taps, features)
        else:
            self._products.large(f"{PREFIX}fc", taps, features)
        context = self._products.normalise(f"{PREFIX}hidden_norm", features)
        for layer in self._layers:
            layer.queue_keys(context, unit, is_small=is_small)

    @property
    def _kinds(self) -> tuple[int, ...]:
        """Of each layer, its place among the kinds."""
        kinds = self._rules.kinds
        return tuple(kinds.index((layer.window, layer.is_causal)) for layer in self._config.layers)

    def _build_layers(self, weights: DeviceWeights) -> tuple[DflashLayerModel, ...]:
        config, workspace = self._config, self._workspace
        rope = self._buffers.upload_rotary(self._driver, config)
        own_pages = workspace.memory.kv[-len(config.layers) :]
        return tuple(
            DflashLayerModel(
                config,
                index,
                kv,
                rope,
                self._driver,
                weights,
                self._products,
                workspace.buffers,
                self._buffers.second,
            )
            for index, kv in enumerate(own_pages)
        )
