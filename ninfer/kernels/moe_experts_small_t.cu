// moe_experts_small_t: products of routed experts for few columns, and the combination of ranks.
//
// Contracts: ninfer/ops/moe_experts_small_t.py and ninfer/ops/moe_combine.py. Entries:
//   moe_experts_small_t_<format>   block (strip of 32 rows, sorted position): the block at an
//                                  expert's first pair reads the strip once for all its pairs
//   moe_combine_<f32 or bf16>      one block a token
//
// The eight warps of a block take every eighth part along K, up to four parts in flight each, and
// multiply on tensor cores; their sums meet in shared memory and are added in the order of warps.
// So a pair's numbers depend on its own input row and the weights alone. Bytes: the weights of the
// experts in use, once for up to 16 pairs.

#include "dtypes.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "square_sums.cuh"
#include "vec.cuh"
#include "weight_image.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kTiles = 2;   // of 8 pairs
constexpr int kColumns = kTiles * 8;
constexpr int kSums = 2 * kTiles * 4;

struct ExpertParams {
  const u8* images;           // [E] images, one after another
  const float* row_scales;    // [E, N] f32 or null
  const u16* x;               // [rows, K] bf16
  void* y;                    // [P, N / 2] bf16 (swiglu) or [P, N] f32
  const int* order;           // [P] pair at a sorted position
  const int* sorted_experts;  // [P]
  const int* offsets;         // [E + 1] first sorted position of an expert
  u64 image_bytes;
  ImageShape shape;
  int pairs_per_row;          // pair / this is the row of x
  int x_stride, y_stride;
  int is_gated;
};
static_assert(sizeof(ExpertParams) == 104, "ninfer/ops/moe_experts_small_t.py mirrors this struct");

struct CombineParams {
  const void* routed;        // [P, C] f32 or bf16
  const float* weights;      // [T, k]
  const int* positions;      // [P] row of routed for a pair, or null: the pair
  const void* shared;        // [T, C] f32 or bf16, or null
  const float* shared_gate;  // [T] or null
  const u16* residual;       // [T, C] bf16
  u16* y;                    // [T, C] bf16
  float* square_sums;        // [T, ceil(C / 32)] f32 or null
  int columns, experts_per_token, residual_stride, y_stride;
};
static_assert(sizeof(CombineParams) == 80, "ninfer/ops/moe_combine.py mirrors this struct");

__device__ __forceinline__ float silu(float gate) { return gate / (1.f + __expf(-gate)); }

__device__ __forceinline__ uint4 load_run(const u16* row, int column, int columns) {
  if (column >= columns) return make_uint4(0, 0, 0, 0);
  return __ldcg(reinterpret_cast<const uint4*>(row + column));
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// sums[tile of rows][tile of pairs] += the part times x's columns.
template <class Format>
__device__ __forceinline__ void multiply_part(const uint4 (&weights)[2][2], const u8* slab,
                                              const u16* const (&rows)[kTiles], int first, int columns, int lane,
                                              float (&sums)[2][kTiles][4]) {
  constexpr int kVectors = Format::kRun / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 x[kTiles][kVectors];
    const int run = Format::kRuns == 2 ? first + half * (Format::kPartColumns / 2) : first;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        x[tile][v] = load_run(rows[tile], run + lane % 4 * Format::kRun + v * 8, columns);
      }
    }
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) {
      for_fragments(Format{}, weights[half][row_tile], slab, half, row_tile, lane, [&](int m, uint4 a) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          mma_bf16_16x8x16(sums[row_tile][tile], a, word_of(x[tile][m / 2], m % 2 * 2),
                           word_of(x[tile][m / 2], m % 2 * 2 + 1));
        }
      });
    }
  }
}

template <class Format>
__device__ __forceinline__ void multiply_strip(const ExpertParams& p, const u8* image, int strip,
                                               const u16* const (&rows)[kTiles], int warp, int lane,
                                               float (&sums)[2][kTiles][4]) {
  constexpr int kInFlight = 2;
  const int parts = (p.shape.columns + Format::kPartColumns - 1) / Format::kPartColumns;
  for (int first = warp; first < parts; first += kWarps * kInFlight) {
    uint4 weights[kInFlight][2][2];
    const u8* slabs[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int column = min(first + i * kWarps, parts - 1);
      const ImagePart part = image_part<Format>(image, p.shape, strip, column);
      slabs[i] = part.slab;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        weights[i][v / 2][v % 2] = __ldg(reinterpret_cast<const uint4*>(part.bytes) + v * 32 + lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int column = first + i * kWarps;
      if (column >= parts) break;
      if constexpr (Format::kUnitSlab > 0) {
        float part_sums[2][kTiles][4] = {};
        multiply_part<Format>(weights[i], slabs[i], rows, column * Format::kPartColumns, p.shape.columns, lane,
                              part_sums);
        const float2 scales = __ldg(reinterpret_cast<const float2*>(slabs[i]));
#pragma unroll
        for (int c = 0; c < kSums; ++c) {
          (&sums[0][0][0])[c] += (c % 4 < 2 ? scales.x : scales.y) * (&part_sums[0][0][0])[c];
        }
      } else {
        multiply_part<Format>(weights[i], slabs[i], rows, column * Format::kPartColumns, p.shape.columns, lane,
                              sums);
      }
    }
  }
}

// Adds the warps' sums in their order; the first warp gets them.
__device__ __forceinline__ void add_warps(float* scratch, int warp, int lane, float (&sums)[2][kTiles][4]) {
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kSums; ++c) scratch[(warp * kSums + c) * 32 + lane] = (&sums[0][0][0])[c];
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int c = 0; c < kSums; ++c) {
    float sum = (&sums[0][0][0])[c];
    for (int other = 1; other < kWarps; ++other) sum += scratch[(other * kSums + c) * 32 + lane];
    (&sums[0][0][0])[c] = sum;
  }
}

__device__ __forceinline__ void store_sums(const ExpertParams& p, const float* row_scale, int strip, int first,
                                           int count, int lane, float (&sums)[2][kTiles][4]) {
#pragma unroll
  for (int row_tile = 0; row_tile < 2; ++row_tile) {
    const int row = strip * 32 + row_tile * 16 + lane / 4;
    const float scale = row_scale != nullptr && row < p.shape.rows ? __ldg(row_scale + row) : 1.f;
    const float upper = row_scale != nullptr && row + 8 < p.shape.rows ? __ldg(row_scale + row + 8) : 1.f;
#pragma unroll
    for (int c = 0; c < kTiles * 2; ++c) {
      const int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
      if (column >= count) continue;
      const u64 y_row = static_cast<u64>(__ldcg(p.order + first + column)) * p.y_stride;
      const float low = sums[row_tile][c / 2][c % 2] * scale, high = sums[row_tile][c / 2][c % 2 + 2] * upper;
      if (p.is_gated) {
        // Rows 0..7 of a tile are gates, rows 8..15 their ups.
        const int inner = strip * 16 + row_tile * 8 + lane / 4;
        if (row < p.shape.rows) static_cast<u16*>(p.y)[y_row + inner] = float_to_bf16(silu(low) * high);
        continue;
      }
      if (row < p.shape.rows) static_cast<float*>(p.y)[y_row + row] = low;
      if (row + 8 < p.shape.rows) static_cast<float*>(p.y)[y_row + row + 8] = high;
    }
  }
}

template <class Format>
__device__ __forceinline__ void experts_small_t(const ExpertParams& p) {
  __shared__ float scratch[kWarps * kSums * 32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int strip = blockIdx.x, start = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert = __ldcg(p.sorted_experts + start);
  const int end = __ldcg(p.offsets + expert + 1);
  if (__ldcg(p.offsets + expert) != start) return;
  const u8* image = p.images + expert * p.image_bytes;
  const float* row_scale = p.row_scales != nullptr ? p.row_scales + static_cast<u64>(expert) * p.shape.rows : nullptr;
  for (int first = start; first < end; first += kColumns) {
    const int count = min(end - first, kColumns);
    // Pairs past the last repeat it: their products are never stored.
    const u16* rows[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int pair = __ldcg(p.order + first + min(tile * 8 + lane / 4, count - 1));
      rows[tile] = p.x + static_cast<u64>(pair / p.pairs_per_row) * p.x_stride;
    }
    float sums[2][kTiles][4] = {};
    multiply_strip<Format>(p, image, strip, rows, warp, lane, sums);
    add_warps(scratch, warp, lane, sums);
    if (warp == 0) store_sums(p, row_scale, strip, first, count, lane, sums);
  }
}

struct Eight {
  float at[8];
};

__device__ __forceinline__ Eight load_eight(const float* row, int v) {
  const float4 a = __ldcg(reinterpret_cast<const float4*>(row) + v * 2);
  const float4 b = __ldcg(reinterpret_cast<const float4*>(row) + v * 2 + 1);
  return Eight{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ Eight load_eight(const u16* row, int v) {
  const uint4 x = __ldcg(reinterpret_cast<const uint4*>(row) + v);
  const u32 words[4] = {x.x, x.y, x.z, x.w};
  Eight values;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values.at[2 * i] = __uint_as_float(words[i] << 16);
    values.at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  return values;
}

template <class Number>
__device__ __forceinline__ void combine(const CombineParams& p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int t = blockIdx.x, vectors = p.columns / 8;
  const int rounds = (vectors + blockDim.x - 1) / blockDim.x;
  for (int round = 0; round < rounds; ++round) {
    const int v = round * blockDim.x + threadIdx.x;
    uint4 y = make_uint4(0, 0, 0, 0);
    if (v < vectors) {
      Eight sum{};
      for (int rank = 0; rank < p.experts_per_token; ++rank) {
        const int pair = t * p.experts_per_token + rank;
        const int row = p.positions != nullptr ? __ldcg(p.positions + pair) : pair;
        const float weight = __ldcg(p.weights + pair);
        const Eight x = load_eight(static_cast<const Number*>(p.routed) + static_cast<u64>(row) * p.columns, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.at[i] += weight * x.at[i];
      }
      if (p.shared != nullptr) {
        const float gate = __ldcg(p.shared_gate + t);
        const Eight x = load_eight(static_cast<const Number*>(p.shared) + static_cast<u64>(t) * p.columns, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.at[i] += gate * x.at[i];
      }
      const Eight residual = load_eight(p.residual + static_cast<u64>(t) * p.residual_stride, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum.at[i] += residual.at[i];
      y = make_uint4(pack_bf16x2(sum.at[0], sum.at[1]), pack_bf16x2(sum.at[2], sum.at[3]),
                     pack_bf16x2(sum.at[4], sum.at[5]), pack_bf16x2(sum.at[6], sum.at[7]));
      reinterpret_cast<uint4*>(p.y + static_cast<u64>(t) * p.y_stride)[v] = y;
    }
    if (p.square_sums == nullptr) continue;
    const float strip = strip_sum(square_sum(y));
    if (threadIdx.x % 4 == 0 && v < vectors) store_strip_sum(p.square_sums, t, p.columns, v, strip);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
moe_experts_small_t_bf16(const ExpertParams p) { experts_small_t<ImageBf16>(p); }

extern "C" __global__ void __launch_bounds__(kThreads)
moe_experts_small_t_fp8_row(const ExpertParams p) { experts_small_t<ImageE4m3Row>(p); }

extern "C" __global__ void __launch_bounds__(kThreads)
moe_experts_small_t_fp8_block(const ExpertParams p) { experts_small_t<ImageE4m3Block>(p); }

extern "C" __global__ void __launch_bounds__(kThreads)
moe_experts_small_t_nvfp4(const ExpertParams p) { experts_small_t<ImageE2m1>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
moe_combine_f32(const CombineParams p) { combine<float>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
moe_combine_bf16(const CombineParams p) { combine<u16>(p); }
