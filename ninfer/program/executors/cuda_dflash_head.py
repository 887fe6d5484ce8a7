"""CudaDflashHead: what the columns behind a DFlash model's final norm guess, on the device.

    DFlash     each column by its own logits
    DFlash2    the best tokens of every column, then the walk of `dflash_selector` along the block

Tokens are drawn with the row's parameters and the noise that its own choices will have. The head is
the target's, its draft head, or one of the draft's own, maybe with rows for some tokens only: then
logits are scattered among others that were written once, lower than any.
"""

from __future__ import annotations

import numpy as np

from ninfer.contract.errors import InvariantError
from ninfer.ops import dflash_logits, dflash_proposals, dflash_selector
from ninfer.ops.device_sampling import SamplingOutputs
from ninfer.ops.dflash_block import BlockColumns
from ninfer.ops.dflash_selector import DeviceCodebooks, SelectorInputs
from ninfer.ops.linear_small_t import Epilogue
from ninfer.program.executors.cuda_dflash_buffers import DflashBuffers
from ninfer.program.executors.cuda_dflash_weights import PREFIX, block_rules
from ninfer.program.executors.cuda_draft_head import fill_unlisted
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_products import Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weights import DRAFT_HEAD, HEAD, DeviceWeights
from ninfer.program.executors.cuda_workspace import Workspace
from ninfer.program.executors.dflash_setup import DflashSetup


class CudaDflashHead:
    """Queues; the caller waits."""

    def __init__(
        self,
        setup: DflashSetup,
        driver: CudaDriver,
        weights: DeviceWeights,
        products: Products,
        workspace: Workspace,
        buffers: DflashBuffers,
    ) -> None:
        self._config = setup.config
        self._num_token_ids = setup.num_token_ids
        self._driver = driver
        self._products = products
        self._sampler = workspace.sampler
        self._buffers = buffers
        self._target_logits = workspace.buffers.logits
        self._name = f"{PREFIX}lm_head" if setup.has_head else HEAD
        if not setup.has_head and DRAFT_HEAD in weights.linears:
            self._name = DRAFT_HEAD
        self._codebooks: DeviceCodebooks | None = None
        if setup.config.selector is not None:
            self._codebooks = DeviceCodebooks(
                weights.vectors[f"{PREFIX}selector.predecessors"],
                weights.vectors[f"{PREFIX}selector.successors"],
                block_rules(setup).num_candidates,
            )
        self._write_constants(setup)

    def queue(
        self, normed: DeviceTensor, block: BlockColumns[DeviceTensor], rows: DeviceTensor
    ) -> None:
        """From normed [R * W, C] to the proposals; `rows` of the sampler choose behind each row's
        newest token."""
        chosen = self._buffers.sampling_outputs(normed.shape[0])
        logits = self._queue_logits(normed)
        self._sampler.queue_draft(logits, block.rows, chosen, num_valid_ids=self._num_token_ids)
        num_rows = block.row_starts.shape[0] - 1
        proposals = self._buffers.proposed(num_rows)
        if self._codebooks is not None:
            self._queue_walk(self._codebooks, normed, chosen, block, rows, proposals)
            return
        dflash_proposals.launch(
            self._driver.kernels,
            chosen.token_ids,
            block.ordinals,
            proposals,
            stream=self._driver.stream,
            is_chained=True,
        )

    def _queue_logits(self, normed: DeviceTensor) -> DeviceTensor:
        """f32 [R * W, V] of tokens."""
        config, count, buffers = self._config, normed.shape[0], self._buffers
        logits = (buffers.logits or self._target_logits).rows(0, count)
        products = logits if buffers.head_logits is None else buffers.head_logits.rows(0, count)
        self._products.small(self._name, normed, products, epilogue=Epilogue.STORE_FLOAT)
        dflash_logits.launch(
            self._driver.kernels,
            products,
            scale=config.logit_scale,
            cap=config.logit_softcap,
            token_ids=buffers.token_ids,
            y=None if buffers.token_ids is None else logits,
            stream=self._driver.stream,
            is_chained=True,
        )
        return logits

    def _queue_walk(
        self,
        codebooks: DeviceCodebooks,
        normed: DeviceTensor,
        best: SamplingOutputs,
        block: BlockColumns[DeviceTensor],
        rows: DeviceTensor,
        proposals: DeviceTensor,
    ) -> None:
        if self._buffers.second is None:
            raise InvariantError("a selector without its memory")
        gates = self._buffers.second.gates.rows(0, normed.shape[0])
        self._products.small(f"{PREFIX}selector.hidden", normed, gates)
        dflash_selector.launch(
            self._driver.kernels,
            SelectorInputs(
                top_ids=best.top_ids,
                top_logprobs=best.top_logprobs,
                is_finite=best.is_finite,
                gates=gates,
                token_ids=block.token_ids,
                ordinals=block.ordinals,
                rows=rows,
            ),
            codebooks,
            proposals,
            stream=self._driver.stream,
            is_chained=True,
        )

    def _write_constants(self, setup: DflashSetup) -> None:
        """Which token a row of a smaller head stands for; logits of tokens that have none."""
        driver, buffers = self._driver, self._buffers
        if buffers.token_ids is not None and setup.token_ids is not None:
            driver.upload(buffers.token_ids.address, setup.token_ids.astype(np.int32))
        if buffers.logits is not None:
            fill_unlisted(driver, buffers.logits)
        driver.synchronize()
