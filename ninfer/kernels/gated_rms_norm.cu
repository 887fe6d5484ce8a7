// gated_rms_norm: y = x / rms(x) * weight * silu(z), a warp a token and head.
//
// Contract: ninfer/ops/gated_rms_norm.py. Entries gated_rms_norm_bf16_<n>: heads of 32 n numbers,
// lane l takes numbers l, l + 32, ..: rows of z follow each other at any even distance, so wider
// loads need not be aligned. Bytes: every operand once.

#include "gdn.cuh"
#include "pdl.cuh"
#include "warp.cuh"

namespace {

struct GatedRmsNormParams {
  const u16* x;       // [T, Hv * dv] bf16
  const u16* z;       // [T, Hv * dv] bf16
  const u16* weight;  // [dv] bf16
  u16* y;             // [T, Hv * dv] bf16, may be x
  int tokens, heads;
  int x_stride, z_stride, y_stride;
  float eps;
};
static_assert(sizeof(GatedRmsNormParams) == 56, "ninfer/ops/gated_rms_norm.py mirrors this struct");

template <int kNumbers>
__device__ __forceinline__ void gated_rms_norm(const GatedRmsNormParams& p) {
  allow_next_kernel();
  const int lane = threadIdx.x % 32;
  const u64 unit = static_cast<u64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const u64 t = unit / p.heads;
  const u64 column = (unit - t * p.heads) * (32 * kNumbers) + lane;
  float weight[kNumbers], x[kNumbers], z[kNumbers];
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) weight[i] = bf16_to_float(__ldg(p.weight + lane + 32 * i));
  wait_for_previous_kernel();
  if (t >= p.tokens) return;
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    x[i] = bf16_to_float(__ldcg(p.x + t * p.x_stride + column + 32 * i));
    z[i] = bf16_to_float(__ldcg(p.z + t * p.z_stride + column + 32 * i));
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) sum = fmaf(x[i], x[i], sum);
  const float scale = rsqrtf(warp_sum(sum) * (1.f / (32 * kNumbers)) + p.eps);
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    p.y[t * p.y_stride + column + 32 * i] = float_to_bf16(x[i] * scale * weight[i] * silu(z[i]));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
gated_rms_norm_bf16_1(const GatedRmsNormParams p) { gated_rms_norm<1>(p); }

extern "C" __global__ void __launch_bounds__(256)
gated_rms_norm_bf16_2(const GatedRmsNormParams p) { gated_rms_norm<2>(p); }

extern "C" __global__ void __launch_bounds__(256)
gated_rms_norm_bf16_4(const GatedRmsNormParams p) { gated_rms_norm<4>(p); }
