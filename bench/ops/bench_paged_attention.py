"""Times of the attention Ops on real shapes, against what memory and tensor cores allow.

    python -m bench.ops.bench_paged_attention --out DIR [--formats bf16,fp8,int8]

decode    keys and values of the context read once at the measured read rate R; a chain of layers,
          each with pages of its own, larger than the cache but for short contexts
prefill   FLOP of the visible keys (4 D for a query and key) against the measured bf16 matrix rate
prepare   projection read, queries, keys and values written, at R
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

from bench.common.op_bench import OpBench, random_bf16
from bench.common.record import environment, write_record
from ninfer.ops import attention_prepare, paged_attention_decode, paged_attention_prefill
from ninfer.ops.attention_prepare import HeadNorms, RotaryTables

SHAPES: Final = {"4b": (16, 4, 256), "27b": (24, 4, 256), "35b": (16, 2, 256), "8b": (32, 8, 128)}
"""Query heads, KV heads, head_dim."""
CONTEXTS: Final = (128, 1024, 8192, 32768, 131072)
COLUMNS: Final = (1, 8)
PROMPTS: Final = (2048, 8192)
CHAIN_BYTES: Final = 1 << 29
MAX_LINKS: Final = 24
MATRIX_FLOPS: Final = 790e12


@dataclass(frozen=True, slots=True)
class Pages:
    pages: Any
    scales: Any


class Bench(OpBench):
    def decode(self, model: str, kv_format: str, context: int, columns: int) -> dict[str, Any]:
        """One sequence of `context` keys, its last `columns` columns."""
        heads, kv_heads, head_dim = SHAPES[model]
        count = -(-context // 64)
        layer_bytes = count * page_bytes(kv_format, kv_heads, head_dim)
        links = max(2, min(MAX_LINKS, CHAIN_BYTES // layer_bytes))
        layers = [make_pages(kv_format, count, kv_heads, head_dim) for _ in range(links)]
        q, gate = (
            random_bf16(columns, heads, head_dim),
            random_bf16(columns, 2 * (heads + kv_heads) * head_dim),
        )
        y = cp.empty((columns, heads * head_dim), cp.uint16)
        table = cp.random.permutation(count).astype(cp.int32).reshape(1, count)
        starts = cp.asarray(np.array([0, columns], np.int32))
        ordinals = cp.arange(context - columns, context, dtype=cp.int32)
        size = paged_attention_decode.workspace_size(columns, heads, head_dim, count)
        workspace = cp.empty(size, cp.float32)

        def enqueue(index: int) -> None:
            paged_attention_decode.launch(
                self.kernels, q, layers[index], y, page_tables=table, row_starts=starts,
                ordinals=ordinals, workspace=workspace, scale=head_dim**-0.5,
                columns_per_row=columns, gate=gate, stream=self.stream.ptr, is_chained=True,
            )  # fmt: skip

        took_us = self.time(enqueue, links)
        used = context * page_bytes(kv_format, kv_heads, head_dim) / 64
        return self._row("decode", model, kv_format, context, columns, took_us, used)

    def prefill(self, model: str, kv_format: str, tokens: int) -> dict[str, Any]:
        """A whole prompt in one chunk."""
        heads, kv_heads, head_dim = SHAPES[model]
        kv = make_pages(kv_format, tokens // 64, kv_heads, head_dim)
        q = random_bf16(tokens, heads, head_dim)
        gate = random_bf16(tokens, 2 * (heads + kv_heads) * head_dim)
        y = cp.empty((tokens, heads * head_dim), cp.uint16)
        table = cp.random.permutation(tokens // 64).astype(cp.int32)
        ordinals = cp.arange(tokens, dtype=cp.int32)

        def enqueue(_index: int) -> None:
            paged_attention_prefill.launch(
                self.kernels, q, kv, y, page_table=table, ordinals=ordinals,
                scale=head_dim**-0.5, gate=gate, stream=self.stream.ptr, is_chained=True,
            )  # fmt: skip

        took_us = self.time(enqueue, 2)
        flops = 4.0 * head_dim * heads * tokens * (tokens + 1) / 2
        return {
            "case": "prefill", "model": model, "format": kv_format, "context": tokens,
            "columns": tokens, "us": took_us, "floor_us": flops / MATRIX_FLOPS * 1e6,
            "fraction": flops / MATRIX_FLOPS * 1e6 / took_us, "tflops": flops / took_us / 1e6,
        }  # fmt: skip

    def prepare(self, model: str, kv_format: str, tokens: int) -> dict[str, Any]:
        """Columns of one sequence from ordinal 0."""
        heads, kv_heads, head_dim = SHAPES[model]
        count = -(-tokens // 64)
        kv = make_pages(kv_format, count, kv_heads, head_dim)
        width = 2 * (heads + kv_heads) * head_dim
        qkv, q = random_bf16(tokens, width), cp.empty((tokens, heads, head_dim), cp.uint16)
        ordinals = cp.arange(tokens, dtype=cp.int32)
        half = head_dim // 8
        inverse = cp.asarray(1e7 ** (-np.arange(half) / half), cp.float32)
        norms = HeadNorms(random_bf16(head_dim), random_bf16(head_dim), 1e-6, 1.0)
        tables = RotaryTables(inverse, cp.zeros(half, cp.int32), 1.0)
        positions, rows = cp.stack([ordinals] * 3), cp.zeros(tokens, cp.int32)
        page_tables = cp.arange(count, dtype=cp.int32).reshape(1, count)

        def enqueue(_index: int) -> None:
            attention_prepare.launch(
                self.kernels, qkv, q, kv, norms=norms, rotary_tables=tables,
                rope_positions=positions, ordinals=ordinals, column_rows=rows,
                page_tables=page_tables, stream=self.stream.ptr, is_chained=True,
            )  # fmt: skip

        took_us = self.time(enqueue, 8)
        stored = page_bytes(kv_format, kv_heads, head_dim) / 64
        used = tokens * (2 * (2 * heads + 2 * kv_heads) * head_dim + stored)
        return self._row("prepare", model, kv_format, tokens, tokens, took_us, used)

    def _row(
        self,
        case: str,
        model: str,
        kv_format: str,
        context: int,
        columns: int,
        took_us: float,
        used_bytes: float,
    ) -> dict[str, Any]:
        floor_us = used_bytes / self.read_rate * 1e6
        return {
            "case": case, "model": model, "format": kv_format, "context": context,
            "columns": columns, "us": took_us, "floor_us": floor_us,
            "fraction": floor_us / took_us, "bytes": used_bytes,
        }  # fmt: skip


def page_bytes(kv_format: str, kv_heads: int, head_dim: int) -> int:
    """Keys and values of 64 tokens."""
    row = {"bf16": 2 * head_dim, "fp8": head_dim + 4, "int8": head_dim + head_dim // 32}[kv_format]
    return 2 * 64 * kv_heads * row


def make_pages(kv_format: str, count: int, kv_heads: int, head_dim: int) -> Pages:
    shape = (count, 2, kv_heads, 64, head_dim)
    if kv_format == "bf16":
        return Pages(random_bf16(*shape), None)
    codes = cp.random.randint(0, 127, shape, dtype=cp.uint8)
    if kv_format == "fp8":
        return Pages(codes, cp.full(shape[:-1], 0.01, cp.float32))
    scales = cp.full((*shape[:-1], head_dim // 64), 0.01, cp.float16)
    return Pages(codes.view(cp.int8), scales)


def measure(bench: Bench, models: list[str], formats: list[str]) -> Iterator[dict[str, Any]]:
    for model in models:
        for kv_format in formats:
            for context in CONTEXTS:
                for columns in COLUMNS:
                    yield bench.decode(model, kv_format, context, columns)
            for tokens in PROMPTS:
                yield bench.prefill(model, kv_format, tokens)
            for tokens in (1, 8, 8192):
                yield bench.prepare(model, kv_format, tokens)
            cp.get_default_memory_pool().free_all_blocks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="4b,27b,35b")
    parser.add_argument("--formats", default="bf16,fp8,int8")
    arguments = parser.parse_args()
    bench = Bench()
    rows = []
    for row in measure(bench, arguments.models.split(","), arguments.formats.split(",")):
        rows.append(row)
        rate = f" {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        print(
            f"{row['case']:8s} {row['model']:4s} {row['format']:5s} context {row['context']:6d}"
            f" columns {row['columns']:5d} {row['us']:9.2f} us, floor {row['floor_us']:9.2f},"
            f" {100 * row['fraction']:3.0f} %{rate}",
            flush=True,
        )
    record = {**environment(cp), "read_rate": bench.read_rate, "rows": rows}
    write_record(arguments.out / "paged_attention.json", record)


if __name__ == "__main__":
    main()
