// Tiles of bf16 matrices in shared memory: asynchronous copies in, mma fragments out (ldmatrix).
//
// A tile is row-major with a pitch of its width plus 8 numbers: eight rows of 16 bytes then lie in
// different banks. Addresses are shared-memory addresses, pitches in numbers.
#pragma once

#include "matrix_load.cuh"
#include "vec.cuh"

constexpr int kTilePad = 8;

// Copies kRows x kColumns from global rows `stride` apart; rows from `real_rows` on become zeros.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void copy_tile(u32 tile, const u16* from, u64 stride, int real_rows,
                                          int thread) {
  constexpr int kVectors = kColumns / 8, kTotal = kRows * kVectors;
#pragma unroll 4
  for (int i = thread; i < kTotal; i += kThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    const bool is_real = row < real_rows;
    copy_shared_16(tile + 2 * (row * (kColumns + kTilePad) + vector * 8),
                   from + (is_real ? row * stride : 0) + vector * 8, is_real);
  }
}

__device__ __forceinline__ uint2 load_matrix_pair_transposed(u32 address) {
  uint2 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(m.x), "=r"(m.y)
               : "r"(address)
               : "memory");
  return m;
}

// A (16 x 16) at rows m.., columns k.. of a tile that holds A as it is.
__device__ __forceinline__ uint4 load_a(u32 tile, int pitch, int m, int k, int lane) {
  return load_matrices(tile + 2 * ((m + lane % 16) * pitch + k + lane / 16 * 8));
}

// A (16 x 16) at rows m.., columns k.. of a tile that holds A transposed, [k][m].
__device__ __forceinline__ uint4 load_a_transposed(u32 tile, int pitch, int m, int k, int lane) {
  return load_matrices_transposed(
      tile + 2 * ((k + lane / 16 * 8 + lane % 8) * pitch + m + lane / 8 % 2 * 8));
}

// Two B (16 x 8) at rows k.., columns n.. and n + 8.. of a tile that holds B transposed, [n][k].
__device__ __forceinline__ uint4 load_b_transposed(u32 tile, int pitch, int k, int n, int lane) {
  return load_matrices(tile + 2 * ((n + lane / 16 * 8 + lane % 8) * pitch + k + lane / 8 % 2 * 8));
}

// kTiles B (16 x 8) at rows k.., columns n, n + 8, .. of a tile that holds B as it is, [k][n].
template <int kTiles>
__device__ __forceinline__ void load_b(u32 (&b)[kTiles][2], u32 tile, int pitch, int k, int n,
                                       int lane) {
  if constexpr (kTiles == 1) {
    const uint2 m = load_matrix_pair_transposed(tile + 2 * ((k + lane % 16) * pitch + n));
    b[0][0] = m.x, b[0][1] = m.y;
  } else {
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      const uint4 m = load_matrices_transposed(
          tile + 2 * ((k + lane % 16) * pitch + n + i * 8 + lane / 16 * 8));
      b[i][0] = m.x, b[i][1] = m.y;
      b[i + 1][0] = m.z, b[i + 1][1] = m.w;
    }
  }
}
