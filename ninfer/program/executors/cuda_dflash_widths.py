"""What a DFlash draft model needs of the buffers that every unit has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.models.dflash_config import DflashConfig
from ninfer.ops import paged_attention_decode
from ninfer.ops.kv_pages import stored_dim


@dataclass(frozen=True, slots=True)
class DflashWidths:
    """Numbers a column of the unit's own buffers that the draft needs.

    projected   bf16: queries, keys and values;  mixed   heads or inner size
    query       bf16: queries as attention takes them
    """

    projected: int
    mixed: int
    query: int


NO_DFLASH_WIDTHS: Final = DflashWidths(0, 0, 0)


def dflash_widths(config: DflashConfig) -> DflashWidths:
    att = config.attention
    return DflashWidths(
        projected=(att.num_heads + 2 * att.num_kv_heads) * att.head_dim,
        mixed=max(att.num_heads * att.head_dim, config.intermediate_size),
        query=att.num_heads * stored_dim(att.head_dim),
    )


def dflash_attention_values(config: DflashConfig, max_columns: int, max_pages: int) -> int:
    """f32 numbers that its decode attention passes on."""
    att = config.attention
    return paged_attention_decode.workspace_size(
        max_columns, att.num_heads, stored_dim(att.head_dim), max_pages
    )
