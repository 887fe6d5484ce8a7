// rms_norm: y = x / rms(x) * (offset + weight), with an optional addition in front.
//
// Contract: ninfer/ops/rms_norm.py. Entries rms_norm_bf16_<n>: n vectors of 8 numbers a thread, one
// block a row, the row in registers between its two uses. Bytes: every operand once. Sums run over
// a thread's vectors, then lanes, then warps, in that order whatever T is.

#include "normalise.cuh"
#include "pdl.cuh"
#include "square_sums.cuh"
#include "vec.cuh"

namespace {

struct RmsNormParams {
  const u16* x;        // [T, C] bf16
  const u16* weight;   // [C] bf16
  u16* y;              // [T, C] bf16
  const u16* residual; // [T, C] bf16 or null: added to x first
  u16* sum;            // [T, C] bf16, what was normalised; with residual alone
  float* square_sums;  // [T, ceil(C / 32)] f32 or null: of what was normalised
  int columns;         // C
  int x_stride, y_stride, residual_stride, sum_stride;
  float eps;
  float offset;
  int padding;
};
static_assert(sizeof(RmsNormParams) == 80, "ninfer/ops/rms_norm.py mirrors this struct");

__device__ __forceinline__ uint4 add_rounded(uint4 a, uint4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  u32 sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = pack_bf16x2(__uint_as_float(x[i] << 16) + __uint_as_float(y[i] << 16),
                         __uint_as_float(x[i] & 0xffff0000u) + __uint_as_float(y[i] & 0xffff0000u));
  }
  return make_uint4(sum[0], sum[1], sum[2], sum[3]);
}

__device__ __forceinline__ const uint4* row_of(const u16* matrix, int stride) {
  return reinterpret_cast<const uint4*>(matrix + static_cast<u64>(blockIdx.x) * stride);
}

__device__ __forceinline__ uint4* row_of(u16* matrix, int stride) {
  return reinterpret_cast<uint4*>(matrix + static_cast<u64>(blockIdx.x) * stride);
}

template <int kVectors>
__device__ __forceinline__ void rms_norm(const RmsNormParams& p) {
  allow_next_kernel();
  const int vectors = p.columns / 8, threads = blockDim.x, thread = threadIdx.x;
  uint4 weight[kVectors], x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    weight[i] = x[i] = make_uint4(0, 0, 0, 0);
    if (v < vectors) weight[i] = __ldg(reinterpret_cast<const uint4*>(p.weight) + v);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    if (v < vectors) x[i] = __ldcg(row_of(p.x, p.x_stride) + v);
  }
  if (p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * threads + thread;
      if (v >= vectors) continue;
      x[i] = add_rounded(__ldcg(row_of(p.residual, p.residual_stride) + v), x[i]);
      row_of(p.sum, p.sum_stride)[v] = x[i];
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    const float strip = strip_sum(square_sum(x[i]));
    sum += strip;
    if (p.square_sums != nullptr && thread % 4 == 0 && v < vectors) {
      store_strip_sum(p.square_sums, blockIdx.x, p.columns, v, strip);
    }
  }
  const float scale = 1.f / sqrtf(row_sum(sum) / p.columns + p.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    if (v < vectors) row_of(p.y, p.y_stride)[v] = normalised(x[i], weight[i], scale, p.offset);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
rms_norm_bf16_1(const RmsNormParams p) { rms_norm<1>(p); }

extern "C" __global__ void __launch_bounds__(512)
rms_norm_bf16_2(const RmsNormParams p) { rms_norm<2>(p); }

extern "C" __global__ void __launch_bounds__(512)
rms_norm_bf16_4(const RmsNormParams p) { rms_norm<4>(p); }

extern "C" __global__ void __launch_bounds__(512)
rms_norm_bf16_8(const RmsNormParams p) { rms_norm<8>(p); }
