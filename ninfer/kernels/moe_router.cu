// moe_router: the experts of every token, the shared expert's gate, and pairs sorted by expert.
//
// Contracts: ninfer/ops/moe_router.py and ninfer/ops/moe_pairs.py. Entries:
//   moe_router_f32   one warp a token: softmax over E, then k times the largest that is left;
//                    a second warp, the gate's dot product
//   moe_pairs        one block an expert: counts smaller experts, then places its pairs in order
// A token depends on itself alone. Bytes: logits once; the pairs' experts once a block, from L2.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kMaxPerLane = 16;  // 512 experts
constexpr int kThreads = 256;

struct RouterParams {
  const float* logits;  // [T, E]
  const u16* x;         // [T, C] bf16, with gate
  const u16* gate;      // [C] bf16 or null
  int* expert_ids;      // [T, k]
  float* weights;       // [T, k]
  float* shared_gate;   // [T]
  int num_experts, experts_per_token, renormalise, logits_stride, x_stride, columns;
};
static_assert(sizeof(RouterParams) == 72, "ninfer/ops/moe_router.py mirrors this struct");

struct PairParams {
  const int* expert_ids;  // [P]
  int* order;             // [P] pair at a sorted position
  int* positions;         // [P] sorted position of a pair
  int* sorted_experts;    // [P]
  int* sorted_tokens;     // [P] pair / k
  int* offsets;           // [E + 1] first sorted position of an expert
  int num_pairs, experts_per_token, num_experts, padding;
};
static_assert(sizeof(PairParams) == 64, "ninfer/ops/moe_pairs.py mirrors this struct");

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ void choose_experts(const RouterParams& p, int t, int lane) {
  float values[kMaxPerLane], peak = __uint_as_float(0xff800000u), sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int e = i * 32 + lane;
    values[i] = e < p.num_experts ? __ldcg(p.logits + static_cast<u64>(t) * p.logits_stride + e)
                                  : __uint_as_float(0xff800000u);
    peak = fmaxf(peak, values[i]);
  }
  peak = warp_max(peak);
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    values[i] = i * 32 + lane < p.num_experts ? expf(values[i] - peak) : 0.f;
    sum += values[i];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const bool is_real = i * 32 + lane < p.num_experts;
    values[i] = is_real ? __fdiv_rn(values[i], sum) : -1.f;
  }
  float chosen = 0.f, total = 0.f;
  int chosen_id = 0;
  for (int rank = 0; rank < p.experts_per_token; ++rank) {
    float best = -2.f;
    int best_id = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      if (values[i] > best) best = values[i], best_id = i * 32 + lane;
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      const float other = __shfl_xor_sync(kAllLanes, best, step);
      const int other_id = __shfl_xor_sync(kAllLanes, best_id, step);
      if (other > best || (other == best && other_id < best_id)) best = other, best_id = other_id;
    }
    total += best;
    if (lane == rank) chosen = best, chosen_id = best_id;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      if (i * 32 + lane == best_id) values[i] = -2.f;
    }
  }
  if (lane >= p.experts_per_token) return;
  const u64 at = static_cast<u64>(t) * p.experts_per_token + lane;
  // Logits that are not numbers choose nothing that exists: the first experts stand in, weighted NaN.
  const bool is_real = chosen_id < p.num_experts;
  p.expert_ids[at] = is_real ? chosen_id : lane;
  const float weight = p.renormalise ? __fdiv_rn(chosen, total) : chosen;
  p.weights[at] = is_real ? weight : __uint_as_float(0x7fc00000u);
}

__device__ void gate_shared(const RouterParams& p, int t, int lane) {
  float sum = 0.f;
  for (int v = lane; v < p.columns / 8; v += 32) {
    const uint4 x = __ldcg(reinterpret_cast<const uint4*>(p.x + static_cast<u64>(t) * p.x_stride) + v);
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(p.gate) + v);
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16);
      sum += __uint_as_float(a[i] & 0xffff0000u) * __uint_as_float(b[i] & 0xffff0000u);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) p.shared_gate[t] = 1.f / (1.f + expf(-sum));
}

// Sum over the block, the same in every thread.
__device__ int block_sum(int value) {
  __shared__ int sums[kThreads / 32];
  value = __reduce_add_sync(kAllLanes, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  int total = 0;
  for (int i = 0; i < kThreads / 32; ++i) total += sums[i];
  return total;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(64) moe_router_f32(const RouterParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  if (threadIdx.x < 32) {
    choose_experts(p, blockIdx.x, threadIdx.x);
  } else if (p.gate != nullptr) {
    gate_shared(p, blockIdx.x, threadIdx.x - 32);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) moe_pairs(const PairParams p) {
  __shared__ int ahead[kThreads / 32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int smaller = 0;
  for (int i = threadIdx.x; i < p.num_pairs; i += kThreads) smaller += __ldcg(p.expert_ids + i) < expert;
  int place = block_sum(smaller);
  if (threadIdx.x == 0) {
    p.offsets[expert] = place;
    if (expert == 0) p.offsets[p.num_experts] = p.num_pairs;
  }
  for (int first = 0; first < p.num_pairs; first += kThreads) {
    const int pair = first + threadIdx.x;
    const bool is_mine = pair < p.num_pairs && __ldcg(p.expert_ids + pair) == expert;
    const u32 mine = __ballot_sync(kAllLanes, is_mine);
    __syncthreads();
    if (lane == 0) ahead[warp] = __popc(mine);
    __syncthreads();
    int before = __popc(mine & ((1u << lane) - 1)), count = 0;
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) before += ahead[i];
      count += ahead[i];
    }
    if (is_mine) {
      const int at = place + before;
      p.order[at] = pair, p.positions[pair] = at;
      p.sorted_experts[at] = expert, p.sorted_tokens[at] = pair / p.experts_per_token;
    }
    place += count;
  }
}
