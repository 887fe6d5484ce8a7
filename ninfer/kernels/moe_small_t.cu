// moe_small_t: a mixture of experts for few tokens, in three kernels.
//
// Contract: ninfer/ops/moe_small_t.py. Entries, one a format each:
//   moe_router_product   x = norm(hidden); router logits; the shared expert's gate
//   moe_gate_up          silu(gate x) * up x of the shared expert and of every expert in use
//   moe_down             hidden + the gated shared expert + the weighted experts in ascending order
//
// The last two work out the experts in use from the logits, every block for itself: that is less
// than another kernel, or a wait of blocks for one another, would take. moe_gate_up lets the next
// kernel start only behind its own wait: moe_down may then read the logits, and so its weights,
// before moe_gate_up has ended.
//
// Work is cut into tiles of 16 rows of a matrix. A block's eight warps share a tile along K. Every
// warp has a ring of its own in shared memory for parts of weights, six of them on their way, across
// tiles; a lane reads what it has copied itself. (Loads into registers would not do: the compiler
// makes the first use wait for all of them.) Products run on tensor cores with pairs as columns;
// partial sums meet in shared memory and are added in a fixed order. So what is added in which order
// for a token depends on its own experts and the shapes alone. Bytes: the weights of the experts in
// use, once.

#include "dtypes.cuh"
#include "expert_matrix.cuh"
#include "moe_routing.cuh"
#include "normalise.cuh"
#include "packed_tiles.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = kWarps * 32;
constexpr int kDownSlices = 4;  // warps that share an expert's tile in moe_down
constexpr int kDownEntries = kWarps / kDownSlices;

struct RouterProductParams {
  ExpertMatrix router;
  const u16* x;              // [T, C] bf16
  const float* square_sums;  // [T, S] of x
  const u16* norm_weight;    // [C] bf16
  const u16* gate;           // [C] bf16 or null
  u16* y;                    // [T, C] bf16, normalised x
  float* logits;             // [T, E]
  float* shared_gate;        // [T]
  int tokens, num_square_sums, x_stride, logits_stride;
  float norm_eps, norm_offset;
};
static_assert(sizeof(RouterProductParams) == 128, "ninfer/ops/moe_small_t.py mirrors this struct");

struct ExpertParams {
  ExpertMatrix routed, shared;
  RoutingParams routing;
  const u16* x;              // gate_up: [T, C]; down: [P, I] by sorted position
  const u16* x_shared;       // down: [T, I of the shared expert]
  u16* y;                    // gate_up: [P, I]; down: [T, C]
  u16* y_shared;             // gate_up: [T, I of the shared expert]
  const u16* residual;       // [T, C]
  const float* shared_gate;  // [T]
  const u16* shared_output;  // [T, C] bf16 or null: the shared expert's, when it was computed apart
  float* square_sums;        // [T, ceil(C / 32)] or null: zeroed by gate_up, of y by down
  int tokens, has_shared, x_stride, y_stride, residual_stride, columns;
};
static_assert(sizeof(ExpertParams) == 208, "ninfer/ops/moe_small_t.py mirrors this struct");

__device__ __forceinline__ ExpertMatrix matrix_of(const ExpertParams& p, bool is_shared) {
  const ExpertMatrix& a = p.shared;
  const ExpertMatrix& b = p.routed;
  return ExpertMatrix{is_shared ? a.images : b.images,
                is_shared ? a.row_scales : b.row_scales,
                is_shared ? a.image_bytes : b.image_bytes,
                {is_shared ? a.shape.rows : b.shape.rows, is_shared ? a.shape.columns : b.shape.columns,
                 is_shared ? a.shape.units_per_block : b.shape.units_per_block,
                 is_shared ? a.shape.row_blocks : b.shape.row_blocks,
                 is_shared ? a.shape.strips_per_block : b.shape.strips_per_block,
                 is_shared ? a.shape.last_strips : b.shape.last_strips}};
}

__device__ __forceinline__ float silu(float gate) { return gate / (1.f + __expf(-gate)); }

// ---- router ----

template <class Format>
__device__ __forceinline__ void normalise_run(Run<Format>& run, const RouterProductParams& p, int part, u32 norm_weight,
                                              float scale, int lane) {
#pragma unroll
  for (int v = 0; v < kRunVectors<Format>; ++v) {
    const int column = run_column<Format>(part, v, lane);
    if (column >= p.router.shape.columns) continue;
    run.vectors[v] = normalised(run.vectors[v], load_shared_16(norm_weight + column * 2), scale, p.norm_offset);
  }
}

// Logits of 16 experts.
template <class Format>
__device__ __forceinline__ void router_tile(const RouterProductParams& p, int tile, u32 norm_weight,
                                            float (&scales)[kRoutedTokens], Exchange& exchange) {
  constexpr int kEarly = 8 / kRunVectors<Format>;     // parts of weights that do not wait for x
  constexpr int kLoaded = 4 / kRunVectors<Format>;    // parts of x that do not wait for its norm
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = p.router.shape.columns;
  const int parts = num_parts<Format>(columns);
  const TileSource<Format> source(p.router, 0, tile, lane);
  Chunk<Format> weights[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    if (warp + i * kWarps < parts) source.load(weights[i], warp + i * kWarps);
  }
  for (int v = threadIdx.x; v < columns / 8; v += kThreads) {
    copy_shared_16(norm_weight + v * 16, p.norm_weight + v * 8, true);
  }
  copy_shared_wait();
  wait_for_previous_kernel();
  const u16* first_x = p.x + static_cast<u64>(min(lane / 4, p.tokens - 1)) * p.x_stride;
  Batch<Format, kLoaded> loaded;
  loaded.load(first_x, columns, warp, kWarps, lane);
  for (int t = warp; t < p.tokens; t += kWarps) {
    const float* sums = p.square_sums + static_cast<u64>(t) * p.num_square_sums;
    const float scale = inverse_rms(sums, p.num_square_sums, columns, p.norm_eps, lane);
    if (lane == 0) scales[t] = scale;
  }
  __syncthreads();
  Sums sums;
  sums.clear();
  for (int first = warp; first < parts; first += kWarps * kEarly) {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      const int part = first + i * kWarps;
      if (part >= parts) break;
      if (first > warp) source.load(weights[i], part);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half * 8 >= p.tokens) break;
        const int t = min(half * 8 + lane / 4, p.tokens - 1);
        Run<Format> run;
        if (half == 0 && first == warp && i < kLoaded) {
          run = loaded.runs[i];
        } else {
          load_run(run, p.x + static_cast<u64>(t) * p.x_stride, columns, part, lane);
        }
        normalise_run(run, p, part, norm_weight, scales[t], lane);
        multiply_chunk(weights[i], run, tile, sums.at[half]);
      }
    }
  }
  scale_rows<Format>(source.load_scales(), sums);
  exchange.give(0, warp, lane, sums, p.tokens > 8);
  __syncthreads();
  const int t = threadIdx.x / 16, row = threadIdx.x % 16, expert = tile * 16 + row;
  if (t >= p.tokens || expert >= p.router.shape.rows) return;
  float logit = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) logit += exchange.take(0, i, row, t);
  p.logits[static_cast<u64>(t) * p.logits_stride + expert] = logit;
}

__device__ __forceinline__ float dot(uint4 x, uint4 w) {
  const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {w.x, w.y, w.z, w.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16);
    sum += __uint_as_float(a[i] & 0xffff0000u) * __uint_as_float(b[i] & 0xffff0000u);
  }
  return sum;
}

// Token t, normalised, and the shared expert's gate of it.
__device__ __forceinline__ void normalise_token(const RouterProductParams& p, int t, Exchange& exchange) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = p.router.shape.columns;
  wait_for_previous_kernel();
  const uint4* x = reinterpret_cast<const uint4*>(p.x + static_cast<u64>(t) * p.x_stride);
  const int vectors = columns / 8;
  uint4 next = threadIdx.x < vectors ? __ldcg(x + threadIdx.x) : make_uint4(0, 0, 0, 0);
  const float* square_sums = p.square_sums + static_cast<u64>(t) * p.num_square_sums;
  const float scale = inverse_rms(square_sums, p.num_square_sums, columns, p.norm_eps, lane);
  float sum = 0.f;
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    const uint4 weight = __ldg(reinterpret_cast<const uint4*>(p.norm_weight) + v);
    const uint4 y = normalised(next, weight, scale, p.norm_offset);
    if (v + kThreads < vectors) next = __ldcg(x + v + kThreads);
    reinterpret_cast<uint4*>(p.y + static_cast<u64>(t) * columns)[v] = y;
    if (p.gate != nullptr) sum += dot(y, __ldg(reinterpret_cast<const uint4*>(p.gate) + v));
  }
  if (p.gate == nullptr) return;
  sum = warp_sum(sum);
  float* sums = &exchange.sums[0][0][0][0][0];
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += sums[i];
  p.shared_gate[t] = 1.f / (1.f + expf(-total));
}

template <class Format>
__device__ __forceinline__ void router_product(const RouterProductParams& p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Exchange exchange;
  __shared__ float scales[kRoutedTokens];
  allow_next_kernel();
  const int tiles = (p.router.shape.rows + 15) / 16, block = blockIdx.x;
  if (block < tiles) {
    router_tile<Format>(p, block, shared_address(memory), scales, exchange);
  } else {
    normalise_token(p, block - tiles, exchange);
  }
}

// ---- gate and up ----

// A tile of the list: those of the shared expert, then those of the experts in use.
struct Item {
  bool is_shared;
  int entry, tile;
};

template <class Format>
struct GateUp {
  const ExpertParams& p;
  const Routing& routing;
  int shared_tiles, tiles, lane, warp;
  u32 inverse_tiles;  // 2^32 / tiles, rounded up: exact for as many items as there can be

  __device__ __forceinline__ Item item(int index) const {
    if (index < shared_tiles) return Item{true, 0, index};
    const int routed = index - shared_tiles, entry = tiles == 1 ? routed : __umulhi(routed, inverse_tiles);
    return Item{false, entry, routed - entry * tiles};
  }

  __device__ __forceinline__ TileSource<Format> source(int index) const {
    const Item one = item(index);
    return TileSource<Format>(matrix_of(p, one.is_shared), one.is_shared ? 0 : routing.expert_of[one.entry], one.tile,
                              lane);
  }

  __device__ __forceinline__ int count(const Item& one) const {
    return one.is_shared ? p.tokens : routing.start[one.entry + 1] - routing.start[one.entry];
  }

  // The lane's row of x; columns past the last repeat it and are never stored.
  __device__ __forceinline__ const u16* x_row(const Item& one, int first) const {
    const int column = min(first + lane / 4, count(one) - 1);
    const int t = one.is_shared ? column : routing.token_at[routing.start[one.entry] + column];
    return p.x + static_cast<u64>(t) * p.x_stride;
  }

  // Gates are rows 0..7 of a tile, their ups rows 8..15.
  __device__ __forceinline__ void store(const Exchange& exchange, int turn, const Item& one) const {
    const int column = threadIdx.x / 8, row = threadIdx.x % 8;
    if (column >= count(one)) return;
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      gate += exchange.take(turn, i, row, column);
      up += exchange.take(turn, i, row + 8, column);
    }
    const int width = (one.is_shared ? p.shared.shape.rows : p.routed.shape.rows) / 2;
    u16* y = one.is_shared ? p.y_shared : p.y + static_cast<u64>(routing.start[one.entry]) * width;
    y[static_cast<u64>(column) * width + one.tile * 8 + row] = float_to_bf16(silu(gate) * up);
  }
};

__device__ __forceinline__ void clear_masks(Routing& routing) {
  for (int i = threadIdx.x; i < kMaxExperts; i += kThreads) routing.masks[i] = 0;
  __syncthreads();
}

__device__ __forceinline__ void clear_square_sums(const ExpertParams& p) {
  if (p.square_sums == nullptr) return;
  const int count = p.tokens * ((p.columns + 31) / 32);
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) p.square_sums[i] = 0.f;
}

template <class Format>
__device__ __forceinline__ void gate_up(const ExpertParams& p) {
  constexpr int kBatch = 8 / kRunVectors<Format>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  __shared__ Exchange exchange;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = gridDim.x;
  const int columns = p.routed.shape.columns, parts = num_parts<Format>(columns), tiles = p.routed.shape.rows / 16;
  const GateUp<Format> work{p, routing, p.has_shared ? p.shared.shape.rows / 16 : 0, tiles, lane, warp,
                            0xffffffffu / tiles + 1};
  Ring<Format> ring(shared_address(memory), warp, lane);
  TileSource<Format> source;
  int ahead = blockIdx.x, ahead_part = warp, items = work.shared_tiles;
  const auto copy_ahead = [&]() {
    if (ahead < items && warp < parts) {
      if (ahead_part == warp) source = work.source(ahead);
      ring.copy(source, ahead_part);
      ahead_part += kWarps;
      if (ahead_part >= parts) ahead_part = warp, ahead += step;
    }
  };
  int groups = 0;
  for (; groups < Ring<Format>::kStages && ahead < items; ++groups) copy_ahead(), ring.commit();
  clear_masks(routing);
  wait_for_previous_kernel();
  allow_next_kernel();
  build_routing<kThreads>(routing, p.routing, p.tokens);
  items = work.shared_tiles + routing.num_entries * tiles;
  for (; groups < Ring<Format>::kStages; ++groups) copy_ahead(), ring.commit();
  clear_square_sums(p);
  Batch<Format, kBatch> x;
  if (static_cast<int>(blockIdx.x) < items) {
    x.load(work.x_row(work.item(blockIdx.x), 0), columns, warp, kWarps, lane);
  }
  int turn = 0;
  for (int index = blockIdx.x; index < items; index += step) {
    const Item item = work.item(index);
    const bool has_second = work.count(item) > 8;
    float2 scales = make_float2(1.f, 1.f);
    if constexpr (Format::kHasRowScale) scales = work.source(index).load_scales();
    Sums sums;
    sums.clear();
    for (int first = warp; first < parts; first += kWarps * kBatch) {
      if (first > warp) x.load(work.x_row(item, 0), columns, first, kWarps, lane);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = first + i * kWarps;
        if (part >= parts) break;
        Chunk<Format> weights;
        ring.take(weights);
        multiply_chunk(weights, x.runs[i], item.tile, sums.at[0]);
        if (has_second) {
          Run<Format> second;
          load_run(second, work.x_row(item, 8), columns, part, lane);
          multiply_chunk(weights, second, item.tile, sums.at[1]);
        }
        copy_ahead();
        ring.commit();
      }
    }
    if (index + step < items) x.load(work.x_row(work.item(index + step), 0), columns, warp, kWarps, lane);
    scale_rows<Format>(scales, sums);
    exchange.give(turn, warp, lane, sums, has_second);
    __syncthreads();
    if (threadIdx.x < 8 * kRoutedTokens) work.store(exchange, turn, item);
    turn ^= 1;
  }
}

// ---- down ----

// Entry 0 is the shared expert, if there is one; a round takes kDownEntries entries.
template <class Format>
struct Down {
  const ExpertParams& p;
  const Routing& routing;
  int entries, lane;

  __device__ __forceinline__ bool is_shared(int entry) const { return p.has_shared && entry == 0; }
  __device__ __forceinline__ int routed(int entry) const { return entry - (p.has_shared ? 1 : 0); }

  __device__ __forceinline__ int columns(int entry) const {
    return is_shared(entry) ? p.shared.shape.columns : p.routed.shape.columns;
  }

  __device__ __forceinline__ int count(int entry) const {
    return is_shared(entry) ? p.tokens : routing.start[routed(entry) + 1] - routing.start[routed(entry)];
  }

  __device__ __forceinline__ const u16* x_row(int entry, int first) const {
    const int column = min(first + lane / 4, count(entry) - 1), width = columns(entry);
    const u16* x = is_shared(entry) ? p.x_shared : p.x + static_cast<u64>(routing.start[routed(entry)]) * width;
    return x + static_cast<u64>(column) * width;
  }

  // Of output row n, for formats that have it.
  __device__ __forceinline__ float row_scale(int entry, int n) const {
    if (!Format::kHasRowScale || entry >= entries) return 1.f;
    if (is_shared(entry)) return __ldg(p.shared.row_scales + n);
    return __ldg(p.routed.row_scales + static_cast<u64>(routing.expert_of[routed(entry)]) * p.columns + n);
  }

  // This thread's row and token, of one entry: its warps in order, weighted.
  __device__ __forceinline__ float add(const Exchange& exchange, int turn, int entry, int row, int t, float gate) const {
    float weight = gate;
    int column = t;
    if (!is_shared(entry)) {
      const u32 mask = routing.masks[routing.expert_of[routed(entry)]];
      if ((mask >> t & 1) == 0) return 0.f;
      column = tokens_before(mask, t);
      weight = routing.weights[routing.start[routed(entry)] + column];
    }
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kDownSlices; ++i) {
      sum += exchange.take(turn, entry % kDownEntries * kDownSlices + i, row, column);
    }
    return weight * sum;
  }
};

template <class Format>
__device__ __forceinline__ void store_down(const ExpertParams& p, int t, int n, float value) {
  const u16 rounded = float_to_bf16(value);
  if (t < p.tokens) p.y[static_cast<u64>(t) * p.y_stride + n] = rounded;
  if (p.square_sums == nullptr) return;
  float squares = bf16_to_float(rounded) * bf16_to_float(rounded);
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) squares += __shfl_xor_sync(kAllLanes, squares, step);
  // Two tiles share a sum that was zero: their order does not matter.
  if (t < p.tokens && n % 16 == 0) atomicAdd(p.square_sums + t * ((p.columns + 31) / 32) + n / 32, squares);
}

template <class Format>
__device__ __forceinline__ void down(const ExpertParams& p) {
  constexpr int kBatch = 4 / kRunVectors<Format>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  __shared__ Exchange exchange;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
  const int group = warp / kDownSlices, slice = warp % kDownSlices;
  clear_masks(routing);
  // The logits are older than the kernel before this one, which waited for them.
  build_routing<kThreads>(routing, p.routing, p.tokens);
  const int entries = routing.num_entries + (p.has_shared ? 1 : 0);
  const Down<Format> work{p, routing, entries, lane};
  const TileSource<Format> first_expert(p.routed, 0, tile, lane);
  Ring<Format> ring(shared_address(memory), warp, lane);
  TileSource<Format> source;
  int ahead = group, ahead_part = slice, ahead_parts = 0;
  const auto copy_ahead = [&]() {
    while (ahead < entries) {
      if (ahead_part == slice) {
        ahead_parts = num_parts<Format>(work.columns(ahead));
        source = work.is_shared(ahead) ? TileSource<Format>(p.shared, 0, tile, lane)
                                       : first_expert.at(p.routed, routing.expert_of[work.routed(ahead)]);
      }
      const int part = ahead_part;
      ahead_part += kDownSlices;
      if (ahead_part >= ahead_parts) ahead_part = slice, ahead += kDownEntries;
      if (part < ahead_parts) {
        ring.copy(source, part);
        return;
      }
    }
  };
#pragma unroll 1
  for (int i = 0; i < Ring<Format>::kStages; ++i) copy_ahead(), ring.commit();
  const int t = threadIdx.x / 16, row = threadIdx.x % 16, n = tile * 16 + row;
  float scales[kDownEntries];
#pragma unroll
  for (int i = 0; i < kDownEntries; ++i) scales[i] = work.row_scale(i, n);
  wait_for_previous_kernel();
  allow_next_kernel();
  float gate = 0.f, value = 0.f;
  if (t < p.tokens) {
    if (p.has_shared || p.shared_output != nullptr) gate = __ldcg(p.shared_gate + t);
    value = bf16_to_float(__ldcg(p.residual + static_cast<u64>(t) * p.residual_stride + n));
    if (p.shared_output != nullptr) {
      value += gate * bf16_to_float(__ldcg(p.shared_output + static_cast<u64>(t) * p.columns + n));
    }
  }
  Batch<Format, kBatch> x;
  if (group < entries) x.load(work.x_row(group, 0), work.columns(group), slice, kDownSlices, lane);
  int turn = 0;
#pragma unroll 1
  for (int round = 0; round < entries; round += kDownEntries) {
    const int entry = round + group, following = entry + kDownEntries;
    bool has_second = false;
    Sums sums;
    sums.clear();
    if (entry < entries) {
      const int columns = work.columns(entry), parts = num_parts<Format>(columns);
      has_second = work.count(entry) > 8;
      for (int first = slice; first < parts; first += kDownSlices * kBatch) {
        if (first > slice) x.load(work.x_row(entry, 0), columns, first, kDownSlices, lane);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int part = first + i * kDownSlices;
          if (part >= parts) break;
          Chunk<Format> weights;
          ring.take(weights);
          multiply_chunk(weights, x.runs[i], tile, sums.at[0]);
          if (has_second) {
            Run<Format> second;
            load_run(second, work.x_row(entry, 8), columns, part, lane);
            multiply_chunk(weights, second, tile, sums.at[1]);
          }
          copy_ahead();
          ring.commit();
        }
      }
    }
    if (following < entries) x.load(work.x_row(following, 0), work.columns(following), slice, kDownSlices, lane);
    exchange.give(turn, warp, lane, sums, has_second);
    __syncthreads();
    if (t < p.tokens) {
#pragma unroll
      for (int i = 0; i < kDownEntries; ++i) {
        if (round + i < entries) value += scales[i] * work.add(exchange, turn, round + i, row, t, gate);
        scales[i] = work.row_scale(round + kDownEntries + i, n);
      }
    }
    turn ^= 1;
  }
  store_down<Format>(p, t, n, value);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_router_product_bf16(const RouterProductParams p) { router_product<ImageBf16>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_router_product_fp8_row(const RouterProductParams p) { router_product<ImageE4m3Row>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_router_product_fp8_block(const RouterProductParams p) { router_product<ImageE4m3Block>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_router_product_nvfp4(const RouterProductParams p) { router_product<ImageE2m1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_gate_up_bf16(const ExpertParams p) { gate_up<ImageBf16>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_gate_up_fp8_row(const ExpertParams p) { gate_up<ImageE4m3Row>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_gate_up_fp8_block(const ExpertParams p) { gate_up<ImageE4m3Block>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_gate_up_nvfp4(const ExpertParams p) { gate_up<ImageE2m1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_down_bf16(const ExpertParams p) { down<ImageBf16>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_down_fp8_row(const ExpertParams p) { down<ImageE4m3Row>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_down_fp8_block(const ExpertParams p) { down<ImageE4m3Block>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_down_nvfp4(const ExpertParams p) { down<ImageE2m1>(p); }
