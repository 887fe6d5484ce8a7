"""CudaMtp: the multi-token prediction module as a draft model on the device.

    joined = (norm_embedding(embed(x_p)), norm_hidden(h_(p-1)));  u = fc(joined)
    m_p = norm(layer(u));  the target's head on m_p guesses x_(p+1)

h is the target's output behind its final norm. The pair of ordinal p depends on tokens up to x_p
alone; its keys lie in the last layer of the pages, the h in front of a frontier in the StateImage.

    every unit   keys of the pairs of its inputs
    a round      once it is known what was chosen, the pairs of inputs and choices in one pass; the
                 last of them begins a chain of guesses, a pair each
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from ninfer.contract.errors import InvariantError
from ninfer.contract.model import MlpKind, ModelConfig
from ninfer.ops import copy_rows, draft_input, draft_step
from ninfer.ops.draft_input import DraftNorms, HiddenRows
from ninfer.program.executors.cuda_attention import AttentionMixer
from ninfer.program.executors.cuda_draft_head import GuessHead
from ninfer.program.executors.cuda_driver import CudaDriver, Graph
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_mlp import make_mlp
from ninfer.program.executors.cuda_model import is_small
from ninfer.program.executors.cuda_products import NormRule, Products
from ninfer.program.executors.cuda_round_buffers import DraftBuffers, RoundBuffers
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import EMBED, DeviceWeights
from ninfer.program.executors.cuda_window import Size, WindowTensors
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.graphs import capture_warm

_LAYER: Final = "mtp.layers.0"


class CudaMtp:
    """Implements RoundDraft.

    keys    pairs of right inputs and choices, when nothing is proposed
    first   those pairs in one pass, and the first guess of every row
    next    one guess more
    """

    def __init__(
        self, config: ModelConfig, driver: CudaDriver, weights: DeviceWeights, workspace: Workspace
    ) -> None:
        rounds, kept = workspace.rounds, workspace.memory.hidden
        if rounds is None or rounds.draft is None or kept is None:
            raise InvariantError("an MTP module without its memory")
        self._driver = driver
        self._workspace = workspace
        self._rounds: RoundBuffers = rounds
        self._draft: DraftBuffers = rounds.draft
        self._kept = kept
        self._embed = weights.vectors[EMBED]
        self._norms = DraftNorms(
            weights.vectors["mtp.norm_embedding"],
            weights.vectors["mtp.norm_hidden"],
            config.rms_norm_eps,
        )
        self._products = Products(NormRule.of(config), driver, weights, workspace.buffers)
        self._head = GuessHead(driver, self._products, workspace.buffers.logits, self._draft.logits)
        self._keys: dict[Size, Graph] = {}
        self._firsts: dict[Size, Graph] = {}
        self._nexts: dict[tuple[int, int], Graph] = {}
        self._upload_row_starts()
        self._mixer = AttentionMixer(
            config, _LAYER, workspace.memory.kv[-1], driver, weights, self._products, workspace
        )
        kind = MlpKind.DENSE if config.moe is None else MlpKind.MOE
        self._mlp = make_mlp(
            config, kind, _LAYER, self._products, workspace.buffers, driver, weights
        )

    @property
    def proposals(self) -> DeviceTensor:
        return self._draft.proposals

    def queue_absorb(self, unit: UnitTensors, hidden: DeviceTensor, num_inputs: int) -> None:
        """The keys of the inputs, and the output behind the last for its StateImage."""
        few = is_small(unit)
        output = self._products.normalise("norm", hidden)
        self._queue_keep(output.rows(num_inputs - 1, num_inputs), unit.write_slots)
        joined = self._joined(unit.num_tokens)
        draft_input.launch(
            self._driver.kernels,
            unit.token_ids,
            self._embed,
            HiddenRows(output, self._kept),
            self._norms,
            joined,
            stream=self._driver.stream,
            read_slot=unit.read_slots,
        )
        if few:
            self._products.small("mtp.fc", joined, hidden, leaves_sums=True)
        else:
            self._products.large("mtp.fc", joined, hidden)
        self._mixer.queue_keys(hidden, unit, is_small=few)

    def queue_settled(self, window: WindowTensors) -> None:
        """The output behind each row's last right input, for its StateImage."""
        unit = window.unit
        hidden = self._workspace.buffers.hidden.rows(0, unit.num_tokens)
        output = self._products.normalise("norm", hidden, self._output(unit.num_tokens))
        match = self._rounds.match.outputs(*window.size)
        self._queue_keep(output, unit.write_slots, match.kept_columns)

    def queue_rewound(self, window: WindowTensors) -> None:
        unit, match = window.unit, self._rounds.match.outputs(*window.size)
        self._queue_keep(
            self._output(unit.num_tokens), unit.write_slots, match.kept_columns, is_chained=False
        )

    def capture_unit(self, window: WindowTensors) -> None:
        self._keys[window.size] = self._captured(partial(self.queue_keys, window))
        self._firsts[window.size] = self._captured(partial(self.queue_first, window))

    def capture_rows(self, window: WindowTensors) -> None:
        for index in range(1, self._draft.max_proposals):
            enqueue = partial(self.queue_next, window, index)
            self._nexts[window.num_rows, index] = self._captured(enqueue)

    def replay(self, size: Size, num_proposed: int) -> None:
        self._driver.replay((self._firsts if num_proposed else self._keys)[size])
        for index in range(1, num_proposed):
            self._driver.replay(self._nexts[size[0], index])

    def _captured(self, enqueue: Callable[[], None]) -> Graph:
        return capture_warm(self._driver, enqueue)

    def _output(self, num_tokens: int) -> DeviceTensor:
        """[T, C] where the target's output of a window unit belongs."""
        return self._draft.output.rows(0, num_tokens)

    def queue_keys(self, window: WindowTensors) -> None:
        """The keys of a window unit's right inputs and of the choices behind them."""
        unit, hidden = self._queue_pairs(window)
        self._mixer.queue_keys(hidden, unit, is_small=True)

    def queue_first(self, window: WindowTensors) -> None:
        """Those keys, and the first guess of each row."""
        unit, hidden = self._queue_pairs(window)
        self._queue_layer(hidden, unit)
        num_rows = window.num_rows
        match = self._rounds.match.outputs(num_rows, window.num_columns)
        last = self._draft.last.rows(0, num_rows)
        copy_rows.launch(
            self._driver.kernels,
            hidden,
            last,
            num_rows=num_rows,
            source_rows=match.pairs.last_columns,
            stream=self._driver.stream,
            is_chained=True,
        )
        self._queue_guess(last, window, 0)

    def queue_next(self, window: WindowTensors, index: int) -> None:
        """The guess number `index` of each row, from the one before."""
        num_rows, draft = window.num_rows, self._draft
        chain = self._rounds.match.outputs(num_rows, 1).chain
        unit = UnitTensors(
            token_ids=draft.token_ids.rows(0, num_rows),
            ordinals=chain.ordinals,
            column_rows=draft.row_starts.rows(0, num_rows),
            rope_positions=chain.rope_positions,
            row_starts=draft.row_starts.rows(0, num_rows + 1),
            read_slots=window.unit.read_slots,
            write_slots=window.unit.write_slots,
            page_tables=window.unit.page_tables,
        )
        hidden = self._queue_joined(
            unit, draft.normed.rows(0, num_rows), draft.sources.rows(0, num_rows)
        )
        self._queue_layer(hidden, unit)
        self._queue_guess(hidden, window, index)

    def _queue_pairs(self, window: WindowTensors) -> tuple[UnitTensors, DeviceTensor]:
        """The draft model's stream [R (T + 1), C] in front of its layer."""
        pairs = self._rounds.match.outputs(window.num_rows, window.num_columns).pairs
        unit = UnitTensors(
            token_ids=pairs.token_ids,
            ordinals=pairs.ordinals,
            column_rows=pairs.column_rows,
            rope_positions=pairs.rope_positions,
            row_starts=pairs.row_starts,
            read_slots=window.unit.read_slots,
            write_slots=window.unit.write_slots,
            page_tables=window.unit.page_tables,
        )
        return unit, self._queue_joined(unit, self._output(window.unit.num_tokens), pairs.sources)

    def _queue_joined(
        self, unit: UnitTensors, output: DeviceTensor, sources: DeviceTensor
    ) -> DeviceTensor:
        """Waits for all before it: kernels of the layer read the unit's ordinals before they wait
        themselves."""
        joined = self._joined(unit.num_tokens)
        draft_input.launch(
            self._driver.kernels,
            unit.token_ids,
            self._embed,
            HiddenRows(output, self._kept),
            self._norms,
            joined,
            stream=self._driver.stream,
            sources=sources,
        )
        hidden = self._workspace.buffers.hidden.rows(0, unit.num_tokens)
        self._products.small("mtp.fc", joined, hidden, leaves_sums=True)
        return hidden

    def _queue_layer(self, hidden: DeviceTensor, unit: UnitTensors) -> None:
        self._mixer.queue_small(hidden, unit)
        self._mlp.queue_small(hidden, unit)

    def _queue_guess(self, stream: DeviceTensor, window: WindowTensors, index: int) -> None:
        """From the draft model's stream [R, C]: its output, a choice, and the next pair."""
        num_rows, draft, workspace = window.num_rows, self._draft, self._workspace
        chain = self._rounds.match.outputs(num_rows, 1).chain
        normed = self._products.normalise("mtp.norm", stream, draft.normed.rows(0, num_rows))
        chosen = draft.sampling_outputs(num_rows)
        workspace.sampler.queue_draft(self._head.queue(normed), chain.rows, chosen)
        draft_step.launch(
            self._driver.kernels,
            chosen.token_ids,
            window.limits,
            chain,
            draft.step_outputs(num_rows),
            index=index,
            stream=self._driver.stream,
            is_chained=True,
        )

    def _upload_row_starts(self) -> None:
        starts = self._draft.row_starts
        self._driver.upload(starts.address, np.arange(starts.shape[0], dtype=np.int32))
        self._driver.synchronize()

    def _joined(self, num_tokens: int) -> DeviceTensor:
        return self._draft.joined.as_shape(num_tokens, 2 * self._kept.shape[1])

    def _queue_keep(
        self,
        output: DeviceTensor,
        slots: DeviceTensor,
        columns: DeviceTensor | None = None,
        *,
        is_chained: bool = True,
    ) -> None:
        copy_rows.launch(
            self._driver.kernels,
            output,
            self._kept,
            num_rows=slots.shape[0],
            source_rows=columns,
            target_rows=slots,
            stream=self._driver.stream,
            is_chained=is_chained,
        )
