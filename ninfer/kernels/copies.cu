// copies: many ranges of device memory copied or zeroed by one launch, from descriptors.
//
// Contract: ninfer/ops/copies.py. Entry copies: grid (blocks a range, ranges); a block walks its
// range in strides of the grid, 16-byte vectors, four in flight a thread. Bytes: every range read
// and written once.

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
};
static_assert(sizeof(CopyParams) == 8, "ninfer/ops/copies.py mirrors this struct");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) copies(const CopyParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const CopyRange range = p.ranges[blockIdx.y];
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
