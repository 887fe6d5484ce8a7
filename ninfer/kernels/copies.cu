// copies: many ranges of device memory copied or zeroed by one launch, from descriptors.
//
// Contract: ninfer/ops/copies.py. Entry copies: grid (blocks a range, ranges at one time); a block
// walks its ranges in strides of the grid, 16-byte vectors, four in flight a thread. Bytes: every
// range read and written once. Descriptors, sources and targets may lie in page-locked host memory.

#include "pdl.cuh"
#include "vec.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;

struct CopyRange {
  const uint4* source;  // null: zeros
  uint4* target;
  u64 bytes;            // a multiple of 16
};
static_assert(sizeof(CopyRange) == 24, "ninfer/ops/copies.py mirrors this struct");

struct CopyParams {
  const CopyRange* ranges;
  u64 num_ranges;
};
static_assert(sizeof(CopyParams) == 16, "ninfer/ops/copies.py mirrors this struct");

__device__ __forceinline__ void copy_range(const CopyRange range) {
  const u64 vectors = range.bytes / 16, step = static_cast<u64>(gridDim.x) * kThreads * kInFlight;
  for (u64 first = static_cast<u64>(blockIdx.x) * kThreads * kInFlight + threadIdx.x; first < vectors; first += step) {
    uint4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      const u64 at = first + i * kThreads;
      if (range.source != nullptr && at < vectors) x[i] = __ldcs(range.source + at);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u64 at = first + i * kThreads;
      if (at < vectors) range.target[at] = x[i];
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) copies(const CopyParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  for (u64 index = blockIdx.y; index < p.num_ranges; index += gridDim.y) copy_range(p.ranges[index]);
}
