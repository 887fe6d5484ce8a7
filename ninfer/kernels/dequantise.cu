// dequantise: the weight image that linear_small_t reads -> row-major bf16, once a layer and chunk.
//
// Contract: ninfer/ops/dequantise.py; image: ninfer/ops/linear_packing.py. Entries
// dequantise_<format>. A warp takes a part of 2 KiB, 64 bytes a lane in flight at once, and stores
// runs of 64 (bf16), 128 (e4m3) or 256 (e2m1) bytes of a row. Bytes: the image read once, the
// matrix written once.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace {

constexpr int kPartsPerUnit = 8;
constexpr int kPartBytes = 2048;
constexpr int kThreads = 256;

struct DequantiseParams {
  const u8* image;
  const float* row_scale;  // [N] f32 by row of the image, or null
  u16* y;                  // [N, K] bf16
  int rows;                // N
  int columns;             // K
  int units_per_block;
  int row_blocks;
  int strips_per_block;
  int last_strips;
  int is_interleaved;      // rows of the image take turns, 8 gate and 8 up: y has gate, then up
  int y_stride;
};
static_assert(sizeof(DequantiseParams) == 56, "ninfer/ops/dequantise.py mirrors this struct");

struct Bf16 {
  static constexpr int kPartColumns = 32, kPartSlab = 0, kUnitSlab = 0;
};
struct E4m3Row {
  static constexpr int kPartColumns = 64, kPartSlab = 0, kUnitSlab = 0;
};
struct E4m3Block {
  static constexpr int kPartColumns = 64, kPartSlab = 0, kUnitSlab = 64;
};
struct E2m1 {
  static constexpr int kPartColumns = 128, kPartSlab = 256, kUnitSlab = 0;
};

// A warp's part of the image.
struct Part {
  const u8* bytes;
  const u8* slab;  // its own scales, or null
  int first_row;   // of the image
  int first_column;
};

template <class Format>
__device__ __forceinline__ u64 unit_bytes(int parts) {
  return parts * (kPartBytes + Format::kPartSlab) + Format::kUnitSlab;
}

template <class Format>
__device__ __forceinline__ Part part_of(const DequantiseParams& p, u32 index) {
  const int slices = kPartsPerUnit / p.strips_per_block;
  const u32 block_parts = p.units_per_block * kPartsPerUnit;
  const int block = min(index / block_parts, static_cast<u32>(p.row_blocks - 1));
  const u32 within = index - block * block_parts;
  const int strips = block == p.row_blocks - 1 ? p.last_strips : p.strips_per_block;
  const int parts = strips * slices, unit = within / parts, part = within % parts;
  const u8* bytes = p.image + static_cast<u64>(block) * p.units_per_block * unit_bytes<Format>(kPartsPerUnit) +
                    unit * unit_bytes<Format>(parts);
  const int slab_bytes = Format::kPartSlab > 0 ? Format::kPartSlab : Format::kUnitSlab / kPartsPerUnit;
  return Part{bytes + part * kPartBytes, bytes + parts * kPartBytes + part * slab_bytes,
              (block * p.strips_per_block + part % strips) * 32,
              (unit * slices + part / strips) * Format::kPartColumns};
}

// Row of y for a row of the image.
__device__ __forceinline__ int natural_row(const DequantiseParams& p, int packed) {
  if (!p.is_interleaved) return packed;
  return (packed % 16) / 8 * (p.rows / 2) + packed / 16 * 8 + packed % 8;
}

__device__ __forceinline__ void store_run(const DequantiseParams& p, int packed, int column, uint4 run) {
  if (packed >= p.rows || column >= p.columns) return;
  u16* row = p.y + static_cast<u64>(natural_row(p, packed)) * p.y_stride;
  *reinterpret_cast<uint4*>(row + column) = run;
}

__device__ __forceinline__ u32 scaled_pair(u32 pair, float scale) {
  return pack_bf16x2(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

__device__ __forceinline__ float row_scale(const DequantiseParams& p, int packed) {
  return packed < p.rows ? __ldg(p.row_scale + packed) : 0.f;
}

// vectors[half][tile] of the lane are words {row g, row g + 8} twice: two columns a word.
__device__ __forceinline__ void store_part(Bf16, const DequantiseParams& p, const Part& part,
                                           const uint4 (&vectors)[2][2], int lane) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint4 first = vectors[0][tile], second = vectors[1][tile];
    const int row = part.first_row + tile * 16 + lane / 4, column = part.first_column + (lane % 4) * 8;
    store_run(p, row, column, make_uint4(first.x, first.z, second.x, second.z));
    store_run(p, row + 8, column, make_uint4(first.y, first.w, second.y, second.w));
  }
}

// A run of 8 e4m3 numbers of rows g and g + 8.
__device__ __forceinline__ void store_e4m3(const DequantiseParams& p, uint4 w, int row, int column,
                                           float scale, float upper_scale) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
  u32 lower[4], upper[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    lower[i] = scaled_pair(mul_bf16x2(e4m3_first_pair(words[i]), kTwoTo120), scale);
    upper[i] = scaled_pair(mul_bf16x2(e4m3_second_pair(words[i]), kTwoTo120), upper_scale);
  }
  store_run(p, row, column, make_uint4(lower[0], lower[1], lower[2], lower[3]));
  store_run(p, row + 8, column, make_uint4(upper[0], upper[1], upper[2], upper[3]));
}

__device__ __forceinline__ void store_part(E4m3Row, const DequantiseParams& p, const Part& part,
                                           const uint4 (&vectors)[2][2], int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = part.first_row + (i % 2) * 16 + lane / 4;
    const int column = part.first_column + (i / 2) * 32 + (lane % 4) * 8;
    store_e4m3(p, vectors[i / 2][i % 2], row, column, row_scale(p, row), row_scale(p, row + 8));
  }
}

__device__ __forceinline__ void store_part(E4m3Block, const DequantiseParams& p, const Part& part,
                                           const uint4 (&vectors)[2][2], int lane) {
  const float2 scales = __ldg(reinterpret_cast<const float2*>(part.slab));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = part.first_row + (i % 2) * 16 + lane / 4;
    const int column = part.first_column + (i / 2) * 32 + (lane % 4) * 8;
    store_e4m3(p, vectors[i / 2][i % 2], row, column, scales.x, scales.y);
  }
}

// A vector is 16 columns of rows g and g + 8, four columns of each a word; one scale for all 16.
__device__ __forceinline__ void store_part(E2m1, const DequantiseParams& p, const Part& part,
                                           const uint4 (&vectors)[2][2], int lane) {
  const uint2 slab = __ldg(reinterpret_cast<const uint2*>(part.slab) + lane);
  const u32 scales[4] = {e4m3_first_pair(slab.x), e4m3_second_pair(slab.x), e4m3_first_pair(slab.y),
                         e4m3_second_pair(slab.y)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = part.first_row + (i % 2) * 16 + lane / 4;
    const int column = part.first_column + (i / 2) * 64 + (lane % 4) * 16;
    const u32 scale = mul_bf16x2(mul_bf16x2(scales[i], kTwoTo120), kTwoTo118);
    const u32 low = __byte_perm(scale, scale, 0x1010), high = __byte_perm(scale, scale, 0x3232);
    const float by = row_scale(p, row), upper_by = row_scale(p, row + 8);
    const uint4 w = vectors[i / 2][i % 2];
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    u32 lower[8], upper[8];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint4 pairs = e2m1_pairs(words[m]);
      lower[2 * m] = scaled_pair(mul_bf16x2(pairs.x, low), by);
      lower[2 * m + 1] = scaled_pair(mul_bf16x2(pairs.z, low), by);
      upper[2 * m] = scaled_pair(mul_bf16x2(pairs.y, high), upper_by);
      upper[2 * m + 1] = scaled_pair(mul_bf16x2(pairs.w, high), upper_by);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32* a = lower + half * 4;
      const u32* b = upper + half * 4;
      store_run(p, row, column + half * 8, make_uint4(a[0], a[1], a[2], a[3]));
      store_run(p, row + 8, column + half * 8, make_uint4(b[0], b[1], b[2], b[3]));
    }
  }
}

template <class Format>
__device__ __forceinline__ void dequantise(const DequantiseParams& p) {
  allow_next_kernel();
  const int lane = threadIdx.x % 32;
  const int slices = kPartsPerUnit / p.strips_per_block;
  const u32 total = static_cast<u32>(p.units_per_block) *
                    ((p.row_blocks - 1) * kPartsPerUnit + p.last_strips * slices);
  const u32 warps = gridDim.x * (kThreads / 32);
  wait_for_previous_kernel();
  for (u32 index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; index < total; index += warps) {
    const Part part = part_of<Format>(p, index);
    uint4 vectors[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      vectors[i / 2][i % 2] = __ldg(reinterpret_cast<const uint4*>(part.bytes) + i * 32 + lane);
    }
    store_part(Format{}, p, part, vectors, lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
dequantise_bf16(const DequantiseParams p) { dequantise<Bf16>(p); }

extern "C" __global__ void __launch_bounds__(kThreads)
dequantise_fp8_row(const DequantiseParams p) { dequantise<E4m3Row>(p); }

extern "C" __global__ void __launch_bounds__(kThreads)
dequantise_fp8_block(const DequantiseParams p) { dequantise<E4m3Block>(p); }

extern "C" __global__ void __launch_bounds__(kThreads)
dequantise_nvfp4(const DequantiseParams p) { dequantise<E2m1>(p); }
