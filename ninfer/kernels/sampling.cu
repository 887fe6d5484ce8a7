// sampling: one token a row from its logits, as ninfer/ops/sampling.py states it.
//
// Contract: ninfer/ops/device_sampling.py. Entries sampling_f32 and sampling_bf16.
//
// The vocabulary of a row is cut into slices of up to 16384 ids, one thread block each, that stay
// in shared memory from the first pass to the last. Blocks of a row meet at barriers in global
// memory, so all blocks of a launch must be resident at once; waits are bounded.
//
//   load, raw statistics, best raw tokens -> bias, suppression, mask, penalties -> largest score
//   greedy: done. Else distances from the largest, in steps of T * 2^-27: 32-bit whole numbers;
//   top_k and top_p are radix selections (11 + 11 + 10 bits) over histograms of counts and of
//   masses, both whole numbers: no sum depends on an order. Ties at a cut go to the lowest ids.
//   Gumbel draw over what survives: float32 to find who may win, float64 among those.
//
// A distance past 2047 / 64 nats is a tail that no noise can lift to the top; it has no mass.
// Bytes: the logits once. The last block of a row to arrive writes the results and clears scratch.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "philox.cuh"
#include "sample_row.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kMaxSlice = 16384;
static_assert(kMaxSlice / 32 == kThreads, "a thread owns one word of the bitmap of seen ids");
constexpr int kMaxParts = 32;
constexpr int kMaxTop = 20;
constexpr int kBuckets = 2048;
constexpr int kHistograms = 5;
constexpr u32 kTail = 0xffffffffu;
constexpr u32 kMaxSpins = 1u << 24;
constexpr float kSteps = 64.f;              // first-digit buckets a nat
constexpr float kFraction = 2097152.f;      // 2^21 steps a bucket
constexpr float kNatsAStep = 1.f / (kSteps * kFraction);
constexpr float kUnitMass = 34359738368.f;  // 2^35: the mass of the best token
constexpr float kWindow = 1e-3f;            // far above the error of a float32 score

struct SamplingParams {
  const void* logits;      // [R, V] f32 or bf16
  const SampleRow* rows;   // [R]
  const int* ids;
  const float* values;
  const u32* masks;        // [R, mask_words] or null: bit id of row r allows it
  u8* scratch;             // [R] RowScratch, zeros where it says so
  int* token_ids;          // [R], -1: none
  int* is_finite;          // [R]
  float* logprobs;         // [R]
  int* top_ids;            // [R, kMaxTop]
  float* top_logprobs;     // [R, kMaxTop]
  int logits_stride;
  int num_valid_ids;
  int slice;               // ids a block, a multiple of 4
  int mask_words;
  int first_row;
  int padding;
};
static_assert(sizeof(SamplingParams) == 112, "ninfer/ops/device_sampling.py mirrors this struct");

// What the blocks of a row tell each other.
struct RowScratch {
  u64 mass[kHistograms][kBuckets];   // zeros before and after
  u32 count[kHistograms][kBuckets];  // zeros before and after
  u32 arrived, done, padding[14];    // zeros before and after
  u64 best[kMaxParts];
  u64 top[kMaxParts][kMaxTop];
  double drawn[kMaxParts];
  int drawn_id[kMaxParts];
  float raw_peak[kMaxParts], raw_sum[kMaxParts];
  u32 is_finite[kMaxParts], ties[kMaxParts];
};
static_assert(sizeof(RowScratch) == 129216, "ninfer/ops/device_sampling.py knows this size");

struct SharedMemory {
  float* scores;  // [slice]
  u32* count;     // [kBuckets]
  u32* low;       // [kBuckets] masses, bits 0..17
  u32* high;      // [kBuckets] masses, bits 18..35
  u64* warps;     // [17]
};

// Where this block stands.
struct Place {
  int row;    // of the call
  int part, parts;
  int first;  // id
  int size;   // ids of this slice
  RowScratch* scratch;
};

// Order-preserving: larger number, larger key.
__device__ __forceinline__ u32 order_key(float value) {
  const u32 bits = __float_as_uint(value + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of_key(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Larger score first, then the lower id.
__device__ __forceinline__ u64 rank_key(float value, int id) {
  return static_cast<u64>(order_key(value)) << 32 | (0xffffffffu - static_cast<u32>(id));
}

__device__ __forceinline__ int id_of_rank(u64 rank) {
  return static_cast<int>(0xffffffffu - static_cast<u32>(rank));
}

__device__ __forceinline__ float value_of_rank(u64 rank) {
  return value_of_key(static_cast<u32>(rank >> 32));
}

__device__ __forceinline__ u64 warp_max(u64 value) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Every thread gets the block's maximum.
__device__ u64 block_max(const SharedMemory& shared, u64 value) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(shared.warps[threadIdx.x % (kThreads / 32)]);
}

__device__ float block_sum(const SharedMemory& shared, float value) {
  float* sums = reinterpret_cast<float*>(shared.warps);
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < kThreads / 32; ++i) total += sums[i];
  return total;
}

// f(index in the slice) for this thread's ids, four neighbours at a time.
template <class Function>
__device__ __forceinline__ void for_own(const Place& at, Function f) {
  for (int group = threadIdx.x * 4; group < at.size; group += kThreads * 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (group + j < at.size) f(group + j);
    }
  }
}

__device__ __forceinline__ float raw_logit(const float* logits, u64 at) { return __ldcg(logits + at); }
__device__ __forceinline__ float raw_logit(const u16* logits, u64 at) {
  return bf16_to_float(__ldcg(logits + at));
}

__device__ __forceinline__ float4 raw_logits(const float* logits, u64 at) {
  return __ldcg(reinterpret_cast<const float4*>(logits + at));
}
__device__ __forceinline__ float4 raw_logits(const u16* logits, u64 at) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(logits + at));
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                     __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}

// The slice into shared memory; returns whether all of this thread's numbers are finite.
template <class Logit>
__device__ bool load_slice(const SamplingParams& p, const Place& at, const SharedMemory& shared) {
  const Logit* logits = static_cast<const Logit*>(p.logits);
  const u64 row = static_cast<u64>(at.row) * p.logits_stride + at.first;
  bool is_finite = true;
  for (int group = threadIdx.x * 4; group < at.size; group += kThreads * 4) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (group + 4 <= at.size) {
      v = raw_logits(logits, row + group);
    } else {
      v.x = raw_logit(logits, row + group);
      if (group + 1 < at.size) v.y = raw_logit(logits, row + group + 1);
      if (group + 2 < at.size) v.z = raw_logit(logits, row + group + 2);
    }
    is_finite = is_finite && isfinite(v.x) && isfinite(v.y) && isfinite(v.z) && isfinite(v.w);
    *reinterpret_cast<float4*>(shared.scores + group) = v;
  }
  return is_finite;
}

__device__ u64 best_of_slice(const Place& at, const SharedMemory& shared, u64 below) {
  u64 best = 0;
  for_own(at, [&](int i) {
    const u64 rank = rank_key(shared.scores[i], at.first + i);
    if (rank < below) best = max(best, rank);
  });
  return best;
}

// Peak, sum and best tokens of the raw logits of this slice.
__device__ void publish_raw(const Place& at, const SharedMemory& shared, int num_top) {
  u64 mine = best_of_slice(at, shared, ~0ull);
  u64 best = block_max(shared, mine);
  const float peak = value_of_rank(best);
  float sum = 0.f;
  for_own(at, [&](int i) { sum += expf(shared.scores[i] - peak); });
  sum = block_sum(shared, sum);
  if (threadIdx.x == 0) at.scratch->raw_peak[at.part] = peak, at.scratch->raw_sum[at.part] = sum;
  for (int i = 0; i < num_top; ++i) {
    if (threadIdx.x == 0) at.scratch->top[at.part][i] = best;
    if (mine == best) mine = best_of_slice(at, shared, best);
    best = block_max(shared, mine);
  }
}

// f(index in the slice, position in the list) for the listed ids of this slice.
template <class Function>
__device__ __forceinline__ void for_listed(const SamplingParams& p, const Place& at, int begin, int count,
                                           Function f) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int index = __ldcg(p.ids + begin + i) - at.first;
    if (index >= 0 && index < at.size) f(index, begin + i);
  }
}

__device__ void repeat_penalty(const SamplingParams& p, const SampleRow& row, const Place& at,
                               const SharedMemory& shared) {
  u32* seen = shared.count;  // one bit an id
  seen[threadIdx.x] = 0;
  __syncthreads();
  const auto mark = [&](int index, int) { atomicOr(seen + index / 32, 1u << index % 32); };
  for_listed(p, at, row.prompt_begin, row.prompt_count, mark);
  for_listed(p, at, row.generated_begin, row.generated_count, mark);
  __syncthreads();
  for (u32 bits = seen[threadIdx.x]; bits != 0; bits &= bits - 1) {
    float& score = shared.scores[threadIdx.x * 32 + __ffs(bits) - 1];
    score = score > 0.f ? __fdiv_rn(score, row.repetition) : __fmul_rn(score, row.repetition);
  }
  __syncthreads();
}

__device__ void adjust(const SamplingParams& p, const SampleRow& row, const Place& at,
                       const SharedMemory& shared) {
  const float lowest = __uint_as_float(0xff800000u);
  for_listed(p, at, row.bias_begin, row.bias_count,
             [&](int index, int i) { shared.scores[index] += __ldcg(p.values + i); });
  __syncthreads();
  for_listed(p, at, row.suppressed_begin, row.suppressed_count,
             [&](int index, int) { shared.scores[index] = lowest; });
  __syncthreads();
  if (row.has_mask && p.masks != nullptr) {
    const u32* mask = p.masks + static_cast<u64>(at.row) * p.mask_words;
    for_own(at, [&](int i) {
      const int id = at.first + i;
      if ((__ldcg(mask + id / 32) >> id % 32 & 1) == 0) shared.scores[i] = lowest;
    });
    __syncthreads();
  }
  if (row.repetition != 1.f) repeat_penalty(p, row, at, shared);
  if (row.presence != 0.f || row.frequency != 0.f) {
    for_listed(p, at, row.generated_begin, row.generated_count, [&](int index, int i) {
      const float penalty = __fadd_rn(row.presence, __fmul_rn(row.frequency, __ldcg(p.values + i)));
      shared.scores[index] = __fsub_rn(shared.scores[index], penalty);
    });
    __syncthreads();
  }
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The blocks of a row meet; what was written before is visible after. `met` counts the meetings.
__device__ void meet(const Place& at, u32& met) {
  ++met;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&at.scratch->arrived, 1);
    for (u32 spins = 0; load_acquire(&at.scratch->arrived) < met * at.parts; ++spins) {
      if (spins == kMaxSpins) __trap();
      __nanosleep(32);
    }
    __threadfence();
  }
  __syncthreads();
}

// Distance from the largest score in whole steps; equal scores have equal distances.
struct Distance {
  float peak, scale;
  __device__ __forceinline__ u32 operator()(float score) const {
    const float v = (peak - score) * scale;
    return v < 2047.f ? static_cast<u32>(v * kFraction) : kTail;
  }
};

__device__ __forceinline__ u64 mass_of(u32 distance) {
  return static_cast<u64>(expf(-(static_cast<float>(distance) * kNatsAStep)) * kUnitMass);
}

// Everything at a smaller distance, and the first `ties` at this one.
struct Cut {
  u32 distance, ties, all_ties;
  u64 mass;  // of the smaller distances
};

// Counts and masses by one digit of the distance, over those whose higher bits are `prefix`.
__device__ void add_histogram(const Place& at, const SharedMemory& shared, const Distance& distance,
                              int histogram, int shift, u32 prefix, u32& met) {
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) shared.count[i] = shared.low[i] = shared.high[i] = 0;
  __syncthreads();
  const int prefix_shift = shift == 0 ? 10 : shift + 11;
  const u32 digits = shift == 0 ? 0x3ff : 0x7ff;
  for_own(at, [&](int i) {
    const u32 d = distance(shared.scores[i]);
    if (d == kTail || (prefix_shift < 32 && d >> prefix_shift != prefix)) return;
    const u32 bucket = d >> shift & digits;
    const u64 mass = mass_of(d);
    atomicAdd(shared.count + bucket, 1);
    atomicAdd(shared.low + bucket, static_cast<u32>(mass) & 0x3ffffu);
    atomicAdd(shared.high + bucket, static_cast<u32>(mass >> 18));
  });
  __syncthreads();
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) {
    if (shared.count[i] == 0) continue;
    atomicAdd(&at.scratch->count[histogram][i], shared.count[i]);
    atomicAdd(&at.scratch->mass[histogram][i], (static_cast<u64>(shared.high[i]) << 18) + shared.low[i]);
  }
  meet(at, met);
}

struct Found {
  u32 bucket, count, count_before;
  u64 mass_before;
  u64 total_mass;
  bool is_there;
};

// The first bucket at which the running sum of counts (or masses) reaches `wanted`.
template <bool kByMass>
__device__ Found find_bucket(const Place& at, int histogram, u64 wanted) {
  __shared__ u64 masses[kThreads / 32];
  __shared__ u32 counts[kThreads / 32];
  __shared__ Found found;
  const int first = threadIdx.x * 4, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 count[4], count_sum = 0;
  u64 mass[4], mass_sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    count_sum += count[j] = __ldcg(&at.scratch->count[histogram][first + j]);
    mass_sum += mass[j] = __ldcg(&at.scratch->mass[histogram][first + j]);
  }
  u32 counts_to = count_sum;
  u64 masses_to = mass_sum;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 c = __shfl_up_sync(kAllLanes, counts_to, step);
    const u64 m = __shfl_up_sync(kAllLanes, masses_to, step);
    if (lane >= step) counts_to += c, masses_to += m;
  }
  __syncthreads();
  if (lane == 31) counts[warp] = counts_to, masses[warp] = masses_to;
  if (threadIdx.x == 0) found.is_there = false;
  __syncthreads();
  u32 count_before = counts_to - count_sum;
  u64 mass_before = masses_to - mass_sum, total_mass = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) count_before += counts[i], mass_before += masses[i];
    total_mass += masses[i];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const u64 before = kByMass ? mass_before : count_before;
    const u64 own = kByMass ? mass[j] : count[j];
    if (before < wanted && before + own >= wanted) {
      found = Found{static_cast<u32>(first + j), count[j], count_before, mass_before, 0, true};
    }
    count_before += count[j], mass_before += mass[j];
  }
  __syncthreads();
  Found result = found;
  result.total_mass = total_mass;
  return result;
}

// Exact position of the cut inside bucket `start` of the first histogram.
template <bool kByMass>
__device__ Cut refine_cut(const Place& at, const SharedMemory& shared, const Distance& distance, Found start,
                          u64 wanted, int histogram, u32& met) {
  u32 prefix = start.bucket;
  u64 count_before = start.count_before, mass_before = start.mass_before;
  Found found = start;
#pragma unroll 1
  for (int digit = 0; digit < 2; ++digit) {
    add_histogram(at, shared, distance, histogram + digit, digit == 0 ? 10 : 0, prefix, met);
    found = find_bucket<kByMass>(at, histogram + digit, wanted - (kByMass ? mass_before : count_before));
    prefix = prefix << (digit == 0 ? 11 : 10) | found.bucket;
    count_before += found.count_before, mass_before += found.mass_before;
  }
  u64 ties = wanted - count_before;
  if (kByMass) {
    const u64 mass = mass_of(prefix);
    ties = (wanted - mass_before + mass - 1) / mass;
  }
  return Cut{prefix, static_cast<u32>(ties), found.count, mass_before};
}

// top_k, then top_p of what is left; no cut: everything but the tail.
__device__ Cut find_cut(const SampleRow& row, const Place& at, const SharedMemory& shared,
                        const Distance& distance, u32& met) {
  Cut cut{kTail, 0, 0, 0};
  const bool has_top_p = row.top_p < 1.0;
  if (row.top_k == 0 && !has_top_p) return cut;
  add_histogram(at, shared, distance, 0, 21, 0, met);
  u64 mass = 0;
  if (row.top_k > 0) {
    const Found found = find_bucket<false>(at, 0, row.top_k);
    mass = found.total_mass;
    if (found.is_there) {
      cut = refine_cut<false>(at, shared, distance, found, row.top_k, 1, met);
      mass = cut.mass + cut.ties * mass_of(cut.distance);
    }
  }
  if (has_top_p) {
    if (row.top_k == 0) mass = find_bucket<true>(at, 0, 1).total_mass;
    const u64 wanted = max(1ull, static_cast<u64>(ceil(row.top_p * static_cast<double>(mass))));
    const Found found = find_bucket<true>(at, 0, min(wanted, mass));
    cut = refine_cut<true>(at, shared, distance, found, min(wanted, mass), 3, met);
  }
  return cut;
}

// The last id of this slice that still counts among the ties; -1: none of them.
__device__ int last_tied_id(const Place& at, const SharedMemory& shared, const Distance& distance,
                            const Cut& cut, u32& met) {
  __shared__ u32 counts[kThreads / 32];
  __shared__ int last;
  if (cut.ties >= cut.all_ties) return 0x7fffffff;
  // A thread takes neighbouring ids here, so that the order of threads is that of ids.
  const int run = (at.size + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * run, at.size), end = min(begin + run, at.size);
  u32 own = 0;
  for (int i = begin; i < end; ++i) own += distance(shared.scores[i]) == cut.distance;
  u32 up_to = own;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) counts[warp] = up_to;
  if (threadIdx.x == 0) last = -1;
  __syncthreads();
  u32 before = up_to - own, total = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += counts[i];
    total += counts[i];
  }
  if (threadIdx.x == 0) at.scratch->ties[at.part] = total;
  meet(at, met);
  u32 earlier = 0;
  for (int i = 0; i < at.part; ++i) earlier += __ldcg(&at.scratch->ties[i]);
  before += earlier;
  if (earlier + total <= cut.ties) return 0x7fffffff;
  if (before < cut.ties && before + own >= cut.ties) {
    u32 left = cut.ties - before;
    int i = begin;
    for (; left > 0; ++i) left -= distance(shared.scores[i]) == cut.distance;
    last = at.first + i - 1;
  }
  __syncthreads();
  return last;
}

// -log(-log(u)), u = (word + 1/2) / 2^32; near 1 from the distance to 1.
__device__ __forceinline__ float gumbel(u32 word) {
  const float from_zero = (static_cast<float>(word) + 0.5f) * 2.3283064e-10f;
  const float from_one = (static_cast<float>(~word) + 0.5f) * 2.3283064e-10f;
  return -logf(word < 0x80000000u ? -logf(from_zero) : -log1pf(-from_one));
}

struct Draw {
  double score;
  int id;
};

// f(id, score, random word) for this thread's survivors.
template <class Function>
__device__ __forceinline__ void for_survivors(const SampleRow& row, const Place& at, const SharedMemory& shared,
                                              const Distance& distance, const Cut& cut, int last_tied,
                                              float inverse_temperature, Function f) {
  for (int group = threadIdx.x * 4; group < at.size; group += kThreads * 4) {
    bool survives[4], any = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float score = group + j < at.size ? shared.scores[group + j] : __uint_as_float(0xff800000u);
      const u32 d = distance(score);
      survives[j] = d != kTail && (d < cut.distance || (d == cut.distance && at.first + group + j <= last_tied)) &&
                    expf((score - distance.peak) * inverse_temperature) >= row.min_p;
      any = any || survives[j];
    }
    if (!any) continue;
    const u32 block = (at.first + group) / 4;
    const uint4 words = philox_words(row.seed, make_uint4(row.position, block, row.purpose, 0));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (survives[j]) f(at.first + group + j, shared.scores[group + j], word_of(words, j));
    }
  }
}

__device__ Draw draw_from_slice(const SampleRow& row, const Place& at, const SharedMemory& shared,
                                const Distance& distance, const Cut& cut, int last_tied) {
  __shared__ Draw draws[kThreads / 32];
  const float inverse = static_cast<float>(1.0 / row.temperature);
  float best = __uint_as_float(0xff800000u);
  for_survivors(row, at, shared, distance, cut, last_tied, inverse, [&](int, float score, u32 word) {
    best = fmaxf(best, (score - distance.peak) * inverse + gumbel(word));
  });
  best = value_of_rank(block_max(shared, rank_key(best, 0)));
  Draw mine{-1e300, 0x7fffffff};
  const auto take = [&](double score, int id) {
    if (score > mine.score || (score == mine.score && id < mine.id)) mine = Draw{score, id};
  };
  for_survivors(row, at, shared, distance, cut, last_tied, inverse, [&](int id, float score, u32 word) {
    if ((score - distance.peak) * inverse + gumbel(word) < best - kWindow) return;
    const double gap = static_cast<double>(score) - static_cast<double>(distance.peak);
    take(gap / row.temperature + exact_gumbel(word), id);
  });
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const double score = __shfl_xor_sync(kAllLanes, mine.score, step);
    take(score, __shfl_xor_sync(kAllLanes, mine.id, step));
  }
  if (threadIdx.x % 32 == 0) draws[threadIdx.x / 32] = mine;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) take(draws[i].score, draws[i].id);
  return mine;
}

// Whether every block of the row has arrived; the last one to ask learns that it is.
__device__ bool is_last_to_finish(const Place& at) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&at.scratch->done, 1) == static_cast<u32>(at.parts - 1);
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

template <class Logit>
__device__ void write_logprobs(const SamplingParams& p, const SampleRow& row, const Place& at,
                               const SharedMemory& shared, int token) {
  float peak = __uint_as_float(0xff800000u);
  for (int i = 0; i < at.parts; ++i) peak = fmaxf(peak, __ldcg(&at.scratch->raw_peak[i]));
  double sum = 0.0;
  for (int i = 0; i < at.parts; ++i) {
    sum += static_cast<double>(__ldcg(&at.scratch->raw_sum[i])) *
           exp(static_cast<double>(__ldcg(&at.scratch->raw_peak[i])) - static_cast<double>(peak));
  }
  const double shift = static_cast<double>(peak) + log(sum);
  if (threadIdx.x == 0) {
    const u64 index = static_cast<u64>(at.row) * p.logits_stride + max(token, 0);
    const float raw = raw_logit(static_cast<const Logit*>(p.logits), index);
    p.logprobs[at.row] = static_cast<float>(static_cast<double>(raw) - shift);
  }
  const int candidates = at.parts * row.num_top;
  u64 below = ~0ull;
  for (int i = 0; i < row.num_top; ++i) {
    u64 mine = 0;
    for (int c = threadIdx.x; c < candidates; c += kThreads) {
      const u64 rank = __ldcg(&at.scratch->top[c / row.num_top][c % row.num_top]);
      if (rank < below) mine = max(mine, rank);
    }
    below = block_max(shared, mine);
    if (threadIdx.x == 0) {
      p.top_ids[at.row * kMaxTop + i] = id_of_rank(below);
      p.top_logprobs[at.row * kMaxTop + i] =
          static_cast<float>(static_cast<double>(value_of_rank(below)) - shift);
    }
  }
}

// Run by one block when all blocks of the row have published.
template <class Logit>
__device__ void finish(const SamplingParams& p, const SampleRow& row, const Place& at,
                       const SharedMemory& shared) {
  u64 best = 0;
  bool is_finite = true;
  Draw draw{-1e300, 0x7fffffff};
  for (int i = 0; i < at.parts; ++i) {
    best = max(best, __ldcg(&at.scratch->best[i]));
    is_finite = is_finite && __ldcg(&at.scratch->is_finite[i]) != 0;
    const double score = __ldcg(&at.scratch->drawn[i]);
    const int id = __ldcg(&at.scratch->drawn_id[i]);
    if (score > draw.score || (score == draw.score && id < draw.id)) draw = Draw{score, id};
  }
  int token = row.is_greedy ? id_of_rank(best) : draw.id;
  if (!is_finite || value_of_rank(best) == __uint_as_float(0xff800000u)) token = -1;
  if (threadIdx.x == 0) p.token_ids[at.row] = token, p.is_finite[at.row] = is_finite;
  if (row.num_top >= 0) write_logprobs<Logit>(p, row, at, shared, token);
  if (threadIdx.x == 0) at.scratch->arrived = at.scratch->done = 0;
  if (row.is_greedy || (row.top_k == 0 && row.top_p >= 1.0)) return;
  uint4* histograms = reinterpret_cast<uint4*>(at.scratch);
  constexpr int kVectors = kHistograms * kBuckets * 12 / 16;
  for (int i = threadIdx.x; i < kVectors; i += kThreads) histograms[i] = make_uint4(0, 0, 0, 0);
}

// The draw of a row that is not greedy; publishes this slice's candidate.
__device__ void publish_draw(const SampleRow& row, const Place& at, const SharedMemory& shared) {
  u32 met = 0;
  meet(at, met);
  u64 best = 0;
  bool is_finite = true;
  for (int i = 0; i < at.parts; ++i) {
    best = max(best, __ldcg(&at.scratch->best[i]));
    is_finite = is_finite && __ldcg(&at.scratch->is_finite[i]) != 0;
  }
  const float peak = value_of_rank(best);
  Draw draw{-1e300, 0x7fffffff};
  if (is_finite && peak > __uint_as_float(0xff800000u)) {
    const Distance distance{peak, static_cast<float>(kSteps / row.temperature)};
    const Cut cut = find_cut(row, at, shared, distance, met);
    const int last_tied = last_tied_id(at, shared, distance, cut, met);
    draw = draw_from_slice(row, at, shared, distance, cut, last_tied);
  }
  if (threadIdx.x == 0) at.scratch->drawn[at.part] = draw.score, at.scratch->drawn_id[at.part] = draw.id;
}

template <class Logit>
__device__ __forceinline__ void sample(const SamplingParams& p) {
  extern __shared__ __align__(16) u8 memory[];
  __shared__ u64 warps[kThreads / 32 + 1];
  allow_next_kernel();
  wait_for_previous_kernel();
  SharedMemory shared;
  shared.scores = reinterpret_cast<float*>(memory);
  shared.count = reinterpret_cast<u32*>(shared.scores + p.slice);
  shared.low = shared.count + kBuckets;
  shared.high = shared.low + kBuckets;
  shared.warps = warps;
  Place at;
  at.row = p.first_row + blockIdx.y;
  at.part = blockIdx.x, at.parts = gridDim.x;
  at.first = at.part * p.slice;
  at.size = min(p.slice, p.num_valid_ids - at.first);
  at.scratch = reinterpret_cast<RowScratch*>(p.scratch) + blockIdx.y;
  const SampleRow row = p.rows[at.row];
  const bool is_finite = __syncthreads_and(load_slice<Logit>(p, at, shared));
  if (threadIdx.x == 0) at.scratch->is_finite[at.part] = is_finite;
  if (row.num_top >= 0) publish_raw(at, shared, row.num_top);
  adjust(p, row, at, shared);
  const u64 best = block_max(shared, best_of_slice(at, shared, ~0ull));
  if (threadIdx.x == 0) at.scratch->best[at.part] = best;
  if (!row.is_greedy) publish_draw(row, at, shared);
  if (is_last_to_finish(at)) finish<Logit>(p, row, at, shared);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sampling_f32(const SamplingParams p) { sample<float>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sampling_bf16(const SamplingParams p) { sample<u16>(p); }
