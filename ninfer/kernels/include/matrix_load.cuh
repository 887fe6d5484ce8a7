// Four 8 x 8 matrices of 16-bit numbers from shared memory into mma fragments (ldmatrix).
//
// Lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i, 16 bytes each. Lane 4 g + q gets,
// of each matrix, row g at columns 2q, 2q + 1; transposed: column g at rows 2q, 2q + 1.
#pragma once

#include "vec.cuh"

__device__ __forceinline__ uint4 load_matrices(u32 address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_matrices_transposed(u32 address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
