// The experts of every token, and for few tokens the list of experts in use with their pairs.
//
// A pair is (token, expert). Pairs are sorted by expert, then by token; a sorted position names one.
// Every kernel that needs the list works it out from the logits itself: same logits, same list.
#pragma once

#include "vec.cuh"
#include "warp.cuh"

constexpr int kMaxExperts = 512;
constexpr int kMaxExpertsPerToken = 16;

struct RoutingParams {
  const float* logits;  // [T, E]
  int logits_stride, num_experts, experts_per_token, renormalise;
};

struct Choice {
  int expert;
  float weight;
};

// Larger numbers have larger keys, both zeros the same; no number has key 0.
__device__ __forceinline__ u32 order_key(float value) {
  const u32 bits = __float_as_uint(value + 0.f);
  return bits ^ (static_cast<int>(bits) < 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float key_value(u32 key) {
  return __uint_as_float(key ^ (static_cast<int>(key) < 0 ? 0x80000000u : 0xffffffffu));
}

// Lane r < k gets the expert of rank r, ties to the lower id. Logits that are not numbers choose
// the first k experts, weighted NaN.
template <int kPerLane>
__device__ __forceinline__ Choice choose_experts_of(const RoutingParams& p, int t, int lane) {
  const float* logits = p.logits + static_cast<u64>(t) * p.logits_stride;
  u32 keys[kPerLane];
  float values[kPerLane];
  u32 peak_key = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * 32 + lane;
    values[i] = e < p.num_experts ? __ldcg(logits + e) : __uint_as_float(0xff800000u);
  }
  bool is_number = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    is_number &= values[i] == values[i];
    keys[i] = i * 32 + lane < p.num_experts ? order_key(values[i]) : 0;
    peak_key = max(peak_key, keys[i]);
  }
  const float peak = key_value(__reduce_max_sync(kAllLanes, peak_key));
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += expf(values[i] - peak);
  sum = warp_sum(sum);
  const bool is_broken = !__all_sync(kAllLanes, is_number) || !(sum == sum);
  u32 chosen_key = 0;
  int chosen = lane;
  for (int rank = 0; rank < p.experts_per_token; ++rank) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = max(best, keys[i]);
    best = __reduce_max_sync(kAllLanes, best);
    u32 id = 0xffffffffu;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) {
      if (keys[i] == best) id = i * 32 + lane;
    }
    id = __reduce_min_sync(kAllLanes, id);
    if (lane == rank) chosen_key = best, chosen = id;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 + lane == static_cast<int>(id)) keys[i] = 0;
    }
  }
  const bool is_chosen = lane < p.experts_per_token;
  const float share = is_chosen ? __fdiv_rn(expf(key_value(chosen_key) - peak), sum) : 0.f;
  const float total = warp_sum(share);
  const float weight = p.renormalise ? __fdiv_rn(share, total) : share;
  return Choice{is_broken ? lane : chosen, is_broken ? __uint_as_float(0x7fc00000u) : weight};
}

__device__ __forceinline__ Choice choose_experts(const RoutingParams& p, int t, int lane) {
  return p.num_experts <= 256 ? choose_experts_of<8>(p, t, lane) : choose_experts_of<16>(p, t, lane);
}

constexpr int kRoutedTokens = 16;
constexpr int kRoutedPairs = kRoutedTokens * kMaxExpertsPerToken;

// In shared memory.
struct Routing {
  u32 masks[kMaxExperts];       // tokens of an expert, a bit each
  float weights[kRoutedPairs];  // by sorted position
  float chosen_weights[kRoutedPairs];
  u16 chosen[kRoutedPairs];     // by token and rank
  u16 entry_of[kMaxExperts];
  u16 expert_of[kRoutedPairs];  // entries: experts in use, ascending
  u16 start[kRoutedPairs + 1];  // first sorted position of an entry
  u8 token_at[kRoutedPairs];    // by sorted position
  u32 warp_counts[32];
  int num_entries;
};

__device__ __forceinline__ int tokens_before(u32 mask, int t) { return __popc(mask & ((1u << t) - 1)); }

// By a whole block of kThreads threads, T <= kRoutedTokens. The masks are zeros and known as such.
template <int kThreads>
__device__ __forceinline__ void build_routing(Routing& r, const RoutingParams& p, int tokens) {
  static_assert(kThreads == kMaxExperts / 2 && kThreads >= kRoutedPairs, "a thread takes two experts and one pair");
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int t = warp; t < tokens; t += kThreads / 32) {
    const Choice choice = choose_experts(p, t, lane);
    if (lane < p.experts_per_token) {
      r.chosen[t * p.experts_per_token + lane] = choice.expert;
      r.chosen_weights[t * p.experts_per_token + lane] = choice.weight;
      atomicOr(r.masks + choice.expert, 1u << t);
    }
  }
  __syncthreads();
  // Entries in the low half of a word, pairs in the high half.
  const u32 first = r.masks[2 * thread], second = r.masks[2 * thread + 1];
  const u32 first_counts = (first != 0) + (__popc(first) << 16);
  const u32 counts = first_counts + (second != 0) + (__popc(second) << 16);
  u32 before = counts;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(kAllLanes, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) r.warp_counts[warp] = before;
  before -= counts;
  __syncthreads();
  u32 total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += r.warp_counts[i];
    total += r.warp_counts[i];
  }
  if (first != 0) {
    const int entry = before & 0xffff;
    r.entry_of[2 * thread] = entry, r.expert_of[entry] = 2 * thread, r.start[entry] = before >> 16;
  }
  if (second != 0) {
    const int entry = (before + first_counts) & 0xffff;
    r.entry_of[2 * thread + 1] = entry, r.expert_of[entry] = 2 * thread + 1;
    r.start[entry] = (before + first_counts) >> 16;
  }
  if (thread == 0) r.num_entries = total & 0xffff, r.start[total & 0xffff] = total >> 16;
  __syncthreads();
  if (thread < tokens * p.experts_per_token) {
    const int t = thread / p.experts_per_token, expert = r.chosen[thread];
    const int at = r.start[r.entry_of[expert]] + tokens_before(r.masks[expert], t);
    r.weights[at] = r.chosen_weights[thread];
    r.token_at[at] = t;
  }
  __syncthreads();
}
