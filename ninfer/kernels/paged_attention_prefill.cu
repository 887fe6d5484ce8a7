// paged_attention_prefill: causal attention of one sequence's newest columns over its pages.
//
// Contract: ninfer/ops/paged_attention_prefill.py. Entries
//   paged_attention_prefill_<kv dtype>_<head_dim>_<rows>   128 queries a block, 64 where 128 queries
//                                                          of 256 dimensions do not fit; heads of 32
//                                                          as 64, the upper half zeros
//
// A query is a column and a head of the KV head's group, packed column by column, so that a tile of
// queries shares its keys. Online softmax over pages of 64 keys (Dao 2023, arXiv:2307.08691): a warp
// keeps 16 queries, their probabilities and outputs in registers, mma m16n8k16. Keys of the next page
// arrive while values are used, values while keys are. 8-bit pages become bf16 in shared memory,
// scale included. Tiles with the most keys start first.
// FLOP: 4 D for every query and visible key. Bytes: K and V once a tile, from L2 but for the first.

#include "copy_groups.cuh"
#include "dtypes.cuh"
#include "exponent.cuh"
#include "kv_pages.cuh"
#include "matrix_load.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr float kNever = -3.40282347e38f;
constexpr int kKeyTiles = kPageTokens / 8;

struct PagedPrefillParams {
  const u16* q;           // [T, H, stored D] bf16
  const u8* pages;        // one layer's
  const u8* scales;       // one layer's, null for bf16
  const int* page_table;  // [max_pages]
  const int* ordinals;    // [T], negative: a column of padding
  const u16* gate;        // [T, ..]: gate of head h at h * 2 D + D, null: none
  u16* y;                 // [T, H * D] bf16
  int tokens, heads, kv_heads, group, gate_stride, y_stride;
  float scale_log2e;
  int padding;
};
static_assert(sizeof(PagedPrefillParams) == 88, "ninfer/ops/paged_attention_prefill.py mirrors this struct");

// Heads of kHeadDim numbers in places of kDim, zeros behind them.
template <KvFormat kFormat, int kDim, int kWarps, int kHeadDim>
struct Prefill {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kTileBytes = kPageTokens * kRowBytes;
  static constexpr int kCodeBytes = kDim * code_bytes<kFormat>();
  static constexpr int kScaleBytes = scale_bytes<kFormat, kDim>();
  static constexpr int kDimTiles = kDim / 8;

  const PagedPrefillParams& p;
  u8* queries;  // [kRows][D] bf16, 16-byte vectors swizzled
  u8* keys;     // [64][D] the same
  u8* values;
  u8* key_scales;
  u8* value_scales;
  int thread, warp, lane, first_query, kv_head;
  float scores[kKeyTiles][4];   // of queries g and g + 8
  float outputs[kDimTiles][4];
  float most[2], mass[2];

  // Rows 0..7 of any 16-byte column lie in different banks.
  static __device__ __forceinline__ int place(int row, int vector) {
    return row * kRowBytes + (vector ^ (row & 7)) * 16;
  }

  // From the place of vector 0 or 1 of a row to that of vector v + 0 or 1, v even.
  static __device__ __forceinline__ u32 move(u32 address, int v) { return (address ^ v % 8 * 16) + v / 8 * 128; }

  __device__ __forceinline__ void load_queries() {
    constexpr int kVectors = kDim / 8;
#pragma unroll 4
    for (int index = thread; index < kRows * kVectors; index += kThreads) {
      const int r = index / kVectors, vector = index % kVectors;
      const int query = first_query + r, t = query / p.group;
      const bool is_real = t < p.tokens;
      const u64 head = static_cast<u64>(is_real ? t : 0) * p.heads + kv_head * p.group + (query - t * p.group);
      copy_shared_16(shared_address(queries + place(r, vector)), p.q + head * kDim + vector * 8, is_real);
    }
  }

  // Queues a page-head's copy; rows that hold no key become zeros: 0 times what is no number is none.
  __device__ __forceinline__ void load_page(u8* tile, u8* scales, int page, int part, int rows) {
    constexpr int kVectors = kCodeBytes / 16;
    const u64 head = page_head(page, part, p.kv_heads, kv_head);
    const u8* from = p.pages + head * kPageTokens * kCodeBytes;
#pragma unroll 4
    for (int i = 0; i < kPageTokens * kVectors / kThreads; ++i) {
      const int index = i * kThreads + opaque(thread);
      const int row = index / kVectors, vector = index % kVectors;
      const int offset = kFormat == KvFormat::kBf16 ? place(row, vector) : index * 16;
      copy_shared_16(shared_address(tile + offset), from + index * 16, row < rows);
    }
    if constexpr (kScaleBytes > 0) {
      if (thread < kScaleBytes / 16) {
        copy_shared_16(shared_address(scales + thread * 16), p.scales + head * kScaleBytes + thread * 16, true);
      }
    }
  }

  // Codes of a page-head, row-major at the front of its tile, to bf16 in its places. The second half
  // of the rows goes where no codes lie; the first half is read whole before it is written.
  __device__ __forceinline__ void decode(u8* tile, const u8* scales, int rows) {
    if constexpr (kFormat != KvFormat::kBf16) {
      constexpr int kCount = kPageTokens * kDim / 16 / kThreads, kFirst = (kCount + 1) / 2;
#pragma unroll
      for (int i = kFirst; i < kCount; ++i) {
        const int index = i * kThreads + thread;
        decode_vector(tile, scales, rows, index, reinterpret_cast<const uint4*>(tile)[index]);
      }
      uint4 codes[kFirst];
#pragma unroll
      for (int i = 0; i < kFirst; ++i) codes[i] = reinterpret_cast<const uint4*>(tile)[i * kThreads + thread];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kFirst; ++i) decode_vector(tile, scales, rows, i * kThreads + thread, codes[i]);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void decode_vector(u8* tile, const u8* scales, int rows, int index, uint4 codes) {
    constexpr int kVectors = kDim / 16;
    index = opaque(index);
    const int row = index / kVectors, vector = index % kVectors;
    const float scale = row < rows ? scale_of(scales, row, vector) : 0.f;
    const uint2 a = scaled(codes.x, scale), b = scaled(codes.y, scale);
    const uint2 c = scaled(codes.z, scale), d = scaled(codes.w, scale);
    *reinterpret_cast<uint4*>(tile + place(row, 2 * vector)) = make_uint4(a.x, a.y, b.x, b.y);
    *reinterpret_cast<uint4*>(tile + place(row, 2 * vector + 1)) = make_uint4(c.x, c.y, d.x, d.y);
  }

  static __device__ __forceinline__ float scale_of(const u8* scales, int row, int vector) {
    if constexpr (kFormat == KvFormat::kFp8) return reinterpret_cast<const float*>(scales)[row];
    return half_to_float(reinterpret_cast<const u16*>(scales)[row * (kDim / 64) + vector / 4]);
  }

  // Four codes, scaled and rounded to bf16.
  static __device__ __forceinline__ uint2 scaled(u32 codes, float scale) {
    const u32 low = code_pair<kFormat, 0, 1>(codes, codes), high = code_pair<kFormat, 2, 3>(codes, codes);
    return make_uint2(scaled_pair(low, scale), scaled_pair(high, scale));
  }

  static __device__ __forceinline__ u32 scaled_pair(u32 pair, float scale) {
    return pack_bf16x2(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
  }

  // S = Q K^T of the warp's queries.
  __device__ __forceinline__ void score() {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = 0.f;
    }
    const u32 query_address = shared_address(queries + place(16 * warp + lane % 16, lane / 16));
    const u32 key_address = shared_address(keys + place(lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint4 a = load_matrices(move(query_address, 2 * k));
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        const uint4 b = load_matrices(move(key_address, 2 * k) + 8 * n * kRowBytes);
        mma_bf16_16x8x16(scores[n], a, b.x, b.y);
        mma_bf16_16x8x16(scores[n + 1], a, b.z, b.w);
      }
    }
  }

  // Hides keys after the last visible one of queries g and g + 8.
  __device__ __forceinline__ void mask(int first_key, const int (&last)[2]) {
    if (first_key + kPageTokens - 1 <= min(last[0], last[1])) return;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + 8 * n + lane % 4 * 2 + e % 2;
        if (key > last[e / 2]) scores[n][e] = kNever;
      }
    }
  }

  // Scores become probabilities relative to the largest score so far; outputs follow.
  __device__ __forceinline__ void soften() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kNever;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const float now = fmaxf(most[half], largest * p.scale_log2e);
      const float keep = fast_exp2(most[half] - now);
      most[half] = now;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[n][e] = fast_exp2(fmaf(scores[n][e], p.scale_log2e, -now));
          sum += scores[n][e];
        }
      }
      mass[half] = mass[half] * keep + sum;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) outputs[n][2 * half] *= keep, outputs[n][2 * half + 1] *= keep;
    }
  }

  // O += P V.
  __device__ __forceinline__ void weigh() {
    const u32 value_address = shared_address(values + place(lane % 16, lane / 16));
#pragma unroll
    for (int k = 0; k < kPageTokens / 16; ++k) {
      const float(&low)[4] = scores[2 * k];
      const float(&high)[4] = scores[2 * k + 1];
      const uint4 a = make_uint4(pack_bf16x2(low[0], low[1]), pack_bf16x2(low[2], low[3]),
                                 pack_bf16x2(high[0], high[1]), pack_bf16x2(high[2], high[3]));
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 2) {
        const uint4 b = load_matrices_transposed(move(value_address, n) + 16 * k * kRowBytes);
        mma_bf16_16x8x16(outputs[n], a, b.x, b.y);
        mma_bf16_16x8x16(outputs[n + 1], a, b.z, b.w);
      }
    }
  }

  __device__ __forceinline__ void store(const int (&last)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = mass[half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int query = first_query + 16 * warp + 8 * half + lane / 4, t = query / p.group;
      if (t >= p.tokens) continue;
      const int head = kv_head * p.group + query - t * p.group, dim = lane % 4 * 2;
      const float scale = last[half] < 0 ? 0.f : 1.f / sum;
      u16* y = p.y + static_cast<u64>(t) * p.y_stride + head * kHeadDim + dim;
      const u16* gate = p.gate + static_cast<u64>(t) * p.gate_stride + (2 * head + 1) * kHeadDim + dim;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        float low = outputs[n][2 * half] * scale, high = outputs[n][2 * half + 1] * scale;
        if (p.gate != nullptr) {
          const u32 pair = __ldcg(reinterpret_cast<const u32*>(gate + 8 * n));
          low *= 1.f / (1.f + __expf(-__uint_as_float(pair << 16)));
          high *= 1.f / (1.f + __expf(-__uint_as_float(pair & 0xffff0000u)));
        }
        *reinterpret_cast<u32*>(y + 8 * n) = last[half] < 0 ? 0u : pack_bf16x2(low, high);
      }
    }
  }

  // `keys_end` keys exist; last[i] is the last one that queries g and g + 8 see.
  __device__ __forceinline__ void run(int keys_end, const int (&last)[2]) {
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) outputs[n][e] = 0.f;
    }
    most[0] = most[1] = kNever, mass[0] = mass[1] = 0.f;
    const int pages = (keys_end + kPageTokens - 1) / kPageTokens;
    if (pages > 0) {
      int page = __ldcg(p.page_table);
      load_queries();
      load_page(keys, key_scales, page, 0, keys_end);
      copy_group_commit();
      for (int i = 0; i < pages; ++i) {
        const int rows = keys_end - i * kPageTokens;
        copy_group_wait<0>();
        __syncthreads();  // the keys are there, the values before are no longer needed
        load_page(values, value_scales, page, 1, rows);
        copy_group_commit();
        if (i + 1 < pages) page = __ldcg(p.page_table + i + 1);
        decode(keys, key_scales, rows);
        score();
        mask(i * kPageTokens, last);
        __syncthreads();  // the keys are no longer needed
        if (i + 1 < pages) load_page(keys, key_scales, page, 0, rows - kPageTokens);
        copy_group_commit();
        soften();
        copy_group_wait<1>();
        __syncthreads();  // the values are there
        decode(values, value_scales, rows);
        weigh();
      }
    }
    store(last);
  }
};

// The largest ordinal of a tile's columns.
template <int kThreads>
__device__ __forceinline__ int last_ordinal(const int* ordinals, int first, int end) {
  __shared__ int lasts[kThreads / 32];
  int last = -1;
  for (int t = first + static_cast<int>(threadIdx.x); t < end; t += kThreads) last = max(last, __ldcg(ordinals + t));
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) last = max(last, __shfl_xor_sync(kAllLanes, last, step));
  if (threadIdx.x % 32 == 0) lasts[threadIdx.x / 32] = last;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) last = max(last, lasts[i]);
  return last;
}

template <KvFormat kFormat, int kDim, int kWarps, int kHeadDim = kDim>
__device__ __forceinline__ void paged_attention_prefill(const PagedPrefillParams& p) {
  using Tile = Prefill<kFormat, kDim, kWarps, kHeadDim>;
  extern __shared__ __align__(128) u8 memory[];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int tiles = gridDim.x / p.kv_heads, turn = blockIdx.x / p.kv_heads;
  const int first_query = (tiles - 1 - turn) * Tile::kRows;
  const int first_token = first_query / p.group;
  const int end_token = min(p.tokens, (first_query + Tile::kRows - 1) / p.group + 1);
  const int keys_end = last_ordinal<Tile::kThreads>(p.ordinals, first_token, end_token) + 1;
  int last[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = (first_query + 16 * warp + 8 * half + lane / 4) / p.group;
    last[half] = t < p.tokens ? __ldcg(p.ordinals + t) : -1;
  }
  u8* keys = memory + Tile::kRows * Tile::kRowBytes;
  u8* values = keys + Tile::kTileBytes;
  u8* key_scales = values + Tile::kTileBytes;
  Tile tile{p, memory, keys, values, key_scales, key_scales + Tile::kScaleBytes, thread, warp, lane,
            first_query, static_cast<int>(blockIdx.x) - turn * p.kv_heads};
  tile.run(keys_end, last);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_bf16_32_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kBf16, 64, 8, 32>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_bf16_64_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kBf16, 64, 8>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_bf16_128_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kBf16, 128, 8>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_bf16_256_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kBf16, 256, 8>(p);
}

extern "C" __global__ void __launch_bounds__(128, 1)
paged_attention_prefill_bf16_256_64(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kBf16, 256, 4>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_fp8_32_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kFp8, 64, 8, 32>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_fp8_64_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kFp8, 64, 8>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_fp8_128_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kFp8, 128, 8>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_fp8_256_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kFp8, 256, 8>(p);
}

extern "C" __global__ void __launch_bounds__(128, 1)
paged_attention_prefill_fp8_256_64(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kFp8, 256, 4>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_int8_32_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kInt8, 64, 8, 32>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_int8_64_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kInt8, 64, 8>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_int8_128_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kInt8, 128, 8>(p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
paged_attention_prefill_int8_256_128(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kInt8, 256, 8>(p);
}

extern "C" __global__ void __launch_bounds__(128, 1)
paged_attention_prefill_int8_256_64(const PagedPrefillParams p) {
  paged_attention_prefill<KvFormat::kInt8, 256, 4>(p);
}
