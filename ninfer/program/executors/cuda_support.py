"""Which models the CUDA executor's kernels cover."""

from __future__ import annotations

from typing import Final

from ninfer.contract.model import ModelConfig
from ninfer.ops.gdn_device import CONV_WIDTHS, HEAD_DIMS

ATTENTION_HEAD_DIMS: Final = (64, 128, 256)


def unsupported_reason(config: ModelConfig) -> str | None:
    """What of the model has no kernel, or None."""
    att, gdn = config.attention, config.gdn
    if att.head_dim not in ATTENTION_HEAD_DIMS:
        return f"attention heads of {att.head_dim}, kernels are there for {ATTENTION_HEAD_DIMS}"
    if config.hidden_size % 8 or config.intermediate_size % 8:
        return f"sizes {config.hidden_size} and {config.intermediate_size}, not multiples of 8"
    if gdn is not None:
        for size in (gdn.key_head_dim, gdn.value_head_dim):
            if size not in HEAD_DIMS:
                return f"GDN heads of {size}, kernels are there for {HEAD_DIMS}"
        if gdn.conv_width not in CONV_WIDTHS:
            return f"a convolution of width {gdn.conv_width}, kernels are there for {CONV_WIDTHS}"
    return None
