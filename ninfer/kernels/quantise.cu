// quantise: bf16 weights -> e4m3 with a scale a 128 x 128 block or a row, or e2m1 with a scale a 16.
//
// Contract: ninfer/ops/quantise.py, whose NumPy functions give the same bits. Entries:
//   quantise_fp8_block   one thread block a scale block, its numbers in registers
//   quantise_fp8_row     one thread block a row, read twice (the second time from L2)
//   quantise_amax        the largest magnitude of a matrix, as bits of a float: an integer maximum
//   quantise_nvfp4       16 columns a thread, the matrix' scale from what quantise_amax left
// Divisions are IEEE; roundings go to nearest, ties to even. Bytes: weights once, row scales twice.

#include "dtypes.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 128;
constexpr float kE4m3Max = 448.f, kE2m1Max = 6.f;
constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr float kE2m1Shift = 256.f;

struct QuantiseParams {
  const u16* x;     // [N, K] bf16
  u8* codes;        // [N, K] e4m3, or [N, K / 2] of two e2m1
  void* scales;     // f32 [ceil(N / 128), ceil(K / 128)] or [N]; e4m3 [N, K / 16]
  float* row_scale; // [N], for nvfp4: the matrix' scale times 256
  u32* amax;        // bits of the largest magnitude, for nvfp4
  int rows;
  int columns;
};
static_assert(sizeof(QuantiseParams) == 48, "ninfer/ops/quantise.py mirrors this struct");

// amax / most, or 1 where that would not be a normal number: such weights become zeros.
__device__ __forceinline__ float scale_of(float amax, float most) {
  const float scale = __fdiv_rn(amax, most);
  return scale >= kSmallestNormal ? scale : 1.f;
}

// Saturates; NaN becomes NaN.
__device__ __forceinline__ u32 e4m3_code(float value) {
  const u32 sign = __float_as_uint(value) >> 24 & 0x80;
  const float magnitude = fabsf(value);
  if (!(magnitude <= kE4m3Max)) return sign | (magnitude > kE4m3Max ? 0x7e : 0x7f);
  if (magnitude < 0.015625f) return sign | static_cast<u32>(__float2int_rn(magnitude * 512.f));
  const u32 bits = __float_as_uint(magnitude);
  return sign | ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
}

__device__ __forceinline__ float e4m3_value(u32 code) {
  const float magnitude = code < 8 ? static_cast<float>(code) * 0.001953125f
                                   : __uint_as_float((code + (120u << 3)) << 20);
  return magnitude;
}

__device__ __forceinline__ u32 e2m1_code(float value) {
  const float a = fabsf(value);
  const u32 index = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
  return (__float_as_uint(value) >> 28 & 8) | index;
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float largest(uint4 x) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaxf(fabsf(low_half(words[i])), fabsf(high_half(words[i]))));
  return most;
}

__device__ __forceinline__ float block_largest(float most) {
  __shared__ float warps[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) most = fmaxf(most, warps[i]);
  return most;
}

__device__ __forceinline__ u32 e4m3_pair(u32 pair, float scale) {
  return e4m3_code(__fdiv_rn(low_half(pair), scale)) | e4m3_code(__fdiv_rn(high_half(pair), scale)) << 8;
}

__device__ __forceinline__ uint2 e4m3_vector(uint4 x, float scale) {
  return make_uint2(e4m3_pair(x.x, scale) | e4m3_pair(x.y, scale) << 16,
                    e4m3_pair(x.z, scale) | e4m3_pair(x.w, scale) << 16);
}

__device__ __forceinline__ u64 place(const QuantiseParams& p, int row, int column) {
  return static_cast<u64>(row) * p.columns + column;
}

__device__ __forceinline__ uint4 load_vector(const QuantiseParams& p, int row, int column) {
  return *reinterpret_cast<const uint4*>(p.x + place(p, row, column));
}

__device__ __forceinline__ void store_e4m3(const QuantiseParams& p, int row, int column, uint4 x, float scale) {
  *reinterpret_cast<uint2*>(p.codes + place(p, row, column)) = e4m3_vector(x, scale);
}

// 8 columns of x, in e2m1 steps of `step`, as 8 nibbles; zeros for a step of 0.
__device__ __forceinline__ u32 e2m1_vector(uint4 x, float step) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = step > 0.f ? __fdiv_rn(low_half(words[i]), step) : 0.f;
    const float high = step > 0.f ? __fdiv_rn(high_half(words[i]), step) : 0.f;
    codes |= (e2m1_code(low) | e2m1_code(high) << 4) << (8 * i);
  }
  return codes;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) quantise_fp8_block(const QuantiseParams p) {
  constexpr int kVectors = kBlock * kBlock / 8 / kThreads;
  const int row = blockIdx.y * kBlock + threadIdx.x / 16, column = blockIdx.x * kBlock + threadIdx.x % 16 * 8;
  uint4 x[kVectors];
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i] = make_uint4(0, 0, 0, 0);
    if (row + i * 16 < p.rows && column < p.columns) x[i] = load_vector(p, row + i * 16, column);
    most = fmaxf(most, largest(x[i]));
  }
  const float scale = scale_of(block_largest(most), kE4m3Max);
  if (threadIdx.x == 0) static_cast<float*>(p.scales)[blockIdx.y * gridDim.x + blockIdx.x] = scale;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (row + i * 16 < p.rows && column < p.columns) store_e4m3(p, row + i * 16, column, x[i], scale);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) quantise_fp8_row(const QuantiseParams p) {
  float most = 0.f;
  for (int column = threadIdx.x * 8; column < p.columns; column += kThreads * 8) {
    most = fmaxf(most, largest(load_vector(p, blockIdx.x, column)));
  }
  const float scale = scale_of(block_largest(most), kE4m3Max);
  if (threadIdx.x == 0) static_cast<float*>(p.scales)[blockIdx.x] = scale;
  for (int column = threadIdx.x * 8; column < p.columns; column += kThreads * 8) {
    store_e4m3(p, blockIdx.x, column, load_vector(p, blockIdx.x, column), scale);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) quantise_amax(const QuantiseParams p) {
  const u64 total = static_cast<u64>(p.rows) * p.columns / 8, step = static_cast<u64>(gridDim.x) * kThreads;
  float most = 0.f;
  for (u64 i = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    most = fmaxf(most, largest(reinterpret_cast<const uint4*>(p.x)[i]));
  }
  most = block_largest(most);
  // Bits of numbers that are not negative are in the order of the numbers.
  if (threadIdx.x == 0) atomicMax(p.amax, __float_as_uint(most));
}

extern "C" __global__ void __launch_bounds__(kThreads) quantise_nvfp4(const QuantiseParams p) {
  const float scale = scale_of(__uint_as_float(*p.amax), kE2m1Max * kE4m3Max);
  const int groups = p.columns / 16;
  const u64 total = static_cast<u64>(p.rows) * groups, stride = static_cast<u64>(gridDim.x) * kThreads;
  for (u64 i = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += stride) {
    const uint4* x = reinterpret_cast<const uint4*>(p.x) + i * 2;
    const uint4 first = x[0], second = x[1];
    const float most = fmaxf(largest(first), largest(second));
    const u32 code = e4m3_code(__fdiv_rn(__fdiv_rn(most, kE2m1Max), scale));
    const float step = __fmul_rn(e4m3_value(code), scale);
    static_cast<u8*>(p.scales)[i] = static_cast<u8>(code);
    reinterpret_cast<uint2*>(p.codes)[i] = make_uint2(e2m1_vector(first, step), e2m1_vector(second, step));
    if (i < static_cast<u64>(p.rows)) p.row_scale[i] = scale * kE2m1Shift;
  }
}
