"""device_sampling at V = 248,320: microseconds a launch for several numbers of rows and settings.

    python -m bench.ops.bench_sampling --out DIR

The floor is the logits, read once at the read-only rate R of this run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import cupy as cp
import numpy as np

from bench.common.op_bench import OpBench
from bench.common.record import environment, write_record
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import SampleRow
from ninfer.ops import device_sampling
from ninfer.ops.device_sampling import MAX_TOP, ROW, SamplingInputs, SamplingOutputs

VOCAB: Final = 248320
VALID: Final = 248077
ROWS: Final = (1, 8, 64)
LINKS: Final = 8
SETTINGS: Final = {
    "greedy": SamplingParams(),
    "greedy, 20 logprobs": SamplingParams(top_logprobs=20),
    "temperature": SamplingParams(temperature=1.0),
    "top_k 20": SamplingParams(temperature=0.7, top_k=20),
    "top_p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "top_k 20, top_p 0.8, penalties": SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, presence_penalty=1.5, repetition_penalty=1.1
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench = OpBench()
    logits = cp.random.standard_normal((max(ROWS), VOCAB), dtype=cp.float32) * 3
    scratch = cp.zeros(device_sampling.scratch_bytes(max(ROWS)), cp.uint8)
    rows = []
    for name, params in SETTINGS.items():
        for count in ROWS:
            median = _time(bench, logits[:count], params, scratch)
            floor = count * VALID * 4 / bench.read_rate * 1e6
            print(f"{name:32s} {count:3d} rows {median:8.2f} us  floor {floor:7.2f}")
            rows.append({"case": name, "rows": count, "us": median, "floor_us": floor})
    record = {**environment(cp), "read_rate": bench.read_rate, "rows": rows}
    write_record(arguments.out / "sampling.json", record)


def _time(bench: OpBench, logits: Any, params: SamplingParams, scratch: Any) -> float:
    count = logits.shape[0]
    generated = np.arange(1000, dtype=np.int32)
    sample = SampleRow(params, 1, generated, np.ones(1000, np.int32), generated + 500)
    rows = np.zeros(count, ROW)
    ids, values = np.zeros(count * 4096, np.int32), np.zeros(count * 4096, np.float32)
    device_sampling.fill_rows([sample] * count, VALID, rows, ids, values)
    inputs = SamplingInputs(cp.asarray(rows.view(np.uint8)), cp.asarray(ids), cp.asarray(values))
    outputs = SamplingOutputs(
        cp.zeros(count, cp.int32), cp.zeros(count, cp.int32), cp.zeros(count, cp.float32),
        cp.zeros((count, MAX_TOP), cp.int32), cp.zeros((count, MAX_TOP), cp.float32),
    )  # fmt: skip

    def sample_rows(_link: int) -> None:
        device_sampling.launch(
            bench.kernels, logits, inputs, outputs, num_valid_ids=VALID, scratch=scratch,
            stream=bench.stream.ptr, is_chained=True,
        )  # fmt: skip

    return bench.time(sample_rows, LINKS)


if __name__ == "__main__":
    main()
