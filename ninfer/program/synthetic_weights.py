"""Made-up weights of real shapes, made on the device: for benchmarks, not for text."""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np

from ninfer.contract.model import ModelConfig
from ninfer.models.parameters import model_objects
from ninfer.program.executors.cuda_dflash_weights import PREFIX
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore, bf16_codes
from ninfer.program.executors.dflash_setup import DflashSetup

_PATTERN_VALUES: Final = (1 << 24) + 8
"""Not a multiple of a row: rows of a matrix differ."""
_STANDARD_DEVIATION: Final = 0.02


def fill_synthetic(
    driver: CudaDriver, config: ModelConfig, store: WeightStore, dflash: DflashSetup | None = None
) -> None:
    """Put random numbers (normal, a small deviation) into every weight, those of a draft model too.
    Raises DeviceError."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(_PATTERN_VALUES, np.float32) * np.float32(_STANDARD_DEVIATION)
    address = driver.allocate(2 * _PATTERN_VALUES)
    pattern = DeviceTensor.dense(address, (_PATTERN_VALUES,), "uint16")
    driver.upload(address, bf16_codes(values))
    driver.synchronize()
    objects = {item.name: item.shape for item in model_objects(config)}
    if dflash is not None:
        objects |= {PREFIX + item.name: item.shape for item in dflash.objects}
    for name, shape in objects.items():
        if not store.expects(name):
            continue
        if len(shape) == 1:
            store.put(name, values[: prod(shape)])
        else:
            store.put_pattern(name, pattern)
    driver.synchronize()
    driver.release(address)
