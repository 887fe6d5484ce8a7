// Tiles of 16 rows of packed matrices times few columns: eight warps share a tile along K.
//
// Every warp has a ring of its own in shared memory for parts of weights; a lane reads what it has
// copied itself. Columns of x are loaded a batch of parts ahead. Sums of the warps meet in shared
// memory, where their order is the reader's.
#pragma once

#include "copy_groups.cuh"
#include "dtypes.cuh"
#include "expert_matrix.cuh"
#include "mma.cuh"
#include "vec.cuh"
#include "weight_image.cuh"

constexpr int kWarps = 8;

template <class Format>
constexpr int kRunVectors = Format::kRuns * Format::kRun / 8;
template <class Format>
constexpr bool kHasSlab = Format::kPartSlab > 0 || Format::kUnitSlab > 0;

// A part of one tile, as one lane multiplies it.
template <class Format>
struct Chunk {
  uint4 words[2];
  uint2 slab;
};

// A lane's columns of x for a part: those of the pair in column lane / 4 of a tile.
template <class Format>
struct Run {
  uint4 vectors[kRunVectors<Format>];
};

template <class Format>
__device__ __forceinline__ int num_parts(int columns) {
  return (columns + Format::kPartColumns - 1) / Format::kPartColumns;
}

__device__ __forceinline__ uint4 load_weights(const u8* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// A tile of 16 rows in the image, as a lane reads it: everything that does not depend on the part.
template <class Format>
struct TileSource {
  const u8* bytes;  // the lane's words of part 0
  const float* row_scales;  // of the lane's rows
  u32 part_step, slab_offset, unit_slab_bytes;
  int slice_shift, second_scale;

  __device__ __forceinline__ TileSource() {}

  __device__ __forceinline__ TileSource(const ExpertMatrix& m, int expert, int tile, int lane) {
    const ImageShape& shape = m.shape;
    const int strip_shift = 31 - __clz(shape.strips_per_block), strip = tile / 2;
    const int block = strip >> strip_shift, in_block = strip & (shape.strips_per_block - 1);
    const int strips = block == shape.row_blocks - 1 ? shape.last_strips : shape.strips_per_block;
    const u8* unit = m.images + expert * m.image_bytes +
                     static_cast<u64>(block) * shape.units_per_block * image_unit_bytes<Format>(kImagePartsPerUnit);
    bytes = unit + in_block * kImagePartBytes + tile % 2 * 512 + lane * 16;
    part_step = strips * kImagePartBytes;
    if constexpr (kHasSlab<Format>) {
      slice_shift = 3 - strip_shift;
      const u32 parts = strips << slice_shift;
      unit_slab_bytes = parts * Format::kPartSlab + Format::kUnitSlab;
      slab_offset = parts * kImagePartBytes + in_block * kSlabBytes + (Format::kPartSlab > 0 ? lane * 8 : 0) -
                    (in_block * kImagePartBytes + tile % 2 * 512 + lane * 16);
    }
    if constexpr (Format::kHasRowScale) {
      const int row = min(tile * 16 + lane / 4, shape.rows - 1);
      row_scales = m.row_scales + static_cast<u64>(expert) * shape.rows + row;
      second_scale = min(8, shape.rows - 1 - row);
    }
  }

  // The same tile of an expert further on.
  __device__ __forceinline__ TileSource at(const ExpertMatrix& m, int expert) const {
    TileSource other = *this;
    other.bytes += expert * m.image_bytes;
    if constexpr (Format::kHasRowScale) other.row_scales += static_cast<u64>(expert) * m.shape.rows;
    return other;
  }

  struct Place {
    const u8 *words, *slab;
  };

  __device__ __forceinline__ Place place(int part) const {
    u64 offset = static_cast<u64>(part) * part_step;
    if constexpr (!kHasSlab<Format>) return Place{bytes + offset, nullptr};
    const u32 unit = part >> slice_shift, slice = part - (unit << slice_shift);
    const u64 unit_bytes = static_cast<u64>(part_step << slice_shift) + unit_slab_bytes;
    offset += static_cast<u64>(unit) * unit_slab_bytes;
    return Place{bytes + offset,
                 bytes + slab_offset + unit * unit_bytes + slice * (part_step / (kImagePartBytes / kSlabBytes))};
  }

  __device__ __forceinline__ void load(Chunk<Format>& chunk, int part) const {
    const Place from = place(part);
    chunk.words[0] = load_weights(from.words);
    chunk.words[1] = load_weights(from.words + 1024);
    if constexpr (kHasSlab<Format>) chunk.slab = __ldg(reinterpret_cast<const uint2*>(from.slab));
  }

  // Scales of the lane's two rows.
  __device__ __forceinline__ float2 load_scales() const {
    if constexpr (!Format::kHasRowScale) return make_float2(1.f, 1.f);
    return make_float2(__ldg(row_scales), __ldg(row_scales + second_scale));
  }

 private:
  static constexpr u32 kSlabBytes = Format::kPartSlab > 0 ? Format::kPartSlab : 8;
};

// A warp's ring of parts; every part is a group of copies. A lane reads what it has copied.
template <class Format>
struct Ring {
  static constexpr int kStages = 6;
  static constexpr u32 kStageBytes = 1024 + (kHasSlab<Format> ? 256 : 0);
  static constexpr u32 kWarpBytes = kStages * kStageBytes;

  u32 base, fill, read;  // of the lane

  __device__ __forceinline__ Ring(u32 memory, int warp, int lane)
      : base(memory + warp * kWarpBytes), fill(base + lane * 16), read(fill) {}

  __device__ __forceinline__ void copy(const TileSource<Format>& source, int part) {
    const typename TileSource<Format>::Place from = source.place(part);
    copy_shared_16(fill, from.words, true);
    copy_shared_16(fill + 512, from.words + 1024, true);
    if constexpr (kHasSlab<Format>) copy_shared_8(slab_of(fill), from.slab);
  }

  // Behind every part that was copied, and every part not there any more: groups are counted.
  __device__ __forceinline__ void commit() {
    copy_group_commit();
    fill = next(fill);
  }

  __device__ __forceinline__ void take(Chunk<Format>& chunk) {
    copy_group_wait<kStages - 1>();
    chunk.words[0] = load_shared_16(read);
    chunk.words[1] = load_shared_16(read + 512);
    if constexpr (kHasSlab<Format>) chunk.slab = load_shared_8(slab_of(read));
    read = next(read);
  }

 private:
  __device__ __forceinline__ u32 slab_of(u32 at) const { return at + 1024 - threadIdx.x % 32 * 8; }
  __device__ __forceinline__ u32 next(u32 at) const {
    return at + kStageBytes >= base + kWarpBytes ? at + kStageBytes - kWarpBytes : at + kStageBytes;
  }
};

// Column of x where vector `v` of a lane's run begins.
template <class Format>
__device__ __forceinline__ int run_column(int part, int v, int lane) {
  constexpr int kColumns = Format::kPartColumns / Format::kRuns, kPerRun = Format::kRun / 8;
  return part * Format::kPartColumns + v / kPerRun * kColumns + lane % 4 * Format::kRun + v % kPerRun * 8;
}

template <class Format>
__device__ __forceinline__ void load_run(Run<Format>& run, const u16* row, int columns, int part, int lane) {
#pragma unroll
  for (int v = 0; v < kRunVectors<Format>; ++v) {
    const int column = run_column<Format>(part, v, lane);
    run.vectors[v] =
        column < columns ? __ldcg(reinterpret_cast<const uint4*>(row + column)) : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <class Format, class Function>
__device__ __forceinline__ void for_words(uint4 w, uint2 slab, int half, int tile, Function f) {
  if constexpr (Format::kPartSlab > 0) {
    for_e2m1_fragments(w, half == 0 ? slab.x : slab.y, tile % 2, f);
  } else {
    for_fragments(Format{}, w, nullptr, half, 0, 0, f);
  }
}

// sums += the chunk times the pairs' columns.
template <class Format>
__device__ __forceinline__ void multiply_chunk(const Chunk<Format>& chunk, const Run<Format>& run, int tile,
                                               float (&sums)[4]) {
  float part_sums[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for_words<Format>(chunk.words[half], chunk.slab, half, tile, [&](int m, uint4 a) {
      const uint4 x = run.vectors[Format::kRuns == 1 ? 0 : half * (Format::kRun / 8) + m / 2];
      const u32 low = word_of(x, m % 2 * 2), high = word_of(x, m % 2 * 2 + 1);
      mma_bf16_16x8x16(Format::kUnitSlab > 0 ? part_sums : sums, a, low, high);
    });
  }
  if constexpr (Format::kUnitSlab > 0) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] += __uint_as_float(c < 2 ? chunk.slab.x : chunk.slab.y) * part_sums[c];
  }
}

// A tile's sums of one warp, for up to 16 pairs.
struct Sums {
  float at[2][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) (&at[0][0])[i] = 0.f;
  }
};

// Sums of all warps on their way to the threads that add them: written by one tile or round while
// the other half is still read for the one before.
struct alignas(16) Exchange {
  float sums[2][kWarps][2][32][4];
  __device__ __forceinline__ void give(int turn, int warp, int lane, const Sums& mine, bool has_second) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !has_second) break;
      *reinterpret_cast<float4*>(sums[turn][warp][i][lane]) =
          make_float4(mine.at[i][0], mine.at[i][1], mine.at[i][2], mine.at[i][3]);
    }
  }
  // Row `row` of the tile and pair `column`, of one warp.
  __device__ __forceinline__ float take(int turn, int warp, int row, int column) const {
    return sums[turn][warp][column / 8][row % 8 * 4 + column % 8 / 2][row / 8 * 2 + column % 2];
  }
};

template <class Format>
__device__ __forceinline__ void scale_rows(float2 scales, Sums& sums) {
  if constexpr (Format::kHasRowScale) {
#pragma unroll
    for (int i = 0; i < 8; ++i) (&sums.at[0][0])[i] *= i % 4 < 2 ? scales.x : scales.y;
  }
}

// A batch of a warp's parts, first, first + step, ..: the lane's columns of x for all of them.
template <class Format, int kBatch>
struct Batch {
  Run<Format> runs[kBatch];
  __device__ __forceinline__ void load(const u16* row, int columns, int first, int step, int lane) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_run(runs[i], row, columns, first + i * step, lane);
  }
};
