// Sums of squares of 32 neighbouring bf16 numbers, the form in which norms travel between kernels.
//
// A vector is 8 numbers, a strip 4 vectors; lanes 4 n .. 4 n + 3 hold the vectors of one strip.
#pragma once

#include "vec.cuh"
#include "warp.cuh"

__device__ __forceinline__ float square_sum(uint4 x) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xffff0000u);
    sum += low * low;
    sum += high * high;
  }
  return sum;
}

// Over the four lanes of a strip; all four get it. The whole warp takes part.
__device__ __forceinline__ float strip_sum(float sum) {
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  return sum + __shfl_xor_sync(kAllLanes, sum, 2);
}

// sums [T, ceil(columns / 32)]; `vector` is the strip's first.
__device__ __forceinline__ void store_strip_sum(float* sums, int t, int columns, int vector, float sum) {
  const int strips = (columns + 31) / 32;
  sums[static_cast<u64>(t) * strips + vector / 4] = sum;
}
