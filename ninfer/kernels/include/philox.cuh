// Philox4x32-10, as ninfer/ops/philox.py: random words that are a pure function of key and counter.
#pragma once

#include "vec.cuh"

__device__ __forceinline__ uint4 philox_words(u64 key, uint4 counter) {
  u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
  uint4 c = counter;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(c.x, 0xd2511f53u), low0 = c.x * 0xd2511f53u;
    const u32 high1 = __umulhi(c.z, 0xcd9e8d57u), low1 = c.z * 0xcd9e8d57u;
    c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return c;
}

__device__ __forceinline__ u32 word_of(uint4 words, int j) {
  return j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
}

// -log(-log(u)), u = (word + 1/2) / 2^32: the noise of a token whose random word this is.
__device__ __forceinline__ double exact_gumbel(u32 word) {
  return -log(-log((static_cast<double>(word) + 0.5) * 2.3283064365386963e-10));
}
