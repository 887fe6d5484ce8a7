"""linear_small_t beside a kernel that keeps the multiprocessors' loads busy: the same bits.

Loads of the other kernel queue up before those from the ring, which then happen late: a stage that
is given back before they have happened is filled anew under them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ninfer.ops import linear_small_t
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import PackedLinear
from tests.helpers.device import Device, open_device

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 12_352, 2_560
"""A block of its plan leaves registers and shared memory to another kernel's."""
NUM_PRODUCTS = 300
NUM_TILES = 64
ROUNDS = 32
LOADS = r"""
extern "C" __global__ void __launch_bounds__(512, 2)
load_much(const float4* from, float* sink, int tiles, int rounds) {
  float sum = 0.f;
  for (int round = 0; round < rounds; ++round) {
    const float4* tile = from + (blockIdx.x + round) % tiles * 4096 + threadIdx.x;
    float4 seen[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) seen[i] = __ldcg(tile + i * 512);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += seen[i].x + seen[i].y + seen[i].z + seen[i].w;
  }
  if (sum != 0.f) *sink = sum;
}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


def random_codes(cp: Any, count: int) -> Any:
    """Normal numbers in bf16, cut off."""
    values = cp.random.default_rng(3).standard_normal(count, dtype=cp.float32)
    return (values.view(cp.uint32) >> 16).astype(cp.uint16)


def test_loads_of_another_kernel_change_no_bit_of_a_product(device: Device) -> None:
    cp = device.cp
    layout = ImageLayout.of(WeightFormat.BF16, ROWS, COLUMNS)
    plan = linear_small_t.plan_linear(layout, device.kernels.limits)
    image = random_codes(cp, layout.image_bytes // 2).view(cp.uint8)
    packed = PackedLinear(plan, image, None)
    x = random_codes(cp, COLUMNS).reshape(1, COLUMNS)
    size = linear_small_t.workspace_size(plan)
    workspace = cp.full(size, 0xFFFFFFFF, cp.uint32).view(cp.float32)
    found = cp.zeros((NUM_PRODUCTS, 1, ROWS), cp.uint16)
    kernel = cp.RawKernel(LOADS, "load_much")
    kernel.preferred_shared_memory_carveout = 100  # else the two would never share
    loaded, sink = cp.zeros((NUM_TILES * 4096, 4), cp.float32), cp.zeros(1, cp.float32)
    beside = cp.cuda.Stream(non_blocking=True)
    blocks = device.kernels.limits.num_multiprocessors
    device.stream.synchronize()
    for index in range(NUM_PRODUCTS):
        linear_small_t.launch(
            device.kernels, packed, x, found[index], workspace=workspace, stream=device.stream.ptr
        )
        if index:  # the first has the device for itself
            with beside:
                kernel((blocks,), (512,), (loaded, sink, np.int32(NUM_TILES), np.int32(ROUNDS)))
        else:
            device.stream.synchronize()
    beside.synchronize()
    device.stream.synchronize()
    bits = np.asarray(cp.asnumpy(found))
    assert bits.any()
    assert np.nonzero((bits != bits[0]).any(axis=(1, 2)))[0].tolist() == []
