// stream_read: how fast this device can read memory once, the yardstick of decode.
//
// Every block streams its contiguous share through a ring in shared memory, as linear_small_t does,
// and folds the words into one number that it never expects to store. Bytes: each read once.

#include "bulk.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32 + 32;
constexpr u32 kStageBytes = 16384;

struct ReadParams {
  const u8* data;
  u32* sink;
  u64 chunks;  // of kStageBytes
  int stages;
  int padding;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) stream_read(const ReadParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 ring = shared_address(memory);
  const u32 full = ring + p.stages * kStageBytes, empty = full + p.stages * 8;
  const u64 begin = p.chunks * blockIdx.x / gridDim.x, end = p.chunks * (blockIdx.x + 1) / gridDim.x;
  const int thread = threadIdx.x, filler = thread - kWarps * 32;
  if (filler == 0) {
    for (int stage = 0; stage < p.stages; ++stage) {
      barrier_init(full + stage * 8, fill_threads());
      barrier_init(empty + stage * 8, kWarps * 32);
    }
    barrier_init_fence();
  }
  allow_next_kernel();
  __syncthreads();
  int stage = 0;
  u32 parity = 0;
  if (filler >= 0) {
    const u64 policy = evict_first_policy();
    for (u64 chunk = begin; filler < fill_threads() && chunk < end; ++chunk) {
      if (chunk - begin >= static_cast<u64>(p.stages)) barrier_wait(empty + stage * 8, parity ^ 1);
      fill_shared(ring + stage * kStageBytes, p.data + chunk * kStageBytes, kStageBytes,
                  full + stage * 8, policy, filler);
      if (++stage == p.stages) stage = 0, parity ^= 1;
    }
    return;
  }
  wait_for_previous_kernel();
  const u32 unknown_zero = static_cast<u32>(p.stages) >> 31;
  u32 folded = 0;
  for (u64 chunk = begin; chunk < end; ++chunk) {
    barrier_wait(full + stage * 8, parity);
    for (u32 at = thread * 16; at < kStageBytes; at += kWarps * 512) {
      const uint4 v = load_shared_16(ring + stage * kStageBytes + at);
      folded ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    give_stage_back(empty + stage * 8, folded, unknown_zero);
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
  if (folded == 0x9e3779b9u) *p.sink = folded;
}
