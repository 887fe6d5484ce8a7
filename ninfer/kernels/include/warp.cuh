// Warp-wide reductions in a fixed order, so that equal inputs give equal bits.
#pragma once

constexpr unsigned kAllLanes = 0xffffffffu;

// Sum over all 32 lanes; every lane gets it.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// Sum over the 8 lanes that share lane % 4, i.e. over the rows of an mma accumulator column.
__device__ __forceinline__ float row_group_sum(float value) {
#pragma unroll
  for (int step = 16; step >= 4; step >>= 1) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}
