// Tensor-core products on register fragments (mma.sync).
//
// Lane = 4 * g + q. A (16 x 16): a.x = row g, a.y = row g + 8 at k = 2q, 2q + 1; a.z, a.w the same
// rows at k = 2q + 8, 2q + 9. B (16 x 8): b0 = k 2q, 2q + 1 and b1 = k 2q + 8, 2q + 9 of column g.
// C (16 x 8): c[0], c[1] = row g, columns 2q, 2q + 1; c[2], c[3] = row g + 8.
#pragma once

#include "vec.cuh"

// c += a * b in bf16 with f32 accumulation; a column of c depends on the same column of b only.
__device__ __forceinline__ void mma_bf16_16x8x16(float (&c)[4], uint4 a, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
