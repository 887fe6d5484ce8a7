"""WeightStore: what is uploaded, quantised and packed, and in which order scales lie."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.cuda_weight_store import WeightStore, bf16_codes
from ninfer.program.executors.cuda_weights import MatrixSpec, VectorSpec, WeightPlan
from tests.helpers.fake_cuda import FakeCuda

ROWS, COLUMNS = 64, 32


def make_store(
    cuda: FakeCuda, fmt: WeightFormat, *, interleaved: bool = False, experts: int | None = None
) -> WeightStore:
    layout = ImageLayout.of(fmt, ROWS, COLUMNS)
    plan = WeightPlan(
        (MatrixSpec("m", layout, interleaved, experts),),
        (VectorSpec("v", (40,), "uint16"), VectorSpec("f", (5,), "float32")),
    )
    size = plan.num_bytes
    return WeightStore(cuda, plan, Arena(cuda.allocate(size), size))


def random_weight(*shape: int) -> Float32Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def fill(store: WeightStore, matrix: Float32Array) -> tuple[Float32Array, Float32Array]:
    vector, floats = random_weight(40), random_weight(5)
    store.put("m", matrix)
    store.put("v", vector)
    store.put("f", floats)
    return vector, floats


def test_vectors_lie_as_they_are_and_staging_is_given_back() -> None:
    cuda = FakeCuda()
    store = make_store(cuda, WeightFormat.BF16)
    assert len(cuda.sizes) == 2
    vector, floats = fill(store, random_weight(ROWS, COLUMNS))
    weights = store.finish()
    assert len(cuda.sizes) == 1
    np.testing.assert_array_equal(cuda.read(weights.vectors["v"]), float_to_bf16(vector))
    np.testing.assert_array_equal(cuda.read(weights.vectors["f"]), floats)
    assert list(weights.linears) == ["m"]
    assert not weights.experts


def test_bf16_codes_are_as_good_as_the_numbers_they_stand_for() -> None:
    shapes = {"m": (ROWS, COLUMNS), "v": (40,), "f": (5,)}
    codes = {name: float_to_bf16(random_weight(*shape)) for name, shape in shapes.items()}
    for is_widened in (False, True):
        cuda = FakeCuda()
        store = make_store(cuda, WeightFormat.FP8_ROW)
        staging = cuda.memory(max(cuda.sizes), 2 * ROWS * COLUMNS)
        for name, array in codes.items():
            store.put(name, bf16_to_float(array) if is_widened else array)
        vectors = store.finish().vectors
        assert (staging.view(np.uint16) == codes["m"].reshape(-1)).all()
        assert (cuda.read(vectors["v"]) == codes["v"]).all()
        assert (cuda.read(vectors["f"]) == bf16_to_float(codes["f"])).all()


@pytest.mark.parametrize(
    ("fmt", "families"),
    [
        (WeightFormat.BF16, ["linear_pack_bf16"]),
        (WeightFormat.FP8_ROW, ["quantise_fp8_row", "linear_pack_fp8_row"]),
        (WeightFormat.NVFP4, ["quantise_amax", "quantise_nvfp4", "linear_pack_nvfp4"]),
    ],
)
@pytest.mark.parametrize("experts", [None, 3])
def test_every_matrix_is_made_in_its_format(
    fmt: WeightFormat, families: list[str], experts: int | None
) -> None:
    cuda = FakeCuda()
    store = make_store(cuda, fmt, experts=experts)
    shape = (ROWS, COLUMNS) if experts is None else (experts, ROWS, COLUMNS)
    fill(store, random_weight(*shape))
    launches = cuda.launches()
    packs = [launch for launch in launches if launch.family == "linear_pack"]
    assert [launch.entry for launch in packs] == families[-1:] * (experts or 1)
    images = [int(launch.arguments["image"]) for launch in packs]
    assert len(set(images)) == len(images)
    assert {launch.entry.split("_")[0] for launch in launches} == {
        family.split("_")[0] for family in families
    }
    assert set(store.finish().experts) == (set() if experts is None else {"m"})


def test_row_scales_follow_the_order_of_the_image() -> None:
    cuda = FakeCuda()
    store = make_store(cuda, WeightFormat.FP8_ROW, interleaved=True)
    natural = np.arange(ROWS, dtype=np.float32)

    def quantise(record: object) -> None:
        cuda.queued.append(record)
        launches = cuda.launches()
        if launches and launches[-1] is record and launches[-1].family == "quantise":
            address = int(launches[-1].arguments["scales"])
            cuda.memory(address, natural.nbytes)[:] = natural.view(np.uint8)

    queue = cuda.queue

    def watch(item: object) -> None:
        if callable(item):
            queue(item)
        else:
            quantise(item)

    cuda.queue = watch  # type: ignore[method-assign]
    fill(store, random_weight(ROWS, COLUMNS))
    scale = store.finish().linears["m"][0].linear.row_scale
    assert isinstance(scale, DeviceTensor)
    got = cuda.read(scale)
    half = ROWS // 2
    want = [first + part * half + k for first in range(0, half, 8) for part in (0, 1)
            for k in range(8)]  # fmt: skip
    assert got.tolist() == want


@pytest.mark.parametrize("name", ["m", "v", "f"])
def test_a_missing_weight_is_named(name: str) -> None:
    store = make_store(FakeCuda(), WeightFormat.BF16)
    for other, weight in (
        ("m", random_weight(ROWS, COLUMNS)), ("v", random_weight(40)), ("f", random_weight(5)),
    ):  # fmt: skip
        if other != name:
            store.put(other, weight)
    with pytest.raises(InvariantError, match=f"weights {name} are missing"):
        store.finish()


def test_a_weight_of_another_shape_is_refused() -> None:
    store = make_store(FakeCuda(), WeightFormat.BF16)
    with pytest.raises(InvariantError, match="for a tensor"):
        store.put("m", random_weight(ROWS, COLUMNS + 8))


def test_a_pattern_fills_whole_tensors() -> None:
    cuda = FakeCuda()
    store = make_store(cuda, WeightFormat.BF16)
    pattern = DeviceTensor.dense(cuda.allocate(14), (7,), "uint16")
    cuda.memory(pattern.address, 14).view(np.uint16)[:] = range(7)
    store.put_pattern("v", pattern)
    store.put_pattern("m", pattern)
    store.put("f", random_weight(5))
    got = cuda.read(store.finish().vectors["v"])
    assert got.tolist() == [index % 7 for index in range(40)]


def test_codes_are_exact_for_weights_that_come_from_bf16_and_rounded_for_others() -> None:
    values = random_weight(1000)
    rounded = bf16_to_float(float_to_bf16(values))
    np.testing.assert_array_equal(bf16_codes(rounded), float_to_bf16(rounded))
    np.testing.assert_array_equal(bf16_codes(values), float_to_bf16(values))
    assert not np.array_equal(rounded, values)
