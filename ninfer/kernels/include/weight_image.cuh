// The weight image of ninfer/ops/linear_packing.py: where a part lies, and its words as fragments.
//
// A part is 32 rows by kPartColumns columns: vectors [half along K][tile of 16 rows] of 16 bytes a
// lane. Lane 4 * g + q multiplies rows g and g + 8 of a tile with a run of x that starts at column
// run_of(lane) of the part.
#pragma once

#include "dtypes.cuh"
#include "mma.cuh"
#include "vec.cuh"

constexpr int kImagePartsPerUnit = 8;
constexpr int kImagePartBytes = 2048;

struct ImageBf16 {
  static constexpr int kPartColumns = 32, kPartSlab = 0, kUnitSlab = 0, kRun = 8, kRuns = 1;
  static constexpr bool kHasRowScale = false;
};
struct ImageE4m3Row {
  static constexpr int kPartColumns = 64, kPartSlab = 0, kUnitSlab = 0, kRun = 8, kRuns = 2;
  static constexpr bool kHasRowScale = true;
};
struct ImageE4m3Block {
  static constexpr int kPartColumns = 64, kPartSlab = 0, kUnitSlab = 64, kRun = 8, kRuns = 2;
  static constexpr bool kHasRowScale = false;
};
struct ImageE2m1 {
  static constexpr int kPartColumns = 128, kPartSlab = 256, kUnitSlab = 0, kRun = 16, kRuns = 2;
  static constexpr bool kHasRowScale = true;
};

// Sizes of an image; the same for every expert of a layer.
struct ImageShape {
  int rows, columns, units_per_block, row_blocks, strips_per_block, last_strips;
};

struct ImagePart {
  const u8* bytes;
  const u8* slab;
};

template <class Format>
__device__ __forceinline__ u64 image_unit_bytes(int parts) {
  return parts * (kImagePartBytes + Format::kPartSlab) + Format::kUnitSlab;
}

// Part `column` along K of a strip.
template <class Format>
__device__ __forceinline__ ImagePart image_part(const u8* image, const ImageShape& shape, int strip, int column) {
  constexpr int kSlab = Format::kPartSlab > 0 ? Format::kPartSlab : Format::kUnitSlab / kImagePartsPerUnit;
  const int slices = kImagePartsPerUnit / shape.strips_per_block;
  const int block = strip / shape.strips_per_block;
  const int strips = block == shape.row_blocks - 1 ? shape.last_strips : shape.strips_per_block;
  const int parts = strips * slices, part = column % slices * strips + strip % shape.strips_per_block;
  const u8* unit = image +
                   static_cast<u64>(block) * shape.units_per_block * image_unit_bytes<Format>(kImagePartsPerUnit) +
                   column / slices * image_unit_bytes<Format>(parts);
  return ImagePart{unit + part * kImagePartBytes, unit + parts * kImagePartBytes + part * kSlab};
}

// Tensor-core operands of vector (half, tile): f(product, a) for the products along the lane's run,
// where product m takes 4 columns of the run from 4 * m.
template <class Function>
__device__ __forceinline__ void for_fragments(ImageBf16, uint4 w, const u8*, int half, int, int, Function f) {
  f(half, w);
}

template <class Function>
__device__ __forceinline__ void for_e4m3_fragments(uint4 w, Function f) {
  f(0, make_uint4(mul_bf16x2(e4m3_first_pair(w.x), kTwoTo120), mul_bf16x2(e4m3_second_pair(w.x), kTwoTo120),
                  mul_bf16x2(e4m3_first_pair(w.y), kTwoTo120), mul_bf16x2(e4m3_second_pair(w.y), kTwoTo120)));
  f(1, make_uint4(mul_bf16x2(e4m3_first_pair(w.z), kTwoTo120), mul_bf16x2(e4m3_second_pair(w.z), kTwoTo120),
                  mul_bf16x2(e4m3_first_pair(w.w), kTwoTo120), mul_bf16x2(e4m3_second_pair(w.w), kTwoTo120)));
}

template <class Function>
__device__ __forceinline__ void for_fragments(ImageE4m3Row, uint4 w, const u8*, int, int, int, Function f) {
  for_e4m3_fragments(w, f);
}

template <class Function>
__device__ __forceinline__ void for_fragments(ImageE4m3Block, uint4 w, const u8*, int, int, int, Function f) {
  for_e4m3_fragments(w, f);
}

// Scales come as bf16 pairs {row g, row g + 8} that carry 2^118 of the 2^126 that e2m1 patterns
// lack; the 2^8 left is in the row scale. `word` is word lane * 2 + half of the part's slab.
template <class Function>
__device__ __forceinline__ void for_e2m1_fragments(uint4 w, u32 word, int tile, Function f) {
  const u32 pair = tile == 0 ? e4m3_first_pair(word) : e4m3_second_pair(word);
  const u32 scale = mul_bf16x2(mul_bf16x2(pair, kTwoTo120), kTwoTo118);
  const u32 low = __byte_perm(scale, scale, 0x1010), high = __byte_perm(scale, scale, 0x3232);
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const uint4 pairs = e2m1_pairs(words[m]);
    f(m, make_uint4(mul_bf16x2(pairs.x, low), mul_bf16x2(pairs.y, high), mul_bf16x2(pairs.z, low),
                    mul_bf16x2(pairs.w, high)));
  }
}

template <class Function>
__device__ __forceinline__ void for_fragments(ImageE2m1, uint4 w, const u8* slab, int half, int tile, int lane,
                                              Function f) {
  for_e2m1_fragments(w, __ldg(reinterpret_cast<const u32*>(slab) + lane * 2 + half), tile, f);
}
