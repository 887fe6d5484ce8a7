// Tiles of sorted pairs: the list that moe_pairs leaves, and images of their rows.
//
// An image holds a tile's rows in stages of 64 columns, 16 KiB each: 128 rows of 128 bytes, as the
// tensor cores of 9.0 read them (wgmma.cuh), with pairs of columns in the order of the fragments of
// a packed matrix. Image j of a matrix with S stages starts at j * S * 16 KiB.
#pragma once

#include "vec.cuh"

constexpr int kTileTokens = 128;  // most sorted positions of a tile; all of one expert
constexpr int kStageColumns = 64;
constexpr u32 kRowBytes = kStageColumns * 2;
constexpr u32 kXBytes = kTileTokens * kRowBytes;  // of a stage

// Where word `word` of 16-byte vector `vector` of an image's row comes from: pair of columns in the
// stage. `run` columns in a row are a lane's: product m takes two pairs of each, first of all lanes.
__device__ __forceinline__ int pair_at(int vector, int word, int run) {
  return run == 16 ? word * 8 + vector : vector / 4 * 16 + word * 4 + vector % 4;
}

// Byte offset of a vector in a stage.
__device__ __forceinline__ u32 vector_offset(int row, int vector) { return row * kRowBytes + (vector ^ row % 8) * 16; }
