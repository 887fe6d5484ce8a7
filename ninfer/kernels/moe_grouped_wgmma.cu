// moe_grouped_wgmma: products of routed experts for many tokens, on 9.0's tensor cores.
//
// Contract: ninfer/ops/moe_grouped.py; entries as in moe_grouped.cu, which they stand in for. Four
// warps multiply 64 rows: weights turn into fragments in registers as they come from the packed
// image, x lies in shared memory. A fragment holds columns in the order in which the image packs
// them, so x's pairs of columns are put into that order while they are copied. Few tokens take
// narrower products.

#include "copy_groups.cuh"
#include "moe_grouped.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kTileAlignment = 1024;

template <class Format>
constexpr u32 kStageBytes = (StageShape<Format>::kBytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;

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
__device__ __forceinline__ void load_x(const GroupedParams& p, const Sources& sources, u32 tile, int index) {
  constexpr int kWarps = kThreads / 32;
  const int thread = opaque(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int place = place_of_pair<Format>(lane), column = index * kStageColumns + lane * 2;
  const bool is_column = column < p.experts.shape.columns;
  const u16* x = p.x + (is_column ? column : 0);
  const u32 to = tile + warp * kRowBytes + (place / 4 ^ warp) * 16 + place % 4 * 4;
#pragma unroll
  for (int i = 0; i < kTokens / kWarps; ++i) {
    copy_shared_4(to + i * kWarps * kRowBytes, x + static_cast<u64>(sources.rows[i * kWarps + warp]) * p.x_stride,
                  is_column);
  }
}

template <class Format, bool kIsGated, int kTokens>
__device__ __forceinline__ void multiply(const GroupedParams& p, const Sources& sources, u32 ring, int expert,
                                         int row_tile) {
  using Shape = StageShape<Format>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stages = (p.experts.shape.columns + kStageColumns - 1) / kStageColumns;
  const WeightLoader<Format> weights(p, sources);
#pragma unroll
  for (int s = 0; s < Shape::kStages - 1; ++s) {
    if (s < stages) {
      load_x<Format, kTokens>(p, sources, ring + s * kStageBytes<Format>, s);
      weights.load(ring + s * kStageBytes<Format> + kXBytes, s);
    }
    copy_group_commit();
  }
  float sums[kTokens / 8][4];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) (&sums[0][0])[i] = 0.f;
  u32 slot = ring, free_slot = ring + (Shape::kStages - 1) * kStageBytes<Format>;
  const u32 end = ring + Shape::kStages * kStageBytes<Format>;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    copy_group_wait<Shape::kStages - 2>();
    wgmma_publish();
    __syncthreads();
    const int ahead = s + Shape::kStages - 1;
    if (ahead < stages) {
      load_x<Format, kTokens>(p, sources, free_slot, ahead);
      weights.load(free_slot + kXBytes, ahead);
    }
    copy_group_commit();
    uint4 a[2][2];
    load_fragments(Format{}, slot + kXBytes, warp, 0, s % 2, lane, a[0]);
    load_fragments(Format{}, slot + kXBytes, warp, 1, s % 2, lane, a[1]);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_bf16(sums, a[i / 2][i % 2], wgmma_tile(slot, i));
    wgmma_commit();
    wgmma_wait<0>();
    slot = slot + kStageBytes<Format> == end ? ring : slot + kStageBytes<Format>;
    free_slot = free_slot + kStageBytes<Format> == end ? ring : free_slot + kStageBytes<Format>;
  }
  copy_group_wait<0>();
  __syncthreads();
  give_results<Format, kIsGated>(p, ring, expert, row_tile, warp, 0, lane, sums);
}

template <class Format, bool kIsGated>
__device__ __forceinline__ void grouped(const GroupedParams& p) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ Sources sources;
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
  store_results<kIsGated>(p, ring, row_tile, first, count);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_gate_up_bf16(const GroupedParams p) { grouped<ImageBf16, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_gate_up_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_gate_up_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_gate_up_nvfp4(const GroupedParams p) { grouped<ImageE2m1, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_down_bf16(const GroupedParams p) { grouped<ImageBf16, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_down_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_down_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_grouped_wgmma_down_nvfp4(const GroupedParams p) { grouped<ImageE2m1, false>(p); }
