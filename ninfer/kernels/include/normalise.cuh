// RMSNorm of 8 bf16 numbers whose row's 1 / rms is known: one rounding, at the end.
#pragma once

#include "dtypes.cuh"
#include "vec.cuh"
#include "warp.cuh"

__device__ __forceinline__ uint4 normalised(uint4 x, uint4 weight, float scale, float offset) {
  const u32 in[4] = {x.x, x.y, x.z, x.w}, by[4] = {weight.x, weight.y, weight.z, weight.w};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __uint_as_float(in[i] << 16) * scale;
    const float high = __uint_as_float(in[i] & 0xffff0000u) * scale;
    out[i] = pack_bf16x2(low * (offset + __uint_as_float(by[i] << 16)),
                         high * (offset + __uint_as_float(by[i] & 0xffff0000u)));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// The sum over a block in every thread. `sum` is the same in the four lanes of a strip.
__device__ __forceinline__ float row_sum(float sum) {
  __shared__ float sums[32];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int step = 16; step >= 4; step >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < warps; ++i) total += sums[i];
  return total;
}

// 1 / rms of a row of `columns` numbers from its `count` sums of squares, by one warp.
__device__ __forceinline__ float inverse_rms(const float* square_sums, int count, int columns, float eps, int lane) {
  float sum = 0.f;
  for (int i = lane; i < count; i += 32) sum += __ldcg(square_sums + i);
  return 1.f / sqrtf(warp_sum(sum) / columns + eps);
}
