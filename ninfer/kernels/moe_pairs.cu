// moe_pairs: pairs sorted by expert, and the tiles of the sorted order.
//
// Contract: ninfer/ops/moe_pairs.py. Entries, in this order:
//   moe_pairs_count   a block counts the experts of its 1024 pairs
//   moe_pairs_place   a block adds up the counts ahead of it and places its pairs in order; the
//                     first one also writes offsets and tiles
// Within a block a warp takes 128 pairs in order, 32 at a time: equal experts of these find their
// order among one another. Bytes: the ids twice, the counts once a block, from L2.

#include "moe_tiles.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxExperts = 512;
constexpr int kBlockPairs = 1024;
constexpr int kWarpPairs = kBlockPairs / kWarps;

struct PairParams {
  const int* expert_ids;  // [P]
  int* counts;            // [blocks, E]
  int* positions;         // [P] sorted position of a pair
  int* sorted_tokens;     // [P] pair / k
  int* offsets;           // [E + 1] first sorted position of an expert
  int2* tiles;            // {expert, first sorted position}
  int* num_tiles;
  int num_pairs, experts_per_token, num_experts, padding;
};
static_assert(sizeof(PairParams) == 72, "ninfer/ops/moe_pairs.py mirrors this struct");

// Counts by warp of this block's pairs.
__device__ __forceinline__ void count_by_warp(const PairParams& p, int (&counts)[kWarps][kMaxExperts]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * kMaxExperts; i += kThreads) (&counts[0][0])[i] = 0;
  __syncthreads();
  const int first = blockIdx.x * kBlockPairs + warp * kWarpPairs;
#pragma unroll
  for (int i = 0; i < kWarpPairs / 32; ++i) {
    const int pair = first + i * 32 + lane;
    if (pair < p.num_pairs) atomicAdd(&counts[warp][__ldcg(p.expert_ids + pair)], 1);
  }
  __syncthreads();
}

// Sum of `value` over the threads before this one; the block's total in `total`.
__device__ __forceinline__ int sum_before(int value, int (&warp_sums)[kWarps], int& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  total = 0;
  int before = sum - value;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    total += warp_sums[i];
  }
  return before;
}

__device__ __forceinline__ int num_tiles(int pairs) { return (pairs + kTileTokens - 1) / kTileTokens; }

// Writes offsets and tiles; a thread has two experts of `totals` pairs that start at `start`.
__device__ __forceinline__ void list_tiles(const PairParams& p, const int (&totals)[2], int start,
                                           int (&warp_sums)[kWarps]) {
  int all = 0;
  int at = sum_before(num_tiles(totals[0]) + num_tiles(totals[1]), warp_sums, all);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int expert = threadIdx.x * 2 + i;
    if (expert >= p.num_experts) break;
    p.offsets[expert] = start;
    for (int done = 0; done < totals[i]; done += kTileTokens) p.tiles[at++] = make_int2(expert, start + done);
    start += totals[i];
  }
  if (threadIdx.x == 0) *p.num_tiles = all, p.offsets[p.num_experts] = p.num_pairs;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) moe_pairs_count(const PairParams p) {
  __shared__ int counts[kWarps][kMaxExperts];
  allow_next_kernel();
  wait_for_previous_kernel();
  count_by_warp(p, counts);
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) {
    int sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp][expert];
    p.counts[blockIdx.x * p.num_experts + expert] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_pairs_place(const PairParams p) {
  __shared__ int places[kWarps][kMaxExperts];
  __shared__ int warp_sums[kWarps];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  count_by_warp(p, places);
  int ahead[2] = {0, 0}, totals[2] = {0, 0}, all = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int expert = threadIdx.x * 2 + i;
    if (expert >= p.num_experts) break;
    for (int other = 0; other < static_cast<int>(gridDim.x); ++other) {
      const int count = __ldcg(p.counts + other * p.num_experts + expert);
      totals[i] += count;
      if (other < block) ahead[i] += count;
    }
  }
  const int start = sum_before(totals[0] + totals[1], warp_sums, all);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int place = start + (i == 1 ? totals[0] : 0) + ahead[i];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int count = places[w][threadIdx.x * 2 + i];
      places[w][threadIdx.x * 2 + i] = place;
      place += count;
    }
  }
  __syncthreads();
  const int first = block * kBlockPairs + warp * kWarpPairs;
  for (int i = 0; i < kWarpPairs / 32; ++i) {
    const int pair = first + i * 32 + lane;
    const int expert = pair < p.num_pairs ? __ldcg(p.expert_ids + pair) : kMaxExperts;
    const u32 peers = __match_any_sync(kAllLanes, expert);
    const int before = __popc(peers & ((1u << lane) - 1));
    const bool is_real = expert < kMaxExperts;
    const int at = is_real ? places[warp][expert] + before : 0;
    __syncwarp();
    if (is_real && before == 0) places[warp][expert] += __popc(peers);
    __syncwarp();
    if (is_real) p.positions[pair] = at, p.sorted_tokens[at] = pair / p.experts_per_token;
  }
  if (block == 0) list_tiles(p, totals, start, warp_sums);
}
