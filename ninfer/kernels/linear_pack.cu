// linear_pack: row-major weights into the image that linear_small_t reads, once at load.
//
// Contract and layout: ninfer/ops/linear_packing.py, whose NumPy functions write the same bytes.
// Entries: linear_pack_<format>. A thread gathers one 16-byte vector from two runs of 8 bytes, one
// in row g and one in row g + 8 of a tile. Bytes: every weight read and written once.

#include "vec.cuh"

namespace {

constexpr int kPartsPerUnit = 8;
constexpr int kPartBytes = 2048;
constexpr int kPartVectors = kPartBytes / 16;

struct PackParams {
  const u8* codes;     // [rows, columns] bf16 or e4m3, or [rows, columns / 2] of two e2m1
  const void* scales;  // f32 [blocks of rows, blocks of columns] (fp8_block), e4m3 [rows, columns / 16]
  u8* image;
  int rows;
  int columns;
  int units_per_block;
  int row_blocks;
  int strips_per_block;
  int last_strips;
  int is_interleaved;  // rows are [gate; up]: take 8 of one, 8 of the other, in turn
  int padding;
};
static_assert(sizeof(PackParams) == 56, "ninfer/ops/linear_pack.py mirrors this struct");

struct Bf16 {
  static constexpr int kPartSlab = 0, kUnitSlab = 0;
};
struct E4m3Row : Bf16 {};
struct E4m3Block : Bf16 {
  static constexpr int kUnitSlab = 64;
};
struct E2m1 : Bf16 {
  static constexpr int kPartSlab = 256;
};

// A place in the image: `lane` of vector `quarter` (half * 2 + tile) of a part of a unit.
struct Place {
  u8* unit;    // the unit's bytes
  int parts;   // of the unit
  int part;    // slice * strips + strip
  int strip;   // of the matrix
  int column;  // part number along K
  int quarter, lane;

  __device__ __forceinline__ int packed_row(int upper) const {
    return strip * 32 + (quarter % 2) * 16 + upper * 8 + lane / 4;
  }
  // Where this lane's run of 8 bytes starts in a source row: a part is 64 bytes of it, and bf16's
  // halves take turns.
  __device__ __forceinline__ int run_offset(bool is_bf16) const {
    const int half = quarter / 2, q = lane % 4;
    return column * 64 + (is_bf16 ? q * 16 + half * 8 : half * 32 + q * 8);
  }
};

// Row of the source that becomes this row of the image.
__device__ __forceinline__ int source_row(const PackParams& p, int packed) {
  if (!p.is_interleaved) return packed;
  const int half = (packed % 16) / 8;
  return half * (p.rows / 2) + packed / 16 * 8 + packed % 8;
}

// 8 bytes of a packed row from `offset`, zeros outside the matrix.
__device__ __forceinline__ uint2 load_run(const PackParams& p, int packed, int offset, int row_bytes) {
  if (packed >= p.rows || offset >= row_bytes) return make_uint2(0, 0);
  const u8* row = p.codes + static_cast<u64>(source_row(p, packed)) * row_bytes;
  return *reinterpret_cast<const uint2*>(row + offset);
}

__device__ __forceinline__ u32 spread_e4m3(u32 a, u32 b) {
  return (a & 0x80) << 8 | (a & 0x7f) << 4 | (b & 0x70) << 8 | (b & 0x80) << 4 | (b & 0x0f);
}

// Two numbers of row g and two of row g + 8 (bytes 0 and 1 of each argument) as one word.
__device__ __forceinline__ u32 e4m3_word(u32 low_row, u32 high_row) {
  return spread_e4m3(low_row & 0xff, high_row & 0xff) |
         spread_e4m3(low_row >> 8 & 0xff, high_row >> 8 & 0xff) << 16;
}

__device__ __forceinline__ u32 spread_e2m1(u32 p0, u32 p1, u32 p2, u32 other_p2, u32 p3) {
  return (p0 & 8) << 12 | (p0 & 7) << 6 | (p1 & 8) << 8 | (p1 & 7) << 2 | (p2 & 7) << 12 |
         (other_p2 & 8) << 2 | (p3 & 8) << 6 | (p3 & 4) << 8 | (p3 & 3);
}

// Four numbers of row g and four of row g + 8 (nibbles 0 to 3 of each argument) as one word.
__device__ __forceinline__ u32 e2m1_word(u32 low_row, u32 high_row) {
  const u32 low = spread_e2m1(low_row, high_row, low_row >> 8, low_row >> 12, high_row >> 8);
  const u32 high = spread_e2m1(low_row >> 4, high_row >> 4, low_row >> 12, low_row >> 8, high_row >> 12);
  return low | high << 16;
}

__device__ __forceinline__ uint4 gather(Bf16, const PackParams& p, const Place& at) {
  const int offset = at.run_offset(true);
  const uint2 low = load_run(p, at.packed_row(0), offset, p.columns * 2);
  const uint2 high = load_run(p, at.packed_row(1), offset, p.columns * 2);
  return make_uint4(low.x, high.x, low.y, high.y);
}

__device__ __forceinline__ uint4 gather_e4m3(const PackParams& p, const Place& at) {
  const int offset = at.run_offset(false);
  const uint2 low = load_run(p, at.packed_row(0), offset, p.columns);
  const uint2 high = load_run(p, at.packed_row(1), offset, p.columns);
  return make_uint4(e4m3_word(low.x, high.x), e4m3_word(low.x >> 16, high.x >> 16),
                    e4m3_word(low.y, high.y), e4m3_word(low.y >> 16, high.y >> 16));
}

__device__ __forceinline__ uint4 gather(E4m3Row, const PackParams& p, const Place& at) {
  return gather_e4m3(p, at);
}

__device__ __forceinline__ uint4 gather(E4m3Block, const PackParams& p, const Place& at) {
  return gather_e4m3(p, at);
}

__device__ __forceinline__ uint4 gather(E2m1, const PackParams& p, const Place& at) {
  const int offset = at.run_offset(false);
  const uint2 low = load_run(p, at.packed_row(0), offset, p.columns / 2);
  const uint2 high = load_run(p, at.packed_row(1), offset, p.columns / 2);
  return make_uint4(e2m1_word(low.x, high.x), e2m1_word(low.x >> 16, high.x >> 16),
                    e2m1_word(low.y, high.y), e2m1_word(low.y >> 16, high.y >> 16));
}

// Two parts along K share a scale.
__device__ __forceinline__ float block_scale(const PackParams& p, int packed, int column) {
  const int scale_columns = (p.columns + 127) / 128;
  if (packed >= p.rows || column / 2 >= scale_columns) return 0.f;
  const int part_rows = p.is_interleaved ? p.rows / 2 : p.rows;
  const int row = source_row(p, packed);
  const int scale_row = row / part_rows * ((part_rows + 127) / 128) + row % part_rows / 128;
  return static_cast<const float*>(p.scales)[static_cast<u64>(scale_row) * scale_columns + column / 2];
}

__device__ __forceinline__ u32 group_scale(const PackParams& p, int packed, int group) {
  if (packed >= p.rows || group >= p.columns / 16) return 0;
  return static_cast<const u8*>(
      p.scales)[static_cast<u64>(source_row(p, packed)) * (p.columns / 16) + group];
}

__device__ __forceinline__ void store_slab(Bf16, const PackParams&, const Place&) {}
__device__ __forceinline__ void store_slab(E4m3Row, const PackParams&, const Place&) {}

__device__ void store_slab(E4m3Block, const PackParams& p, const Place& at) {
  if (at.quarter != 0) return;
  float2* slab = reinterpret_cast<float2*>(at.unit + at.parts * kPartBytes);
  if (at.lane == 0) {
    slab[at.part] = make_float2(block_scale(p, at.packed_row(0), at.column),
                                block_scale(p, at.packed_row(1), at.column));
  }
  const bool is_padding = at.lane >= at.parts && at.lane < kPartsPerUnit;
  if (at.part == 0 && is_padding) slab[at.lane] = make_float2(0.f, 0.f);
}

// Word `half`: the scales of group lane % 4 for rows g, g + 8 of the first and the second tile.
__device__ void store_slab(E2m1, const PackParams& p, const Place& at) {
  if (at.quarter % 2 != 0) return;
  const int half = at.quarter / 2, row = at.packed_row(0);
  const int group = at.column * 8 + half * 4 + at.lane % 4;
  const u32 low_row = group_scale(p, row, group) | group_scale(p, row + 8, group) << 8;
  const u32 high_row = group_scale(p, row + 16, group) | group_scale(p, row + 24, group) << 8;
  u8* slab = at.unit + at.parts * kPartBytes + at.part * E2m1::kPartSlab;
  reinterpret_cast<u32*>(slab + at.lane * 8)[half] = e4m3_word(low_row, high_row);
}

template <class Format>
__device__ __forceinline__ u64 unit_bytes(int parts) {
  return parts * (kPartBytes + Format::kPartSlab) + Format::kUnitSlab;
}

template <class Format>
__device__ __forceinline__ void pack(const PackParams& p) {
  const int slices = kPartsPerUnit / p.strips_per_block;
  const u64 block_vectors = static_cast<u64>(p.units_per_block) * kPartsPerUnit * kPartVectors;
  const u64 last = block_vectors * (p.row_blocks - 1);
  const u64 total = last + static_cast<u64>(p.units_per_block) * p.last_strips * slices * kPartVectors;
  const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 v = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; v < total; v += step) {
    const int strips = v >= last ? p.last_strips : p.strips_per_block, parts = strips * slices;
    const int block = static_cast<int>(v / block_vectors);
    const u64 within = v - block * block_vectors;
    const int vector = static_cast<int>(within % kPartVectors);
    const int part = static_cast<int>(within / kPartVectors % parts);
    const int unit = static_cast<int>(within / kPartVectors / parts);
    u8* bytes = p.image + block * (unit_bytes<Format>(kPartsPerUnit) * p.units_per_block) +
                unit * unit_bytes<Format>(parts);
    const Place at{bytes, parts, part, block * p.strips_per_block + part % strips,
                   unit * slices + part / strips, vector / 32, vector % 32};
    reinterpret_cast<uint4*>(bytes + part * kPartBytes)[vector] = gather(Format{}, p, at);
    store_slab(Format{}, p, at);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
linear_pack_bf16(const PackParams p) { pack<Bf16>(p); }

extern "C" __global__ void __launch_bounds__(256)
linear_pack_fp8_row(const PackParams p) { pack<E4m3Row>(p); }

extern "C" __global__ void __launch_bounds__(256)
linear_pack_fp8_block(const PackParams p) { pack<E4m3Block>(p); }

extern "C" __global__ void __launch_bounds__(256)
linear_pack_nvfp4(const PackParams p) { pack<E2m1>(p); }
