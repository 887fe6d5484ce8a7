// dflash_selector: the walk along a block of guesses, of each place's best tokens the one that
// follows the token chosen before it best.
//
// Contract: ninfer/ops/dflash_selector.py. Entries dflash_selector_<n>: factors of rank up to 256 n.
//
// One thread block a row, a warp a candidate. What does not depend on the walk is made ready for all
// places first: ids, logits, noise, and the rows of both codebooks in the L2. Then place by place:
//   each warp   logit + dot(mixed, its successor), the factors of predecessor * gate in shared memory
//   warp 0      the choice among the scores, a lane a candidate
//   the chosen  mixes its own predecessor with the gate of the place behind
// The next place's rows are on their way meanwhile. A product of three bf16 numbers is exact in f32;
// they are summed in an order that rank alone fixes. Bytes: 2 K rows of codebooks a place; latency is
// what it costs.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "philox.cuh"
#include "sample_row.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kMaxTop = 20;
constexpr int kMaxPlaces = 63;
constexpr int kMaxItems = kMaxPlaces * kMaxTop;
constexpr int kMaxRank = 1024;
constexpr u32 kTarget = 0;  // DrawPurpose.TARGET
constexpr u32 kNan = 0x7fc00000u;
constexpr u32 kLowest = 0xff800000u;

struct SelectorParams {
  const int* top_ids;         // [R W, kMaxTop]
  const float* top_logprobs;  // [R W, kMaxTop]
  const int* is_finite;       // [R W]
  const u16* gates;           // [R W, rank] bf16
  const u16* predecessors;    // [V, rank] bf16
  const u16* successors;      // [V, rank] bf16
  const int* token_ids;       // [R W]
  const int* ordinals;        // [R W]
  const SampleRow* rows;      // [R]
  int* proposals;             // [R, num_proposals]
  int columns;                // W
  int candidates;             // K
  int rank;
  int gate_stride;
  int num_ids;                // V
  int num_proposals;
};
static_assert(sizeof(SelectorParams) == 104, "ninfer/ops/dflash_selector.py mirrors this struct");

// Item c of place i stands at i K + c.
struct Walk {
  __align__(16) float mixed[kMaxRank];
  double noise[kMaxItems];
  double weights[kMaxTop];  // best first
  float logits[kMaxItems];
  int ids[kMaxItems];
  float scores[kMaxTop];
  int end;
  int choice;
};

// A lane's part of a row of `rank` numbers.
template <int kVectors>
struct Part {
  uint4 vectors[kVectors];
};

template <int kVectors>
__device__ __forceinline__ Part<kVectors> load_part(const u16* row, int rank, int lane) {
  Part<kVectors> part;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * 32 + lane;
    part.vectors[i] = v < rank / 8 ? __ldcg(reinterpret_cast<const uint4*>(row) + v) : make_uint4(0, 0, 0, 0);
  }
  return part;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// mixed = a * b
template <int kVectors>
__device__ __forceinline__ void mix(Walk& walk, const Part<kVectors>& a, const Part<kVectors>& b, int rank, int lane) {
  float4* mixed = reinterpret_cast<float4*>(walk.mixed);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * 32 + lane;
    const uint4 x = a.vectors[i], y = b.vectors[i];
    if (v >= rank / 8) continue;
    mixed[2 * v] = make_float4(low(x.x) * low(y.x), high(x.x) * high(y.x), low(x.y) * low(y.y), high(x.y) * high(y.y));
    mixed[2 * v + 1] =
        make_float4(low(x.z) * low(y.z), high(x.z) * high(y.z), low(x.w) * low(y.w), high(x.w) * high(y.w));
  }
}

// The sum over a row, in every lane.
template <int kVectors>
__device__ __forceinline__ float dot(const Walk& walk, const Part<kVectors>& row, int rank, int lane) {
  const float4* mixed = reinterpret_cast<const float4*>(walk.mixed);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * 32 + lane;
    if (v >= rank / 8) continue;
    const float4 a = mixed[2 * v], b = mixed[2 * v + 1];
    const uint4 x = row.vectors[i];
    sum = fmaf(low(x.x), a.x, sum), sum = fmaf(high(x.x), a.y, sum);
    sum = fmaf(low(x.y), a.z, sum), sum = fmaf(high(x.y), a.w, sum);
    sum = fmaf(low(x.z), b.x, sum), sum = fmaf(high(x.z), b.y, sum);
    sum = fmaf(low(x.w), b.z, sum), sum = fmaf(high(x.w), b.w, sum);
  }
  return warp_sum(sum);
}

template <class Number>
__device__ __forceinline__ Number warp_largest(Number value) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const Number other = __shfl_xor_sync(kAllLanes, value, step);
    if (other > value) value = other;
  }
  return value;
}

__device__ __forceinline__ int first_lane(bool is_it) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, is_it))) - 1;
}

// Whether top_k, min_p and top_p leave this lane's candidate. The whole warp takes part.
__device__ bool survives_cuts(const SampleRow& row, Walk& walk, float score, double weight, int candidates, int lane) {
  const int kept = row.top_k > 0 ? min(row.top_k, candidates) : candidates;
  int better = 0;
  for (int j = 0; j < candidates; ++j) {
    const float other = walk.scores[j];
    better += other > score || (other == score && j < lane);
  }
  const bool survives = better < kept && weight >= static_cast<double>(row.min_p);
  if (row.top_p >= 1.0) return survives;
  if (lane < candidates) walk.weights[better] = weight;
  __syncwarp();
  double before = 0.0, mass = 0.0;
  for (int j = 0; j < kept; ++j) {
    if (j == better) before = mass;
    mass += walk.weights[j];
  }
  return survives && (better == 0 || before < row.top_p * mass);
}

// The candidate that a warp takes by the scores; -1 where they are not finite.
__device__ int choose(const SampleRow& row, Walk& walk, const double* noise, int candidates, int lane) {
  const bool is_real = lane < candidates;
  const float score = is_real ? walk.scores[lane] : __uint_as_float(kLowest);
  if (__any_sync(kAllLanes, is_real && !isfinite(score))) return -1;
  const float peak = warp_largest(score);
  if (row.is_greedy) return first_lane(is_real && score == peak);
  const double log_weight = (static_cast<double>(score) - static_cast<double>(peak)) / row.temperature;
  const bool survives = survives_cuts(row, walk, score, exp(log_weight), candidates, lane) && is_real;
  const double drawn = survives ? log_weight + noise[lane] : -1e300;
  const double best = warp_largest(drawn);
  return first_lane(survives && drawn == best);
}

// Places from the first on that are real and have finite logits.
__device__ int count_places(const SelectorParams& p, Walk& walk, int first, int anchor) {
  const int places = min(p.columns - 1, p.num_proposals);
  if (threadIdx.x == 0) walk.end = anchor >= 0 && anchor < p.num_ids ? places : 0;
  __syncthreads();
  for (int i = threadIdx.x; i < places; i += blockDim.x) {
    const int column = first + 1 + i;
    if (__ldcg(p.ordinals + column) < 0 || __ldcg(p.is_finite + column) == 0) atomicMin(&walk.end, i);
  }
  __syncthreads();
  return walk.end;
}

__device__ __forceinline__ void prefetch_row(const u16* row, int rank) {
  for (int i = 0; i < rank; i += 64) prefetch_line(row + i);
}

// What places need that does not depend on the walk.
__device__ void prepare(const SelectorParams& p, const SampleRow& row, Walk& walk, int first, int places) {
  for (int i = threadIdx.x; i < places * p.candidates; i += blockDim.x) {
    const int place = i / p.candidates, at = (first + 1 + place) * kMaxTop + i % p.candidates;
    const int listed = __ldcg(p.top_ids + at);
    const bool is_token = listed >= 0 && listed < p.num_ids;
    const int id = is_token ? listed : 0;
    prefetch_row(p.successors + static_cast<u64>(id) * p.rank, p.rank);
    prefetch_row(p.predecessors + static_cast<u64>(id) * p.rank, p.rank);
    walk.ids[i] = id;
    walk.logits[i] = is_token ? __ldcg(p.top_logprobs + at) : __uint_as_float(kNan);
    if (row.is_greedy) continue;
    const uint4 counter = make_uint4(row.position + place, id / 4, kTarget, 0);
    walk.noise[i] = exact_gumbel(word_of(philox_words(row.seed, counter), id % 4));
  }
}

template <int kVectors>
__device__ __forceinline__ void dflash_selector(const SelectorParams& p) {
  __shared__ Walk walk;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int first = blockIdx.x * p.columns, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int anchor = __ldcg(p.token_ids + first);
  const SampleRow row = p.rows[blockIdx.x];
  const auto codes = [&](const u16* table, int id) {
    return load_part<kVectors>(table + static_cast<u64>(id) * p.rank, p.rank, lane);
  };
  const auto gates = [&](int place) {
    return load_part<kVectors>(p.gates + static_cast<u64>(first + 1 + place) * p.gate_stride, p.rank, lane);
  };
  const int end = count_places(p, walk, first, anchor);
  prepare(p, row, walk, first, end);
  if (warp == 0 && end > 0) mix(walk, codes(p.predecessors, anchor), gates(0), p.rank, lane);
  __syncthreads();
  int* proposals = p.proposals + blockIdx.x * p.num_proposals;
  Part<kVectors> successor = codes(p.successors, end > 0 ? walk.ids[warp] : 0);
  int place = 0;
  for (; place < end; ++place) {
    const int item = place * p.candidates + warp;
    const bool has_next = place + 1 < end;
    const Part<kVectors> predecessor = codes(p.predecessors, walk.ids[item]);
    const Part<kVectors> gate = gates(has_next ? place + 1 : place);
    const Part<kVectors> next = codes(p.successors, walk.ids[has_next ? item + p.candidates : item]);
    const float score = walk.logits[item] + dot(walk, successor, p.rank, lane);
    if (lane == 0) walk.scores[warp] = score;
    __syncthreads();
    if (warp == 0) {
      const int choice = choose(row, walk, walk.noise + place * p.candidates, p.candidates, lane);
      if (lane == 0) walk.choice = choice;
    }
    __syncthreads();
    const int choice = walk.choice;
    if (choice < 0) break;
    if (warp == choice) {
      if (lane == 0) proposals[place] = walk.ids[item];
      mix(walk, predecessor, gate, p.rank, lane);
    }
    __syncthreads();
    successor = next;
  }
  for (int i = place + threadIdx.x; i < p.num_proposals; i += blockDim.x) proposals[i] = -1;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(640)
dflash_selector_1(const SelectorParams p) { dflash_selector<1>(p); }

extern "C" __global__ void __launch_bounds__(640)
dflash_selector_2(const SelectorParams p) { dflash_selector<2>(p); }

extern "C" __global__ void __launch_bounds__(640)
dflash_selector_4(const SelectorParams p) { dflash_selector<4>(p); }
