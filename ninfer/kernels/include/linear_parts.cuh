// Parts of a weight image on tensor cores: what a warp of linear_small_t loads and multiplies.
//
// Image: ninfer/ops/linear_packing.py. A part is 32 rows by kPartColumns columns, two halves along
// K. kWarpsPerPart 2: a warp takes one half, so that twice the warps decode; 1: a warp takes both.
#pragma once

#include "dtypes.cuh"
#include "mma.cuh"
#include "vec.cuh"

constexpr int kPartsPerUnit = 8;
constexpr int kStripRows = 32;  // rows of a part: two tiles of 16
constexpr u32 kPartBytes = 2048;

struct Bf16 {
  static constexpr int kPartColumns = 32, kWarpsPerPart = 1;
  static constexpr u32 kPartSlab = 0, kUnitSlab = 0;
  static constexpr int kLaneBytes = 16;  // of x that a lane reads from a half (bf16: from both)
  static constexpr int kPitchPad = 32;   // elements; makes fragment reads free of bank conflicts
  static constexpr bool kScalesUnit = false, kScalesRows = false;
};

struct E4m3Row : Bf16 {
  static constexpr int kPartColumns = 64, kWarpsPerPart = 2;
  static constexpr bool kScalesRows = true;
};

struct E4m3Block : E4m3Row {
  static constexpr u32 kUnitSlab = 64;  // a part: f32 of rows g, f32 of rows g + 8
  static constexpr bool kScalesUnit = true, kScalesRows = false;
};

struct E2m1 : Bf16 {
  static constexpr int kPartColumns = 128, kWarpsPerPart = 1;
  static constexpr u32 kPartSlab = 256;  // e4m3 a row and 16 columns
  static constexpr int kLaneBytes = 32;
  static constexpr int kPitchPad = 8;
  static constexpr bool kScalesRows = true;
};

template <class Format>
__device__ __forceinline__ u32 unit_bytes(int parts) {
  return parts * (kPartBytes + Format::kPartSlab) + Format::kUnitSlab;
}

// Sums of a strip: 32 rows by kTiles tiles of 8 columns t.
template <int kTiles>
struct Accumulators {
  float at[2][kTiles][4];  // row tile, column tile, fragment
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles * 4; ++i) (&at[0][0][0])[i] = 0.f;
  }
};

// A warp's share of a part, in registers: [half][row tile] vectors, and its scales.
template <class Format>
struct Part {
  static constexpr int kHalves = 2 / Format::kWarpsPerPart;
  uint4 weights[kHalves][2];
  uint2 slab;
};

// Where the scales of a warp's share of part `part` lie in a unit's slab.
template <class Format>
__device__ __forceinline__ u32 part_slab(int part, int half, int lane) {
  return Format::kScalesUnit ? part * 8 : part * Format::kPartSlab + lane * 8 + half * 4;
}

// Copies a lane's share of a part from its first vector, and its scales.
template <class Format>
__device__ __forceinline__ Part<Format> load_part(u32 from, u32 slab) {
  Part<Format> loaded{};
#pragma unroll
  for (int i = 0; i < 2 * Part<Format>::kHalves; ++i) {
    loaded.weights[i / 2][i % 2] = load_shared_16(from + i * 512);
  }
  if constexpr (Format::kScalesUnit) {
    loaded.slab = load_shared_8(slab);
  } else if constexpr (Format::kPartSlab > 0 && Part<Format>::kHalves == 2) {
    loaded.slab = load_shared_8(slab);
  } else if constexpr (Format::kPartSlab > 0) {
    loaded.slab.x = load_shared_4(slab);
  }
  return loaded;
}

template <class Format>
__device__ __forceinline__ u32 word_of_each_load(const Part<Format>& part) {
  u32 word = part.slab.x;
#pragma unroll
  for (int i = 0; i < 2 * Part<Format>::kHalves; ++i) word ^= part.weights[i / 2][i % 2].x;
  return word;
}

template <int kTiles>
__device__ __forceinline__ void multiply(Accumulators<kTiles>& sum, int row_tile, uint4 a,
                                         const u32 (&b0)[kTiles], const u32 (&b1)[kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    mma_bf16_16x8x16(sum.at[row_tile][tile], a, b0[tile], b1[tile]);
  }
}

// kVectors neighbouring 16-byte vectors of x a column tile, as 4 * kVectors operand words.
template <int kVectors, int kTiles>
__device__ __forceinline__ void load_columns(const u32 (&columns)[kTiles], u32 offset, u32 (&b)[4 * kVectors][kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 x = load_shared_16(columns[tile] + offset + i * 16);
      b[4 * i][tile] = x.x, b[4 * i + 1][tile] = x.y, b[4 * i + 2][tile] = x.z, b[4 * i + 3][tile] = x.w;
    }
  }
}

// sum += part * x; `columns` are the addresses of x's fragments.
template <int kTiles>
__device__ __forceinline__ void multiply_part(Accumulators<kTiles>& sum, const Part<Bf16>& part,
                                              const u32 (&columns)[kTiles]) {
  u32 b[4][kTiles];
  load_columns<1>(columns, 0, b);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) {
      multiply(sum, row_tile, part.weights[half][row_tile], b[2 * half], b[2 * half + 1]);
    }
  }
}

__device__ __forceinline__ uint4 e4m3_fragment(u32 low_word, u32 high_word) {
  return make_uint4(mul_bf16x2(e4m3_first_pair(low_word), kTwoTo120),
                    mul_bf16x2(e4m3_second_pair(low_word), kTwoTo120),
                    mul_bf16x2(e4m3_first_pair(high_word), kTwoTo120),
                    mul_bf16x2(e4m3_second_pair(high_word), kTwoTo120));
}

// sum += 16 rows of a part of e4m3 numbers times x.
template <int kTiles>
__device__ __forceinline__ void multiply_e4m3(Accumulators<kTiles>& sum, int row_tile, uint4 w,
                                              const u32 (&b)[4][kTiles]) {
  multiply(sum, row_tile, e4m3_fragment(w.x, w.y), b[0], b[1]);
  multiply(sum, row_tile, e4m3_fragment(w.z, w.w), b[2], b[3]);
}

template <int kTiles>
__device__ __forceinline__ void multiply_part(Accumulators<kTiles>& sum, const Part<E4m3Row>& part,
                                              const u32 (&columns)[kTiles]) {
#pragma unroll
  for (int half = 0; half < Part<E4m3Row>::kHalves; ++half) {
    u32 b[4][kTiles];
    load_columns<1>(columns, half * E4m3Row::kPartColumns, b);
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) multiply_e4m3(sum, row_tile, part.weights[half][row_tile], b);
  }
}

// One scale for rows g of the tiles and one for rows g + 8, applied to the sums of the part.
template <int kTiles>
__device__ __forceinline__ void multiply_part(Accumulators<kTiles>& sum, const Part<E4m3Block>& part,
                                              const u32 (&columns)[kTiles]) {
  constexpr int kHalves = Part<E4m3Block>::kHalves;
  u32 b[kHalves][4][kTiles];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) load_columns<1>(columns, half * E4m3Block::kPartColumns, b[half]);
#pragma unroll
  for (int row_tile = 0; row_tile < 2; ++row_tile) {
    Accumulators<kTiles> unscaled;
    unscaled.clear();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) multiply_e4m3(unscaled, 0, part.weights[half][row_tile], b[half]);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const float scale = __uint_as_float(i % 4 < 2 ? part.slab.x : part.slab.y);
      sum.at[row_tile][i / 4][i % 4] += scale * unscaled.at[0][i / 4][i % 4];
    }
  }
}

// Scale pairs {row g, row g + 8} of a half's two row tiles, as bf16 pairs that also carry 2^118 of the
// 2^126 by which e2m1 patterns are too small; the 2^8 left is in row_scale.
__device__ __forceinline__ void e2m1_scales(u32 slab, u32 (&low)[2], u32 (&high)[2]) {
  const u32 pairs[2] = {e4m3_first_pair(slab), e4m3_second_pair(slab)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 scale = mul_bf16x2(mul_bf16x2(pairs[i], kTwoTo120), kTwoTo118);
    low[i] = __byte_perm(scale, scale, 0x1010);
    high[i] = __byte_perm(scale, scale, 0x3232);
  }
}

template <int kTiles>
__device__ __forceinline__ void multiply_part(Accumulators<kTiles>& sum, const Part<E2m1>& part,
                                              const u32 (&columns)[kTiles]) {
  constexpr int kHalves = Part<E2m1>::kHalves;
  u32 low[kHalves][2], high[kHalves][2];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) e2m1_scales(half == 0 ? part.slab.x : part.slab.y, low[half], high[half]);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    u32 b[8][kTiles];
    load_columns<2>(columns, half * E2m1::kPartColumns, b);
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) {
      const u32 by_low = low[half][row_tile], by_high = high[half][row_tile];
      const uint4 w = part.weights[half][row_tile];
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint4 pairs = e2m1_pairs(words[m]);
        const uint4 a = make_uint4(mul_bf16x2(pairs.x, by_low), mul_bf16x2(pairs.y, by_high),
                                   mul_bf16x2(pairs.z, by_low), mul_bf16x2(pairs.w, by_high));
        multiply(sum, row_tile, a, b[2 * m], b[2 * m + 1]);
      }
    }
  }
}
