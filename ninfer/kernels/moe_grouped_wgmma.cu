// moe_grouped_wgmma: products of routed experts for many tokens, on 9.0's tensor cores.
//
// Contract: ninfer/ops/moe_grouped.py; entries as in moe_grouped.cu, which they stand in for. Four
// warps multiply 64 rows: weights turn into fragments in registers as they come from the packed
// image, x lies in shared memory. A fragment holds columns in the order in which the image packs
// them, so x's pairs of columns are put into that order while they are copied. A stage's products
// run while the next stage's fragments are made. Few tokens take narrower products.

#include "copy_groups.cuh"
#include "moe_grouped.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "wgmma.cuh"

namespace {

using Tiles = Tiling<512, 256>;
constexpr int kThreads = Tiles::kThreads;
constexpr int kTileAlignment = 1024;

template <class Format>
constexpr int kStages = Format::kPartColumns == 32 ? 4 : 6;
template <class Format>
constexpr int kAhead = kStages<Format> - 1;  // stages on their way or waiting, behind the one that is multiplied

template <class Format>
constexpr u32 kStageBytes = (StageShape<Format, Tiles>::kBytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;

// Where pair `pair` of a stage's columns goes: product m of 16 columns takes pairs 2m and 2m + 1 of
// each lane's run, first those of all lanes, then these.
template <class Format>
__device__ __forceinline__ int place_of_pair(int pair) {
  constexpr int kRunPairs = Format::kRun / 2;
  const int run = pair / kRunPairs, within = pair % kRunPairs;
  return run / 4 * (4 * kRunPairs) + within / 2 * 8 + within % 2 * 4 + run % 4;
}

// kTokens rows of x, a pair of columns a lane. Rows that are not there repeat the last one.
template <class Format, int kTokens>
__device__ __forceinline__ void load_x(const GroupedParams& p, const Sources<Tiles>& sources, u32 tile, int index) {
  constexpr int kWarps = kThreads / 32;
  const int thread = opaque(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int place = place_of_pair<Format>(lane), column = index * kStageColumns + lane * 2;
  const bool is_column = column < p.experts.shape.columns;
  const u16* x = p.x + (is_column ? column : 0);
  const u32 to = tile + warp * kRowBytes + (place / 4 ^ warp % 8) * 16 + place % 4 * 4;
#pragma unroll
  for (int i = 0; i < kTokens / kWarps; ++i) {
    copy_shared_4(to + i * kWarps * kRowBytes, x + static_cast<u64>(sources.rows[i * kWarps + warp]) * p.x_stride,
                  is_column);
  }
}

// A stage's weights of one warp, 16 rows by 64 columns, as they are packed.
template <class Format>
struct Words {
  static constexpr int kVectors = Format::kPartColumns == 32 ? 4 : Format::kPartColumns == 64 ? 2 : 1;
  uint4 vectors[kVectors];
  uint2 slab;

  __device__ __forceinline__ void load(u32 stage, int warp, int lane) {
    const u32 weights = stage + kXBytes, slabs = weights + StageShape<Format, Tiles>::kWeightBytes;
    const u32 at = weights + warp / 2 * StageShape<Format, Tiles>::kStripBytes + warp % 2 * 512 + lane * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = load_shared_16(at + i * 1024);
    if constexpr (Format::kUnitSlab > 0) slab = load_shared_8(slabs + warp / 2 * 8);
    if constexpr (Format::kPartSlab > 0) slab = load_shared_8(slabs + warp / 2 * 256 + lane * 8);
  }
};

// Fragments of a stage's four products. The tensor cores read these registers, so they may be
// written only when no product runs: for bf16 too the words go through an operation (with `zero`)
// that the compiler cannot do earlier.
__device__ __forceinline__ void make_fragments(ImageBf16, const Words<ImageBf16>& w, int, int, u32 zero, uint4 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("xor.b32 %0, %4, %8; xor.b32 %1, %5, %8; xor.b32 %2, %6, %8; xor.b32 %3, %7, %8;"
                 : "=r"(a[i].x), "=r"(a[i].y), "=r"(a[i].z), "=r"(a[i].w)
                 : "r"(w.vectors[i].x), "r"(w.vectors[i].y), "r"(w.vectors[i].z), "r"(w.vectors[i].w), "r"(zero)
                 : "memory");
  }
}

__device__ __forceinline__ void make_fragments(ImageE4m3Row, const Words<ImageE4m3Row>& w, int, int, u32, uint4 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for_e4m3_fragments(w.vectors[i], [&](int m, uint4 fragment) { a[i * 2 + m] = fragment; });
  }
}

__device__ __forceinline__ void make_fragments(ImageE4m3Block, const Words<ImageE4m3Block>& w, int, int, u32,
                                               uint4 (&a)[4]) {
  const float low = __uint_as_float(w.slab.x), high = __uint_as_float(w.slab.y);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for_e4m3_fragments(w.vectors[i], [&](int m, uint4 f) {
      a[i * 2 + m] =
          make_uint4(scaled_pair(f.x, low), scaled_pair(f.y, high), scaled_pair(f.z, low), scaled_pair(f.w, high));
    });
  }
}

__device__ __forceinline__ void make_fragments(ImageE2m1, const Words<ImageE2m1>& w, int half, int tile, u32,
                                               uint4 (&a)[4]) {
  for_e2m1_fragments(w.vectors[0], half == 0 ? w.slab.x : w.slab.y, tile, [&](int m, uint4 f) { a[m] = f; });
}

template <class Format, bool kIsGated, int kTokens>
__device__ __forceinline__ void multiply(const GroupedParams& p, const Sources<Tiles>& sources, u32 ring, int expert,
                                         int row_tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stages = (p.experts.shape.columns + kStageColumns - 1) / kStageColumns;
  const WeightLoader<Format, Tiles> weights(p, sources);
#pragma unroll
  for (int s = 0; s < kAhead<Format>; ++s) {
    if (s < stages) {
      load_x<Format, kTokens>(p, sources, ring + s * kStageBytes<Format>, s);
      weights.load(ring + s * kStageBytes<Format> + kXBytes, s);
    }
    copy_group_commit();
  }
  float sums[kTokens / 8][4];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) (&sums[0][0])[i] = 0.f;
  u32 slot = ring, free_slot = ring + kAhead<Format> * kStageBytes<Format>;
  const u32 end = ring + kStages<Format> * kStageBytes<Format>;
  const u32 zero = p.padding;
  Words<Format> words;
  uint4 a[4];
  copy_group_wait<kAhead<Format> - 1>();
  wgmma_publish();
  __syncthreads();
  words.load(slot, warp, lane);
  make_fragments(Format{}, words, 0, warp % 2, zero, a);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_bf16(sums, a[i], wgmma_tile(slot, i));
    wgmma_commit();
    slot = slot + kStageBytes<Format> == end ? ring : slot + kStageBytes<Format>;
    copy_group_wait<kAhead<Format> - 2>();
    wgmma_publish();
    __syncthreads();
    if (s + kAhead<Format> < stages) {
      load_x<Format, kTokens>(p, sources, free_slot, s + kAhead<Format>);
      weights.load(free_slot + kXBytes, s + kAhead<Format>);
    }
    copy_group_commit();
    free_slot = free_slot + kStageBytes<Format> == end ? ring : free_slot + kStageBytes<Format>;
    // Behind the last stage these are old bytes, and nobody multiplies them.
    words.load(slot, warp, lane);
    wgmma_wait<0>();
    make_fragments(Format{}, words, (s + 1) % 2, warp % 2, zero, a);
  }
  copy_group_wait<0>();
  __syncthreads();
  give_results<Format, Tiles, kIsGated>(p, ring, expert, row_tile, warp, 0, lane, sums);
}

template <class Format, bool kIsGated>
__device__ __forceinline__ void grouped(const GroupedParams& p) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ Sources<Tiles> sources;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row_tile = blockIdx.x;
  if (static_cast<int>(blockIdx.y) >= __ldcg(p.num_tiles)) return;
  const int2 place = __ldcg(p.tiles + blockIdx.y);
  const int expert = place.x, first = place.y;
  const int count = min(__ldcg(p.offsets + expert + 1) - first, kTileTokens);
  const u32 ring = (shared_address(memory) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  find_sources<Format>(sources, p, expert, row_tile, first, count);
  if (count > 64) {
    multiply<Format, kIsGated, 128>(p, sources, ring, expert, row_tile);
  } else if (count > 32) {
    multiply<Format, kIsGated, 64>(p, sources, ring, expert, row_tile);
  } else {
    multiply<Format, kIsGated, 32>(p, sources, ring, expert, row_tile);
  }
  __syncthreads();
  store_results<Tiles, kIsGated>(p, ring, row_tile, first, count);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_gate_up_bf16(const GroupedParams p) { grouped<ImageBf16, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_gate_up_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_gate_up_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_gate_up_nvfp4(const GroupedParams p) { grouped<ImageE2m1, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_down_bf16(const GroupedParams p) { grouped<ImageBf16, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_down_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_down_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_grouped_wgmma_down_nvfp4(const GroupedParams p) { grouped<ImageE2m1, false>(p); }
