// KV pages of one layer: [page][2: K, V][Hk][64][D] of bf16, e4m3 or int8, and their scales.
//
// e4m3: f32 scale [page][2][Hk][64]; int8: f16 scale [page][2][Hk][64][D / 64], a group of 64
// numbers each. A page-head, [64][D], is contiguous, and so are its scales.
#pragma once

#include "dtypes.cuh"
#include "vec.cuh"

constexpr int kPageTokens = 64;

enum class KvFormat { kBf16, kFp8, kInt8 };

template <KvFormat kFormat>
__device__ __forceinline__ constexpr int code_bytes() {
  return kFormat == KvFormat::kBf16 ? 2 : 1;
}

// Bytes of the scales of a page-head.
template <KvFormat kFormat, int kDim>
__device__ __forceinline__ constexpr int scale_bytes() {
  return kFormat == KvFormat::kBf16 ? 0 : kFormat == KvFormat::kFp8 ? kPageTokens * 4 : kPageTokens * (kDim / 64) * 2;
}

// Number of a page-head; `part` is 0 for keys, 1 for values.
__device__ __forceinline__ u64 page_head(int page, int part, int kv_heads, int kv_head) {
  return (static_cast<u64>(page) * 2 + part) * kv_heads + kv_head;
}

__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two 8-bit numbers as a bf16 pair, exactly: byte kLow of `a` in the low half, byte kHigh of `b` in
// the high half.
template <KvFormat kFormat, int kLow, int kHigh>
__device__ __forceinline__ u32 code_pair(u32 a, u32 b) {
  if constexpr (kFormat == KvFormat::kFp8) {
    // The byte on top of each half; its exponent and mantissa moved to the low end of bf16's.
    const u32 spread = __byte_perm(a, b, kLow << 4 | (kHigh + 4) << 12);
    return mul_bf16x2((spread & 0x80008000u) | ((spread >> 4) & 0x07f007f0u), kTwoTo120);
  } else {
    // 128 + the low seven bits, minus 128 or 256: all of them whole numbers that bf16 holds.
    const u32 spread = __byte_perm(a, b, kLow | (kHigh + 4) << 8);
    return add_bf16x2((spread & 0x007f007fu) | 0x43004300u, (spread & 0x00800080u) | 0xc300c300u);
  }
}
