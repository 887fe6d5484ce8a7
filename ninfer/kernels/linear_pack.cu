// linear_pack: row-major weights into the image that linear_small_t reads, once at load.
//
// Contract and layout: ninfer/ops/linear_packing.py, whose NumPy functions write the same bytes.
// Entries: linear_pack_<format>. A thread gathers one 16-byte vector from two runs of 8 bytes, one
// in row g and one in row g + 8 of a tile. Bytes: every weight read and written once.

#include "vec.cuh"

namespace {

constexpr int kStripsPerBlock = 8;
constexpr int kStripVectors = 128;  // 16-byte vectors of a strip of a unit

struct PackParams {
  const u8* codes;     // [rows, columns] bf16 or e4m3, or [rows, columns / 2] of two e2m1
  const void* scales;  // f32 [blocks of rows, blocks of columns] (fp8_block), e4m3 [rows, columns / 16]
  u8* image;
  int rows;
  int columns;
  int units_per_block;
  int row_blocks;
  int last_strips;
  int is_interleaved;  // rows are [gate; up]: take 8 of one, 8 of the other, in turn
};
static_assert(sizeof(PackParams) == 48, "ninfer/ops/linear_pack.py mirrors this struct");

struct Bf16 {
  static constexpr int kStripSlab = 0, kUnitSlab = 0;
};
struct E4m3Row : Bf16 {};
struct E4m3Block : Bf16 {
  static constexpr int kUnitSlab = 64;
};
struct E2m1 : Bf16 {
  static constexpr int kStripSlab = 256;
};

// A place in the image: `lane` of vector `part` (half * 2 + tile) of a strip of a unit.
struct Place {
  int block, unit, strip, strips, part, lane;

  __device__ __forceinline__ int packed_row(int upper) const {
    return (block * kStripsPerBlock + strip) * 32 + (part % 2) * 16 + upper * 8 + lane / 4;
  }
};

template <class Format>
__device__ __forceinline__ u8* unit_of(const PackParams& p, const Place& at) {
  constexpr int kStrip = 2048 + Format::kStripSlab;
  const u64 full = kStripsPerBlock * kStrip + Format::kUnitSlab;
  const u64 bytes = at.strips * kStrip + Format::kUnitSlab;
  return p.image + at.block * (full * p.units_per_block) + at.unit * bytes;
}

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
  const int offset = at.unit * 64 + (at.lane % 4) * 16 + (at.part / 2) * 8;
  const uint2 low = load_run(p, at.packed_row(0), offset, p.columns * 2);
  const uint2 high = load_run(p, at.packed_row(1), offset, p.columns * 2);
  return make_uint4(low.x, high.x, low.y, high.y);
}

__device__ __forceinline__ uint4 gather_e4m3(const PackParams& p, const Place& at) {
  const int offset = at.unit * 64 + (at.part / 2) * 32 + (at.lane % 4) * 8;
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
  const int offset = at.unit * 64 + (at.part / 2) * 32 + (at.lane % 4) * 8;
  const uint2 low = load_run(p, at.packed_row(0), offset, p.columns / 2);
  const uint2 high = load_run(p, at.packed_row(1), offset, p.columns / 2);
  return make_uint4(e2m1_word(low.x, high.x), e2m1_word(low.x >> 16, high.x >> 16),
                    e2m1_word(low.y, high.y), e2m1_word(low.y >> 16, high.y >> 16));
}

__device__ __forceinline__ float block_scale(const PackParams& p, int packed, int unit) {
  if (packed >= p.rows) return 0.f;
  const int part_rows = p.is_interleaved ? p.rows / 2 : p.rows;
  const int row = source_row(p, packed);
  const int scale_row = row / part_rows * ((part_rows + 127) / 128) + row % part_rows / 128;
  const int scale_columns = (p.columns + 127) / 128;
  return static_cast<const float*>(p.scales)[static_cast<u64>(scale_row) * scale_columns + unit / 2];
}

__device__ __forceinline__ u32 group_scale(const PackParams& p, int packed, int group) {
  if (packed >= p.rows || group >= p.columns / 16) return 0;
  return static_cast<const u8*>(
      p.scales)[static_cast<u64>(source_row(p, packed)) * (p.columns / 16) + group];
}

__device__ __forceinline__ void store_slab(Bf16, const PackParams&, const Place&, u8*) {}
__device__ __forceinline__ void store_slab(E4m3Row, const PackParams&, const Place&, u8*) {}

__device__ void store_slab(E4m3Block, const PackParams& p, const Place& at, u8* unit) {
  float2* slab = reinterpret_cast<float2*>(unit + at.strips * 2048);
  const Place first{at.block, at.unit, at.strip, at.strips, 0, 0};
  if (at.part == 0 && at.lane == 0) {
    slab[at.strip] = make_float2(block_scale(p, first.packed_row(0), at.unit),
                                 block_scale(p, first.packed_row(1), at.unit));
  }
  const bool is_padding = at.lane >= at.strips && at.lane < kStripsPerBlock;
  if (at.strip == 0 && at.part == 0 && is_padding) slab[at.lane] = make_float2(0.f, 0.f);
}

// Word `half`: the scales of group lane % 4 for rows g, g + 8 of the first and the second tile.
__device__ void store_slab(E2m1, const PackParams& p, const Place& at, u8* unit) {
  if (at.part % 2 != 0) return;
  const int half = at.part / 2, group = at.unit * 8 + half * 4 + at.lane % 4, row = at.packed_row(0);
  const u32 low_row = group_scale(p, row, group) | group_scale(p, row + 8, group) << 8;
  const u32 high_row = group_scale(p, row + 16, group) | group_scale(p, row + 24, group) << 8;
  u32* slab = reinterpret_cast<u32*>(unit + at.strips * 2048 + at.strip * 256 + at.lane * 8);
  slab[half] = e4m3_word(low_row, high_row);
}

template <class Format>
__device__ __forceinline__ void pack(const PackParams& p) {
  const u64 block_vectors = static_cast<u64>(p.units_per_block) * kStripsPerBlock * kStripVectors;
  const u64 last = block_vectors * (p.row_blocks - 1);
  const u64 total = last + static_cast<u64>(p.units_per_block) * p.last_strips * kStripVectors;
  const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 v = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; v < total; v += step) {
    const int strips = v >= last ? p.last_strips : kStripsPerBlock;
    const int block = static_cast<int>(v / block_vectors);
    const u64 within = v - block * block_vectors;
    const int vector = static_cast<int>(within % kStripVectors);
    const int strip = static_cast<int>(within / kStripVectors % strips);
    const int unit = static_cast<int>(within / kStripVectors / strips);
    const Place at{block, unit, strip, strips, vector / 32, vector % 32};
    u8* bytes = unit_of<Format>(p, at);
    reinterpret_cast<uint4*>(bytes + at.strip * 2048)[vector] = gather(Format{}, p, at);
    store_slab(Format{}, p, at, bytes);
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
