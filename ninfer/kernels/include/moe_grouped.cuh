// Products of sorted rows with experts' packed matrices: what the kernels for it have in common.
//
// A block multiplies some rows of a matrix with up to 128 sorted rows of x, in stages of 64 columns.
// Weights lie in a stage as in the packed image: strips one behind the other, then their slabs.
#pragma once

#include "copy_groups.cuh"
#include "dtypes.cuh"
#include "expert_matrix.cuh"
#include "moe_tiles.cuh"
#include "vec.cuh"
#include "weight_image.cuh"

// How a kernel cuts the work: threads of a block, and rows of the matrix that they multiply.
template <int kThreadCount, int kRowCount>
struct Tiling {
  static constexpr int kThreads = kThreadCount, kRows = kRowCount, kStrips = kRowCount / 32;
};

constexpr int kStageColumns = 64;
constexpr u32 kRowBytes = kStageColumns * 2;  // of x in a stage
constexpr u32 kXBytes = kTileTokens * kRowBytes;

struct GroupedParams {
  ExpertMatrix experts;
  const u16* x;          // [rows, K] bf16
  u16* y;                // [P, N / 2] or [P, N] bf16
  const int* rows;       // [P] row of x of a sorted position, or null: the position
  const int* offsets;    // [E + 1]
  const int2* tiles;     // {expert, first sorted position}
  const int* num_tiles;
  int x_stride, padding;
};
static_assert(sizeof(GroupedParams) == 104, "ninfer/ops/moe_grouped.py mirrors this struct");

// A strip's bytes in a stage, and how often a part's columns fill one.
template <class Format, class Tiles>
struct StageShape {
  static constexpr int kPartsPerStage = Format::kPartColumns == 32 ? 2 : 1;
  static constexpr int kStagesPerPart = Format::kPartColumns == 128 ? 2 : 1;
  static constexpr u32 kStripBytes = kImagePartBytes * kPartsPerStage / kStagesPerPart;
  static constexpr u32 kSlabBytes = Format::kPartSlab > 0 ? Format::kPartSlab : Format::kUnitSlab / 8;
  static constexpr u32 kWeightBytes = Tiles::kStrips * kStripBytes;
  static constexpr u32 kBytes = kXBytes + kWeightBytes + (Tiles::kStrips * kSlabBytes + 127) / 128 * 128;
};

template <class Format>
constexpr u32 kPartSlabBytes = Format::kPartSlab > 0 ? Format::kPartSlab : Format::kUnitSlab / 8;

// Parts of a strip: where column 0 lies, and how far apart columns are.
struct alignas(16) StripSource {
  const u8* bytes;
  u32 column_step;
  u32 slab_offset;  // from `bytes` to the slab of column 0
};

template <class Format>
__device__ __forceinline__ StripSource strip_source(const ExpertMatrix& m, int expert, int strip) {
  const int spread = m.shape.strips_per_block, slices = kImagePartsPerUnit / spread;
  const int block = strip / spread, in_block = strip % spread;
  const int strips = block == m.shape.row_blocks - 1 ? m.shape.last_strips : spread;
  StripSource source;
  source.bytes = m.images + expert * m.image_bytes +
                 static_cast<u64>(block) * m.shape.units_per_block * image_unit_bytes<Format>(kImagePartsPerUnit) +
                 in_block * kImagePartBytes;
  source.column_step = strips * kImagePartBytes;
  source.slab_offset = strips * slices * kImagePartBytes + in_block * kPartSlabBytes<Format> -
                       in_block * kImagePartBytes;
  return source;
}

// Where a block's copies come from.
template <class Tiles>
struct Sources {
  StripSource strips[Tiles::kStrips];
  u32 rows[kTileTokens];  // of x
};

template <class Format, class Tiles>
__device__ __forceinline__ void find_sources(Sources<Tiles>& sources, const GroupedParams& p, int expert, int row_tile,
                                             int first, int count) {
  const int thread = threadIdx.x, last = (p.experts.shape.rows + 31) / 32 - 1;
  if (thread < Tiles::kStrips) {
    sources.strips[thread] = strip_source<Format>(p.experts, expert, min(row_tile * Tiles::kStrips + thread, last));
  } else if (thread >= Tiles::kThreads - kTileTokens) {
    const int row = thread - (Tiles::kThreads - kTileTokens), at = first + min(row, count - 1);
    const int from = p.rows != nullptr ? __ldcg(p.rows + at) : at;
    sources.rows[row] = from;
  }
  __syncthreads();
}

// A stage's copies of weights.
template <class Format, class Tiles>
struct WeightLoader {
  using Shape = StageShape<Format, Tiles>;
  const GroupedParams& p;
  const Sources<Tiles>& sources;
  int parts, slice_shift;

  __device__ __forceinline__ WeightLoader(const GroupedParams& params, const Sources<Tiles>& from)
      : p(params), sources(from) {
    const int slices = kImagePartsPerUnit / p.experts.shape.strips_per_block;
    slice_shift = 31 - __clz(slices);
    parts = p.experts.shape.units_per_block * slices;
  }

  // Bytes of slabs between two units of a strip's row block.
  __device__ __forceinline__ u32 slab_step(u32 column_step) const {
    return ((column_step / kImagePartBytes) << slice_shift) * Format::kPartSlab + Format::kUnitSlab;
  }

  __device__ __forceinline__ void load(u32 weights, int index) const {
    const int thread = opaque(threadIdx.x);
    constexpr int kPerStrip = Shape::kStripBytes / 16, kVectors = Shape::kWeightBytes / 16 / Tiles::kThreads;
    int column = index / Shape::kStagesPerPart;
    if constexpr (Shape::kPartsPerStage == 2) column = index * 2 + thread % kPerStrip / 128;
    const u32 within = thread % (kPerStrip < 128 ? kPerStrip : 128) * 16 +
                       index % Shape::kStagesPerPart * Shape::kStripBytes;
    const bool is_part = column < parts;
    if (!is_part) column = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * Tiles::kThreads + thread;
      const StripSource source = sources.strips[v / kPerStrip];
      u64 offset = static_cast<u64>(column) * source.column_step + within;
      if constexpr (Shape::kSlabBytes > 0) offset += static_cast<u64>(column >> slice_shift) * slab_step(source.column_step);
      copy_shared_16(weights + v * 16, source.bytes + offset, is_part);
    }
    if constexpr (Shape::kSlabBytes > 0) load_slabs(weights + Shape::kWeightBytes, column);
  }

  __device__ __forceinline__ void load_slabs(u32 slabs, int column) const {
    const int thread = opaque(threadIdx.x);
    constexpr int kPieceBytes = Shape::kSlabBytes < 16 ? 8 : 16, kPieces = Shape::kSlabBytes / kPieceBytes;
    if (thread >= Tiles::kStrips * kPieces) return;
    const StripSource source = sources.strips[thread / kPieces];
    const u32 strips = source.column_step / kImagePartBytes, unit = column >> slice_shift;
    const u64 unit_bytes = (source.column_step << slice_shift) + slab_step(source.column_step);
    const u8* from = source.bytes + unit * unit_bytes + source.slab_offset +
                     (column - (unit << slice_shift)) * strips * Shape::kSlabBytes + thread % kPieces * kPieceBytes;
    if constexpr (kPieceBytes == 8) {
      copy_shared_8(slabs + thread * kPieceBytes, from);
    } else {
      copy_shared_16(slabs + thread * kPieceBytes, from, true);
    }
  }
};

__device__ __forceinline__ u32 scaled_pair(u32 pair, float scale) {
  return pack_bf16x2(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

// Both fragments of a tile of 16 rows that go with 32 columns of a stage. `tile` counts from the
// block's first row, `slabs` is where the stage's slabs begin.
__device__ __forceinline__ void load_fragments(ImageBf16, u32 weights, u32, int tile, int block, int, int lane,
                                               uint4 (&a)[2]) {
  const u32 at = weights + (tile / 2 * 2 + block) * kImagePartBytes + tile % 2 * 512 + lane * 16;
  a[0] = load_shared_16(at), a[1] = load_shared_16(at + 1024);
}

__device__ __forceinline__ void load_e4m3(u32 weights, int tile, int block, int lane, uint4 (&a)[2]) {
  const u32 at = weights + tile / 2 * kImagePartBytes + (block * 2 + tile % 2) * 512 + lane * 16;
  for_e4m3_fragments(load_shared_16(at), [&](int m, uint4 fragment) { a[m] = fragment; });
}

__device__ __forceinline__ void load_fragments(ImageE4m3Row, u32 weights, u32, int tile, int block, int, int lane,
                                               uint4 (&a)[2]) {
  load_e4m3(weights, tile, block, lane, a);
}

__device__ __forceinline__ void load_fragments(ImageE4m3Block, u32 weights, u32 slabs, int tile, int block, int, int lane,
                                               uint4 (&a)[2]) {
  load_e4m3(weights, tile, block, lane, a);
  const uint2 scales = load_shared_8(slabs + tile / 2 * 8);
  const float low = __uint_as_float(scales.x), high = __uint_as_float(scales.y);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    a[m] = make_uint4(scaled_pair(a[m].x, low), scaled_pair(a[m].y, high), scaled_pair(a[m].z, low),
                      scaled_pair(a[m].w, high));
  }
}

__device__ __forceinline__ void load_fragments(ImageE2m1, u32 weights, u32 slabs, int tile, int block, int half, int lane,
                                               uint4 (&a)[2]) {
  const u32 at = weights + tile / 2 * 1024 + tile % 2 * 512 + lane * 16 + block * 8;
  const uint2 words = load_shared_8(at);
  const uint2 slab = load_shared_8(slabs + tile / 2 * 256 + lane * 8);
  const u32 word = half == 0 ? slab.x : slab.y;
  const u32 pair = tile % 2 == 0 ? e4m3_first_pair(word) : e4m3_second_pair(word);
  const u32 scale = mul_bf16x2(mul_bf16x2(pair, kTwoTo120), kTwoTo118);
  const u32 low = __byte_perm(scale, scale, 0x1010), high = __byte_perm(scale, scale, 0x3232);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint4 pairs = e2m1_pairs(m == 0 ? words.x : words.y);
    a[m] = make_uint4(mul_bf16x2(pairs.x, low), mul_bf16x2(pairs.y, high), mul_bf16x2(pairs.z, low),
                      mul_bf16x2(pairs.w, high));
  }
}

__device__ __forceinline__ float silu(float gate) { return gate / (1.f + __expf(-gate)); }

__device__ __forceinline__ void store_shared_2(u32 address, u16 v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

// The tile's results, rows of tokens, in shared memory.
template <class Tiles, bool kIsGated>
struct Results {
  static constexpr int kWidth = kIsGated ? Tiles::kRows / 2 : Tiles::kRows;
  static constexpr u32 kPitch = (kWidth + 8) * 2;
};

// Results of 16 rows and 8 * kColumns tokens from `first_token` on; tile and tokens count from the
// block's first.
template <class Format, class Tiles, bool kIsGated, int kColumns>
__device__ __forceinline__ void give_results(const GroupedParams& p, u32 memory, int expert, int row_tile, int tile,
                                             int first_token, int lane, const float (&sums)[kColumns][4]) {
  using Out = Results<Tiles, kIsGated>;
  const int local = tile * 16 + lane / 4;
  float low_scale = 1.f, high_scale = 1.f;
  if constexpr (Format::kHasRowScale) {
    const float* scales = p.experts.row_scales + static_cast<u64>(expert) * p.experts.shape.rows;
    const int row = row_tile * Tiles::kRows + local, last = p.experts.shape.rows - 1;
    low_scale = __ldg(scales + min(row, last)), high_scale = __ldg(scales + min(row + 8, last));
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 token = memory + (first_token + n * 8 + lane % 4 * 2 + i) * Out::kPitch;
      const float low = sums[n][i] * low_scale, high = sums[n][2 + i] * high_scale;
      if constexpr (kIsGated) {
        // Rows 0..7 of a tile are gates, rows 8..15 their ups.
        store_shared_2(token + (tile * 8 + lane / 4) * 2, float_to_bf16(silu(low) * high));
      } else {
        store_shared_2(token + local * 2, float_to_bf16(low));
        store_shared_2(token + (local + 8) * 2, float_to_bf16(high));
      }
    }
  }
}

template <class Tiles, bool kIsGated>
__device__ __forceinline__ void store_results(const GroupedParams& p, u32 memory, int row_tile, int first, int count) {
  using Out = Results<Tiles, kIsGated>;
  constexpr int kVectors = Out::kWidth / 8;
  const int width = kIsGated ? p.experts.shape.rows / 2 : p.experts.shape.rows;
  for (int i = threadIdx.x; i < count * kVectors; i += Tiles::kThreads) {
    const int token = i / kVectors, vector = i % kVectors, column = row_tile * Out::kWidth + vector * 8;
    if (column >= width) continue;
    const uint4 v = load_shared_16(memory + token * Out::kPitch + vector * 16);
    *reinterpret_cast<uint4*>(p.y + static_cast<u64>(first + token) * width + column) = v;
  }
}
