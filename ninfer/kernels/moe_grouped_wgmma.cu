// moe_grouped_wgmma: products of routed experts for many tokens, on 9.0's tensor cores.
//
// Contract: ninfer/ops/moe_grouped.py. Entries, those of products one a format each:
//   moe_gather_images             rows of x, by tile of sorted positions, as images
//   moe_grouped_wgmma_gate_up_*   y = silu(gate x) * up x, from images to images
//   moe_grouped_wgmma_down_*      y = down x, from images to rows
//
// As many blocks as multiprocessors take tiles in turn, 256 rows of a matrix by up to 128 tokens. One
// warp keeps a ring of stages filled by bulk copies: images and packed weights are both as they have
// to lie. Eight warps multiply, four of them 128 rows: packed weights become register operands; a
// stage's products run while the next stage's words are read. Few tokens take narrower products.
//
// Bytes: an expert's weights once for every 128 of its rows, images once for every 256 rows of a
// matrix, both mostly from L2.

#include "bulk.cuh"
#include "moe_grouped.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kConsumers = 256;
constexpr int kHalves = 2;  // products of 64 rows that four warps have
constexpr int kWarps = kConsumers / 32;
// Four more warps, of which one copies, give their registers to the others.
constexpr int kBlockThreads = kConsumers + 128;
constexpr int kCopyRegisters = 40, kProductRegisters = 232;
using Tiles = Tiling<kConsumers, 256>;

template <class Format>
struct Stage {
  static constexpr u32 kStripBytes = StageShape<Format, Tiles>::kStripBytes;
  // Of a strip: e2m1 scales of the part, or block scales of the whole unit.
  static constexpr u32 kSlabBytes = Format::kPartSlab > 0 ? Format::kPartSlab : Format::kUnitSlab;
  static constexpr u32 kWeights = kXBytes, kSlabs = kWeights + Tiles::kStrips * kStripBytes;
  static constexpr u32 kBytes = (kSlabs + Tiles::kStrips * kSlabBytes + 1023) / 1024 * 1024;
};

// As ninfer/ops/moe_grouped.py reserves shared memory for them.
template <class Format, bool kIsGated>
constexpr int kStages = Format::kPartColumns == 32   ? (kIsGated ? 4 : 3)
                        : Format::kUnitSlab > 0      ? (kIsGated ? 5 : 4)
                        : Format::kPartColumns == 64 ? (kIsGated ? 6 : 5)
                                                     : 6;

template <class Format, bool kIsGated>
struct Shared {
  static constexpr u32 kStaging = kStages<Format, kIsGated> * Stage<Format>::kBytes;
  static constexpr u32 kFull = kStaging + kTileTokens * Results<Tiles, kIsGated>::kPitch;
  static constexpr u32 kEmpty = kFull + kStages<Format, kIsGated> * 8;
};

struct GatherParams {
  const u16* x;       // [T, C] bf16
  u16* images;
  const int* rows;    // [P] row of x of a sorted position
  const int4* tiles;
  const int* num_tiles;
  int x_stride, columns, run, padding;
};
static_assert(sizeof(GatherParams) == 56, "ninfer/ops/moe_grouped.py mirrors this struct");

// Position in the ring; the parity flips at every wrap.
template <int kCount>
struct RingPosition {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kCount) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// Tokens that a tile's products take.
__device__ __forceinline__ int product_tokens(int count) { return count > 64 ? 128 : count > 32 ? 64 : 32; }

__device__ __forceinline__ int num_stages(const GroupedParams& p) {
  return (p.experts.shape.columns + kStageColumns - 1) / kStageColumns;
}

// Tiles of the list times tiles of rows, rows fastest.
struct Work {
  int total;
  __device__ __forceinline__ explicit Work(const GroupedParams& p) : total(row_tiles(p) * __ldcg(p.num_tiles)) {}
  static __device__ __forceinline__ int row_tiles(const GroupedParams& p) {
    return (p.experts.shape.rows + Tiles::kRows - 1) / Tiles::kRows;
  }
};

// ---- copies ----

// A lane's strip of weights: one stage after the other.
template <class Format>
struct StripCopy {
  using Shape = StageShape<Format, Tiles>;
  const u8* from;
  int slab_offset;  // from there
  u32 part_step;
  int slices, column;  // stages in the unit so far

  __device__ __forceinline__ StripCopy(const GroupedParams& p, int expert, int strip) : slab_offset(0), column(0) {
    const ImageShape& shape = p.experts.shape;
    const int real = min(strip, (shape.rows + 31) / 32 - 1);
    const StripSource source = strip_source<Format>(p.experts, expert, real);
    from = source.bytes, part_step = source.column_step;
    slices = kImagePartsPerUnit / shape.strips_per_block;
    if constexpr (Stage<Format>::kSlabBytes > 0) {
      slab_offset = source.slab_offset;
      if constexpr (Format::kUnitSlab > 0) slab_offset -= real % shape.strips_per_block * kPartSlabBytes<Format>;
    }
  }

  __device__ __forceinline__ void copy(u32 to, u32 slab_to, u32 barrier) const {
    constexpr u32 kPiece = Shape::kStripBytes / Shape::kPartsPerStage;
    bulk_copy(to, from, kPiece, barrier);
    if constexpr (Shape::kPartsPerStage == 2) bulk_copy(to + kPiece, from + part_step, kPiece, barrier);
    if constexpr (Stage<Format>::kSlabBytes > 0) {
      bulk_copy(slab_to, from + slab_offset, Stage<Format>::kSlabBytes, barrier);
    }
  }

  __device__ __forceinline__ void advance() {
    ++column;
    if (Shape::kStagesPerPart == 2 && column % 2 == 1) {
      from += Shape::kStripBytes, slab_offset -= Shape::kStripBytes;
      return;
    }
    const int step = Shape::kPartsPerStage * part_step - (Shape::kStagesPerPart - 1) * Shape::kStripBytes;
    from += step;
    if constexpr (Stage<Format>::kSlabBytes > 0) {
      const int part_slabs = part_step / kImagePartBytes * Format::kPartSlab;
      slab_offset += part_slabs - step;
      if (column < slices * Shape::kStagesPerPart) return;
      column = 0;
      from += slices * part_slabs + Format::kUnitSlab;
      slab_offset += slices * (part_step - part_slabs);
    }
  }
};

template <class Format, bool kIsGated>
__device__ __forceinline__ void copy_stages(const GroupedParams& p, u32 ring, int lane) {
  using Layout = Shared<Format, kIsGated>;
  constexpr int kCount = kStages<Format, kIsGated>;
  RingPosition<kCount> at;
#pragma unroll 1
  for (int index = blockIdx.x; index < Work(p).total; index += gridDim.x) {
    const int tile = index / Work::row_tiles(p), row_tile = index - tile * Work::row_tiles(p);
    const int4 place = __ldcg(p.tiles + tile);
    const u32 x_bytes = product_tokens(place.z) * kRowBytes;
    StripCopy<Format> strip(p, place.x, row_tile * Tiles::kStrips + min(lane, Tiles::kStrips - 1));
    if (lane == Tiles::kStrips) {
      strip.from = reinterpret_cast<const u8*>(p.x) + static_cast<u64>(tile) * num_stages(p) * kXBytes;
    }
#pragma unroll 1
    for (int left = num_stages(p); left > 0; --left) {
      const u32 full = ring + Layout::kFull + at.slot * 8;
      // The first time round this does not wait.
      barrier_wait(full + (Layout::kEmpty - Layout::kFull), at.parity ^ 1);
      if (lane == 0) {
        barrier_expect(full, x_bytes + Tiles::kStrips * (Stage<Format>::kStripBytes + Stage<Format>::kSlabBytes));
      }
      __syncwarp();
      const u32 stage = ring + at.slot * Stage<Format>::kBytes;
      if (lane < Tiles::kStrips) {
        strip.copy(stage + Stage<Format>::kWeights + lane * Stage<Format>::kStripBytes,
                   stage + Stage<Format>::kSlabs + lane * Stage<Format>::kSlabBytes, full);
        strip.advance();
      } else if (lane == Tiles::kStrips) {
        bulk_copy(stage, strip.from, x_bytes, full);
        strip.from += kXBytes;
      }
      at.advance();
    }
  }
}

// ---- products ----

// A stage's weights of one warp and product, 16 rows by 64 columns, as they are packed.
template <class Format>
struct Words {
  static constexpr int kVectors = Format::kPartColumns == 32 ? 4 : Format::kPartColumns == 64 ? 2 : 1;
  uint4 vectors[kVectors];
  uint2 slab;

  // `part`: place of the part in its unit, for slabs of whole units.
  __device__ __forceinline__ void load(u32 stage, int part, int tile, int lane) {
    const u32 at = stage + Stage<Format>::kWeights + tile / 2 * Stage<Format>::kStripBytes + tile % 2 * 512 + lane * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = load_shared_16(at + i * 1024);
    const u32 slabs = stage + Stage<Format>::kSlabs + tile / 2 * Stage<Format>::kSlabBytes;
    if constexpr (Format::kUnitSlab > 0) slab = load_shared_8(slabs + part * 8);
    if constexpr (Format::kPartSlab > 0) slab = load_shared_8(slabs + lane * 8);
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

// Where a strip lies in its units.
struct UnitPlace {
  int in_block, strips, slices;
  __device__ __forceinline__ UnitPlace() {}
  __device__ __forceinline__ UnitPlace(const ImageShape& shape, int strip) {
    const int real = min(strip, (shape.rows + 31) / 32 - 1), block = real / shape.strips_per_block;
    in_block = real % shape.strips_per_block;
    strips = block == shape.row_blocks - 1 ? shape.last_strips : shape.strips_per_block;
    slices = kImagePartsPerUnit / shape.strips_per_block;
  }
  __device__ __forceinline__ int part(int column) const { return (column & (slices - 1)) * strips + in_block; }
};

// Of a block's tiles of 16 rows, the one that a warp has in a product of 64.
__device__ __forceinline__ int tile_of(int warp, int half) { return (warp / 4 * kHalves + half) * 4 + warp % 4; }

template <class Format>
struct Operands {
  Words<Format> words[kHalves];
  UnitPlace places[kHalves];
  uint4 a[kHalves][4];

  __device__ __forceinline__ void load(u32 stage, int index, int warp, int lane) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      words[h].load(stage, Format::kUnitSlab > 0 ? places[h].part(index) : 0, tile_of(warp, h), lane);
    }
  }

  __device__ __forceinline__ void make(int index, int warp, u32 zero) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) make_fragments(Format{}, words[h], index % 2, warp % 2, zero, a[h]);
  }
};

// One tile's products, their sums in the staging area.
template <class Format, bool kIsGated, int kTokens>
__device__ __forceinline__ void multiply(const GroupedParams& p, u32 ring, RingPosition<kStages<Format, kIsGated>>& at,
                                         int expert, int row_tile, u32 zero) {
  using Layout = Shared<Format, kIsGated>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = num_stages(p);
  float sums[kHalves][kTokens / 8][4];
#pragma unroll
  for (int i = 0; i < kHalves * kTokens / 2; ++i) (&sums[0][0][0])[i] = 0.f;
  Operands<Format> operands;
  if constexpr (Format::kUnitSlab > 0) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      operands.places[h] = UnitPlace(p.experts.shape, row_tile * Tiles::kStrips + tile_of(warp, h) / 2);
    }
  }
  barrier_wait(ring + Layout::kFull + at.slot * 8, at.parity);
  operands.load(ring + at.slot * Stage<Format>::kBytes, 0, warp, lane);
  operands.make(0, warp, zero);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    const u32 x = ring + at.slot * Stage<Format>::kBytes, empty = ring + Layout::kEmpty + at.slot * 8;
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) wgmma_bf16(sums[h], operands.a[h][i], wgmma_tile(x, i));
    }
    wgmma_commit();
    at.advance();
    if (s + 1 < stages) {
      barrier_wait(ring + Layout::kFull + at.slot * 8, at.parity);
      operands.load(ring + at.slot * Stage<Format>::kBytes, s + 1, warp, lane);
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty);
    operands.make(s + 1, warp, zero);
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    give_results<Format, Tiles, kIsGated>(p, ring + Layout::kStaging, expert, row_tile, tile_of(warp, h), 0, lane,
                                          sums[h]);
  }
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// The staged tile as images: 128 columns are two stages. Columns that are not there are zeros.
__device__ __forceinline__ void store_images(const GroupedParams& p, u32 staging, int row_tile, int tile, int count) {
  constexpr int kVectors = Tiles::kRows / 16;
  const int width = p.experts.shape.rows / 2, stages = (width + kStageColumns - 1) / kStageColumns;
  for (int i = threadIdx.x; i < count * kVectors; i += kConsumers) {
    const int token = i / kVectors, vector = i % kVectors % 8, local = i % kVectors / 8;
    const int stage = row_tile * (kVectors / 8) + local;
    if (stage >= stages) continue;
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int column = local * kStageColumns + pair_at(vector, w, p.y_run) * 2;
      const u32 from = staging + token * Results<Tiles, true>::kPitch + column * 2;
      words[w] = row_tile * (Tiles::kRows / 2) + column < width ? load_shared_4(from) : 0;
    }
    u8* to = reinterpret_cast<u8*>(p.y) + (static_cast<u64>(tile) * stages + stage) * kXBytes;
    *reinterpret_cast<uint4*>(to + vector_offset(token, vector)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <class Format, bool kIsGated>
__device__ __forceinline__ void multiply_tiles(const GroupedParams& p, u32 ring) {
  const Work work(p);
  // Nobody but the driver knows that this is zero.
  const u32 zero = gridDim.y - 1;
  RingPosition<kStages<Format, kIsGated>> at;
#pragma unroll 1
  for (int index = blockIdx.x; index < work.total; index += gridDim.x) {
    const int tile = index / Work::row_tiles(p), row_tile = index - tile * Work::row_tiles(p);
    const int4 place = __ldcg(p.tiles + tile);
    const int tokens = product_tokens(place.z);
    if (tokens == 128) {
      multiply<Format, kIsGated, 128>(p, ring, at, place.x, row_tile, zero);
    } else if (tokens == 64) {
      multiply<Format, kIsGated, 64>(p, ring, at, place.x, row_tile, zero);
    } else {
      multiply<Format, kIsGated, 32>(p, ring, at, place.x, row_tile, zero);
    }
    consumer_barrier();
    const u32 staging = ring + Shared<Format, kIsGated>::kStaging;
    if constexpr (kIsGated) {
      store_images(p, staging, row_tile, tile, place.z);
    } else {
      store_results<Tiles, false>(p, staging, row_tile, place.y, place.z);
    }
    consumer_barrier();
  }
}

template <class Format, bool kIsGated>
__device__ __forceinline__ void grouped(const GroupedParams& p) {
  extern __shared__ __align__(1024) u8 memory[];
  using Layout = Shared<Format, kIsGated>;
  const u32 ring = shared_address(memory);
  if (threadIdx.x == 0) {
    if (ring % 1024 != 0) __trap();
    for (int i = 0; i < kStages<Format, kIsGated>; ++i) {
      barrier_init(ring + Layout::kFull + i * 8, 1);
      barrier_init(ring + Layout::kEmpty + i * 8, kWarps);
    }
    barrier_init_fence();
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x >= kConsumers) {
    give_registers<kCopyRegisters>();
    if (threadIdx.x < kConsumers + 32) copy_stages<Format, kIsGated>(p, ring, threadIdx.x - kConsumers);
  } else {
    take_registers<kProductRegisters>();
    multiply_tiles<Format, kIsGated>(p, ring);
  }
}

}  // namespace

// A block: one tile, four stages.
extern "C" __global__ void __launch_bounds__(256) moe_gather_images(const GatherParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int tile = blockIdx.y, stages = (p.columns + kStageColumns - 1) / kStageColumns;
  if (tile >= __ldcg(p.num_tiles)) return;
  const int4 place = __ldcg(p.tiles + tile);
#pragma unroll 1
  for (int stage = blockIdx.x * 4; stage < min(stages, blockIdx.x * 4 + 4); ++stage) {
    u8* to = reinterpret_cast<u8*>(p.images) + (static_cast<u64>(tile) * stages + stage) * kXBytes;
    for (int i = threadIdx.x; i < place.z * 8; i += 256) {
      const int row = i / 8, vector = i % 8;
      const u16* from = p.x + static_cast<u64>(__ldcg(p.rows + place.y + row)) * p.x_stride;
      u32 words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int column = stage * kStageColumns + pair_at(vector, w, p.run) * 2;
        words[w] = column < p.columns ? *reinterpret_cast<const u32*>(from + column) : 0;
      }
      *reinterpret_cast<uint4*>(to + vector_offset(row, vector)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_gate_up_bf16(const GroupedParams p) { grouped<ImageBf16, true>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_gate_up_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, true>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_gate_up_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, true>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_gate_up_nvfp4(const GroupedParams p) { grouped<ImageE2m1, true>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_down_bf16(const GroupedParams p) { grouped<ImageBf16, false>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_down_fp8_row(const GroupedParams p) { grouped<ImageE4m3Row, false>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_down_fp8_block(const GroupedParams p) { grouped<ImageE4m3Block, false>(p); }

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
moe_grouped_wgmma_down_nvfp4(const GroupedParams p) { grouped<ImageE2m1, false>(p); }
