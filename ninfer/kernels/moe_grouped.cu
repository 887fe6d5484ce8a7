// moe_grouped: products of routed experts for many tokens, on rows sorted by expert.
//
// Contract: ninfer/ops/moe_grouped.py. Entries, one a format each:
//   moe_grouped_gate_up   y = silu(gate x) * up x, rows of x gathered by token
//   moe_grouped_down      y = down x, rows of x in sorted order
//
// A block multiplies 128 rows of an expert's matrix with up to 128 of its sorted rows; which ones a
// list on the device says (moe_pairs), and blocks behind its end have nothing to do. Stages of 64
// columns come by asynchronous copies: the packed weights as they lie in memory, x in rows of 128
// bytes. A warp multiplies 64 x 32 on tensor cores; weights turn into fragments in registers, and
// 32 tokens that are not there cost no products. Results go through shared memory so that stores
// are whole rows.
//
// FLOP: 2 N K a sorted row. Bytes: an expert's weights once for every 128 of its rows.

#include "copy_groups.cuh"
#include "mma.cuh"
#include "moe_grouped.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace {

using Tiles = Tiling<256, 128>;
constexpr int kThreads = Tiles::kThreads;
// Where shared memory has room for the stages of two blocks.
constexpr int kResidentBlocks =
    __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100) ? 2 : 1;
constexpr int kWarpTiles = 4;    // of 16 rows
constexpr int kWarpColumns = 4;  // of 8 tokens

template <class Format>
constexpr int kStages = Format::kPartColumns == 32 ? 3 : 4;

// Rows of x that share banks differ in this bit of the place of a 16-byte vector.
template <class Format>
constexpr int kSwizzle = Format::kPartColumns == 128 ? 1 : 4;

// A stage's rows of x. Rows up to the next 32 that are not there become zeros; those behind nobody
// reads.
template <class Format>
__device__ __forceinline__ void load_x(const GroupedParams& p, const Sources<Tiles>& sources, u32 tile, int index, int count) {
  constexpr int kRows = kThreads / 8;
  static_assert(kRows == kWarpColumns * 8, "the rows that a warp's columns need");
  const int thread = opaque(threadIdx.x);
  const int vector = thread % 8, column = index * kStageColumns + vector * 8;
  const bool is_column = column < p.experts.shape.columns;
#pragma unroll
  for (int i = 0; i < kTileTokens / kRows; ++i) {
    const int row = i * kRows + thread / 8;
    if (i * kRows >= count) break;
    copy_shared_16(tile + row * kRowBytes + (vector ^ (row % 2 * kSwizzle<Format>)) * 16,
                   p.x + static_cast<u64>(sources.rows[row]) * p.x_stride + (is_column ? column : 0),
                   is_column && row < count);
  }
}

struct Accumulators {
  float at[kWarpTiles][kWarpColumns][4];
};

template <class Format>
__device__ __forceinline__ void multiply_stage(u32 stage, int half, int row_warp, int column_warp, int lane,
                                               Accumulators& sum) {
  const u32 x = stage + (column_warp * 32 + lane / 4) * kRowBytes;
  const int swizzle = lane / 4 % 2 * kSwizzle<Format>;
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const int vector = Format::kPartColumns == 128 ? lane % 4 * 2 + block : block * 4 + lane % 4;
    uint4 b[kWarpColumns];
#pragma unroll
    for (int n = 0; n < kWarpColumns; ++n) b[n] = load_shared_16(x + n * 8 * kRowBytes + (vector ^ swizzle) * 16);
#pragma unroll
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      uint4 a[2];
      load_fragments(Format{}, stage + kXBytes, stage + kXBytes + StageShape<Format, Tiles>::kWeightBytes, row_warp * kWarpTiles + tile, block, half, lane, a);
#pragma unroll
      for (int n = 0; n < kWarpColumns; ++n) mma_bf16_16x8x16(sum.at[tile][n], a[0], b[n].x, b[n].y);
#pragma unroll
      for (int n = 0; n < kWarpColumns; ++n) mma_bf16_16x8x16(sum.at[tile][n], a[1], b[n].z, b[n].w);
    }
  }
}

template <class Format, bool kIsGated>
__device__ __forceinline__ void grouped(const GroupedParams& p) {
  using Shape = StageShape<Format, Tiles>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Sources<Tiles> sources;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row_tile = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (static_cast<int>(blockIdx.y) >= __ldcg(p.num_tiles)) return;
  const int2 place = __ldcg(p.tiles + blockIdx.y);
  const int expert = place.x, first = place.y;
  const int count = min(__ldcg(p.offsets + expert + 1) - first, kTileTokens);
  const int row_warp = warp % 2, column_warp = warp / 2;
  const bool has_work = column_warp * 32 < count;
  const u32 ring = shared_address(memory);
  const int stages = (p.experts.shape.columns + kStageColumns - 1) / kStageColumns;
  find_sources<Format>(sources, p, expert, row_tile, first, count);
  const WeightLoader<Format, Tiles> weights(p, sources);
#pragma unroll
  for (int s = 0; s < kStages<Format> - 1; ++s) {
    if (s < stages) {
      load_x<Format>(p, sources, ring + s * Shape::kBytes, s, count);
      weights.load(ring + s * Shape::kBytes + kXBytes, s);
    }
    copy_group_commit();
  }
  Accumulators sum;
#pragma unroll
  for (int i = 0; i < kWarpTiles * kWarpColumns * 4; ++i) (&sum.at[0][0][0])[i] = 0.f;
  int slot = 0, free_slot = kStages<Format> - 1;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    copy_group_wait<kStages<Format> - 2>();
    __syncthreads();
    const int ahead = s + kStages<Format> - 1;
    if (ahead < stages) {
      load_x<Format>(p, sources, ring + free_slot * Shape::kBytes, ahead, count);
      weights.load(ring + free_slot * Shape::kBytes + kXBytes, ahead);
    }
    copy_group_commit();
    if (has_work) multiply_stage<Format>(ring + slot * Shape::kBytes, s % 2, row_warp, column_warp, lane, sum);
    slot = slot + 1 == kStages<Format> ? 0 : slot + 1;
    free_slot = free_slot + 1 == kStages<Format> ? 0 : free_slot + 1;
  }
  copy_group_wait<0>();
  __syncthreads();
  if (has_work) {
#pragma unroll
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      give_results<Format, Tiles, kIsGated>(p, ring, expert, row_tile, row_warp * kWarpTiles + tile, column_warp * 32, lane,
                                     sum.at[tile]);
    }
  }
  __syncthreads();
  store_results<Tiles, kIsGated>(p, ring, row_tile, first, count);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_gate_up_bf16(const GroupedParams p) { grouped<ImageBf16, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_gate_up_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_gate_up_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_gate_up_nvfp4(const GroupedParams p) { grouped<ImageE2m1, true>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_down_bf16(const GroupedParams p) { grouped<ImageBf16, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_down_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_down_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, false>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
moe_grouped_down_nvfp4(const GroupedParams p) { grouped<ImageE2m1, false>(p); }
