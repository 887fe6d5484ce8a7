// Codecs: bf16, e4m3 and e2m1 numbers, and the shuffled words that packed weights hold.
//
// A shuffled word holds 4 (e4m3) or 8 (e2m1) numbers whose bits are spread so that a pair of bf16
// numbers, one in each half of a register, needs a mask or a mask and one shift. The bits land at
// the low end of bf16's exponent, which makes the value too small by a power of two; one exact
// multiplication puts that right. ninfer/ops/linear_packing.py builds the words.
#pragma once

#include "vec.cuh"

__device__ __forceinline__ float bf16_to_float(u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// {low, high} -> one register.
__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// a * b in bf16 pairs; subnormals count. (fma with -0: the plain product exists from 9.0 only.)
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// a + b in bf16 pairs. (fma with 1: the plain sum exists from 9.0 only.)
__device__ __forceinline__ u32 add_bf16x2(u32 a, u32 b) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return sum;
}

constexpr u32 kTwoTo120 = 0x7b807b80u;  // bf16 pair: an e4m3 pattern at bits 4..10 is 2^-120 too small
constexpr u32 kTwoTo118 = 0x7a807a80u;

// First and second pair of a shuffled e4m3 word, each 2^-120 too small.
__device__ __forceinline__ u32 e4m3_first_pair(u32 word) { return word & 0x87f087f0u; }

__device__ __forceinline__ u32 e4m3_second_pair(u32 word) {
  return ((word << 4) & 0x80f080f0u) | ((word >> 4) & 0x07000700u);
}

// The four pairs of a shuffled e2m1 word, each 2^-126 too small.
__device__ __forceinline__ uint4 e2m1_pairs(u32 word) {
  uint4 pairs;
  pairs.x = word & 0x81c081c0u;
  pairs.y = (word << 4) & 0x81c081c0u;
  pairs.z = __funnelshift_r(word, word, 6) & 0x81c081c0u;
  pairs.w = ((word << 6) & 0x80c080c0u) | ((word >> 2) & 0x01000100u);
  return pairs;
}
