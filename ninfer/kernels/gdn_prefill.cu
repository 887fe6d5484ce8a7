// gdn_prefill: the delta rule of Gated DeltaNet over many tokens of one sequence, in chunks.
//
// Contract: ninfer/ops/gdn_prefill.py; the formulas of a chunk stand in ninfer/ops/gdn_chunked.py.
// Three kernels of one launch, C tokens a chunk:
//
//   gdn_convolve               all tokens and channels                  -> convolved
//   gdn_transform_<dk>x<C>     a block a chunk and value head           -> transform, scores, scales
//       A = strict lower of diag(beta) K K^T * D, by mma; (I + A)^-1 in f32: blocks of 16 by
//       substitution, then pairs merge; transform = (I + A)^-1 diag(beta); scores = Q K^T * D
//   gdn_chunks_<dk>x<C>x<n>    a block a value head and n columns of S, chunk after chunk:
//       X = V - diag(read) K S;  U = transform X;  Y = diag(query) Q S + scores U
//       S = exp(G_last) S + K^T diag(write) U
//
// q and k enter as convolved, in bf16 without another rounding: their lengths are factors of rows
// (`scales`) or stand in transform and scores. Every other operand of an mma is the sum of two bf16
// numbers, high and low, which leaves an error of 2^-16: with one bf16 each, states and outputs
// miss their tolerance where keys resemble each other. G_i - G_j is exponentiated, never G alone
// with a positive sign. Tokens behind the last have q = k = v = 0, beta = 0, g = 0.
//
// Expected for 8,192 tokens at Hk = 16, Hv = 48 on 132 multiprocessors: 0.1 ms to convolve (0.34
// GB), 0.15 ms to transform, 128 chunks of 3 us in 96 blocks: 0.4 ms; 2,016 mma of a chunk are
// 1.9 us of those. The tokens' bytes (projection in, y out, workspace) are 1.0 GB: 0.22 ms.

#include "copy_groups.cuh"
#include "gdn.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "tiles.cuh"
#include "warp.cuh"

namespace {

struct GdnPrefillParams {
  const u16* projection;  // [T, C] bf16
  const u16* conv;        // [Cd, width] bf16
  const float* a_log;     // [Hv]
  const float* dt_bias;   // [Hv]
  u16* windows;           // [slots] x window_stride, [Cd, width - 1] each
  float* states;          // [slots] x state_stride, [Hv, dv, dk] each
  const int* read_slots;  // [1]
  const int* write_slots; // [1]
  u16* y;                 // [T, Hv * dv] bf16
  u16* convolved;         // [T, Cd] bf16
  u16* transform;         // [chunks, Hv, 2: high, low, C, C] bf16
  u16* scores;            // likewise
  float* scales;          // [chunks, Hv, 4: read, query, write, decay, C]
  u64 window_stride;      // elements from slot to slot
  u64 state_stride;
  int projection_stride, y_stride;
  int tokens;
  int key_heads, value_heads;
  int key_dim, value_dim;
  int width;
};
static_assert(sizeof(GdnPrefillParams) == 152, "ninfer/ops/gdn_prefill.py mirrors this struct");

constexpr int kStripTokens = 32;
constexpr int kConvThreads = 128;
constexpr int kScanThreads = 256;

__device__ __forceinline__ int conv_channels(const GdnPrefillParams& p) {
  return 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
}

struct Split {
  u32 high, low;
};

// Two numbers, each as the sum of two bf16.
__device__ __forceinline__ Split split_pair(float first, float second) {
  Split s;
  s.high = pack_bf16x2(first, second);
  s.low = pack_bf16x2(first - __uint_as_float(s.high << 16),
                      second - __uint_as_float(s.high & 0xffff0000u));
  return s;
}

__device__ __forceinline__ void store_shared_4(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

// ---- convolution: a thread two channels, a block kStripTokens tokens

__device__ __forceinline__ void convolve_strip(const GdnPrefillParams& p) {
  constexpr int kAtOnce = 8;
  allow_next_kernel();
  const int channels = conv_channels(p);
  const int channel = 2 * (blockIdx.x * kConvThreads + threadIdx.x);
  const int first = blockIdx.y * kStripTokens, last = min(first + kStripTokens, p.tokens);
  const bool is_real = channel < channels;
  ConvTaps taps[2];
  if (is_real) {
    taps[0] = load_taps(p.conv, channel, p.width);
    taps[1] = load_taps(p.conv, channel + 1, p.width);
  }
  wait_for_previous_kernel();
  if (!is_real) return;
  const u16* column = p.projection + channel;
  ConvWindow window[2];
  if (first == 0) {
    const u16* windows = p.windows + static_cast<u64>(__ldcg(p.read_slots)) * p.window_stride;
    window[0] = load_window(windows, channel, p.width);
    window[1] = load_window(windows, channel + 1, p.width);
  } else {
#pragma unroll
    for (int i = 0; i < kMaxTaps - 1; ++i) {
      const u64 t = first - (kMaxTaps - 1) + i;
      const u32 pair = __ldcg(reinterpret_cast<const u32*>(column + t * p.projection_stride));
      window[0].x[i] = __uint_as_float(pair << 16);
      window[1].x[i] = __uint_as_float(pair & 0xffff0000u);
    }
  }
  for (int t = first; t < last; t += kAtOnce) {
    u32 pairs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const u64 row = min(t + i, last - 1);
      pairs[i] = __ldcg(reinterpret_cast<const u32*>(column + row * p.projection_stride));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (t + i >= last) break;
      const u32 low = convolve(window[0], taps[0], __uint_as_float(pairs[i] << 16));
      const u32 high = convolve(window[1], taps[1], __uint_as_float(pairs[i] & 0xffff0000u));
      *reinterpret_cast<u32*>(p.convolved + static_cast<u64>(t + i) * channels + channel) =
          low | high << 16;
    }
  }
  if (last == p.tokens) {
    u16* windows = p.windows + static_cast<u64>(__ldcg(p.write_slots)) * p.window_stride;
    store_window(windows, channel, p.width, window[0]);
    store_window(windows, channel + 1, p.width, window[1]);
  }
}

// ---- transform and scores of a chunk

template <int kKeyDim, int kChunk>
struct Transform {
  static constexpr int kThreads = 2 * kChunk;
  static constexpr int kPitch = kKeyDim + kTilePad;   // of k and q, in numbers
  static constexpr int kFloatPitch = kChunk + 4;      // of A and the inverse
  static constexpr int kTileBytes = kChunk * kPitch * 2;
  static constexpr int kSquareBytes = kChunk * kFloatPitch * 4;
  // The inverse takes the place of k and q once their products are done.
  static constexpr int kFirstBytes = 2 * kTileBytes > kSquareBytes ? 2 * kTileBytes : kSquareBytes;
  static constexpr int kSharedBytes = kFirstBytes + kSquareBytes;
};

struct ChunkVectors {
  float total[64];       // G
  float strength[64];    // beta
  float key_scale[64];   // 1 / |k|
  float query_scale[64]; // dk^-0.5 / |q|
  float warp_totals[2];
};

// Thread i < kChunk takes token i of the chunk; G is summed in the order of tokens by halves.
template <int kChunk>
__device__ __forceinline__ void chunk_gates(const GdnPrefillParams& p, ChunkVectors& v, int first,
                                            int head, int thread) {
  float g = 0.f, beta = 0.f;
  if (thread < kChunk && first + thread < p.tokens) {
    const int z_end = conv_channels(p) + p.value_heads * p.value_dim;
    const u16* token =
        p.projection + static_cast<u64>(first + thread) * p.projection_stride + z_end + head;
    beta = write_strength(__ldcg(token));
    g = log_decay(__ldcg(token + p.value_heads), __ldg(p.a_log + head), __ldg(p.dt_bias + head));
  }
  const int lane = thread % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(kAllLanes, g, step);
    if (lane >= step) g += before;
  }
  if (thread < kChunk) {
    v.total[thread] = g;
    v.strength[thread] = beta;
    if (lane == 31) v.warp_totals[thread / 32] = g;
  }
}

// 1 / length of one row of bf16 in shared memory.
template <int kColumns>
__device__ __forceinline__ float row_inverse_length(u32 row) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    const uint4 x = load_shared_16(row + i * 16);
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = __uint_as_float(words[j] << 16);
      const float high = __uint_as_float(words[j] & 0xffff0000u);
      sum = fmaf(low, low, sum);
      sum = fmaf(high, high, sum);
    }
  }
  return inverse_length(sum);
}

// Warp w computes rows 16 w .. of A (to shared memory) and of the scores (to global memory).
template <int kKeyDim, int kChunk>
__device__ __forceinline__ void products(const ChunkVectors& v, u32 keys, u32 queries, float* a,
                                         u16* scores, int warp, int lane) {
  using S = Transform<kKeyDim, kChunk>;
  const int g = lane / 4, q = lane % 4, m = warp * 16;
  for (int n = 0; n < kChunk; n += 16) {
    float similarity[2][4] = {}, attention[2][4] = {};
    if (n <= m) {
#pragma unroll
      for (int k = 0; k < kKeyDim; k += 16) {
        const uint4 key = load_a(keys, S::kPitch, m, k, lane);
        const uint4 query = load_a(queries, S::kPitch, m, k, lane);
        const uint4 b = load_b_transposed(keys, S::kPitch, k, n, lane);
        mma_bf16_16x8x16(similarity[0], key, b.x, b.y);
        mma_bf16_16x8x16(similarity[1], key, b.z, b.w);
        mma_bf16_16x8x16(attention[0], query, b.x, b.y);
        mma_bf16_16x8x16(attention[1], query, b.z, b.w);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = m + half * 8 + g;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int j = n + tile * 8 + 2 * q;
        float score[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = j + e;
          const float decay = i >= column ? expf(v.total[i] - v.total[column]) : 0.f;
          const float scale = decay * v.key_scale[column];
          score[e] = i >= column ? attention[tile][2 * half + e] * scale * v.query_scale[i] : 0.f;
          a[i * S::kFloatPitch + column] =
              i > column
                  ? similarity[tile][2 * half + e] * scale * v.key_scale[i] * v.strength[i]
                  : 0.f;
        }
        const Split s = split_pair(score[0], score[1]);
        u32* out = reinterpret_cast<u32*>(scores + i * kChunk + j);
        out[0] = s.high;
        out[kChunk * kChunk / 2] = s.low;
      }
    }
  }
}

// Diagonal blocks of 16: thread (block, column) substitutes down its column. The zeros to the right
// of an even block complete the upper half of the merged pair.
template <int kPitch>
__device__ __forceinline__ void invert_diagonal(const float* a, float* inverse, int thread) {
  const int start = thread / 16 * 16, column = thread % 16;
  const float* block = a + start * kPitch + start;
  float x[16];
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    float sum = row == column ? 1.f : 0.f;
#pragma unroll
    for (int l = 0; l < row; ++l) sum = fmaf(-block[row * kPitch + l], x[l], sum);
    x[row] = sum;
    inverse[(start + row) * kPitch + start + column] = sum;
    if (start % 32 == 0) inverse[row * kPitch + start * (kPitch + 1) + 16 + column] = 0.f;
  }
}

// kRows rows of a product of kSide x kSide blocks: out[r][c] = sign * sum_l left[r][l] right[l][c].
template <int kRows, int kSide, int kPitch>
__device__ __forceinline__ void block_product(const float* left, const float* right, float* out,
                                              float sign, int column) {
  float sum[kRows] = {};
#pragma unroll 2
  for (int l = 0; l < kSide; l += 4) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = right[(l + i) * kPitch + column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 w = *reinterpret_cast<const float4*>(left + r * kPitch + l);
      sum[r] = fmaf(w.w, x[3], fmaf(w.z, x[2], fmaf(w.y, x[1], fmaf(w.x, x[0], sum[r]))));
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) out[r * kPitch + column] = sign * sum[r];
}

// Pairs of inverted diagonal blocks P, Q of kSide: the corner becomes -Q^-1 R P^-1. The block of a
// over the diagonal, which nobody reads, holds the half-finished product.
template <int kSide, int kPitch>
__device__ __forceinline__ void merge_blocks(float* a, float* inverse, int thread) {
  constexpr int kRows = kSide / 4;  // of kChunk * kSide / 2 elements over 2 * kChunk threads
  const int column = thread % kSide, first_row = thread / kSide * kRows;
  const int upper = first_row / kSide * 2 * kSide, lower = upper + kSide, row = first_row % kSide;
  float* spare = a + upper * kPitch + lower;
  __syncthreads();
  block_product<kRows, kSide, kPitch>(inverse + (lower + row) * kPitch + lower,
                                      a + lower * kPitch + upper, spare + row * kPitch, 1.f, column);
  __syncthreads();
  block_product<kRows, kSide, kPitch>(spare + row * kPitch, inverse + upper * kPitch + upper,
                                      inverse + (lower + row) * kPitch + upper, -1.f, column);
}

template <int kKeyDim, int kChunk>
__device__ __forceinline__ void transform_chunk(const GdnPrefillParams& p) {
  using S = Transform<kKeyDim, kChunk>;
  constexpr int kPitch = S::kFloatPitch;
  extern __shared__ __align__(16) u8 shared[];
  __shared__ ChunkVectors v;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunk = blockIdx.x, head = blockIdx.y, first = chunk * kChunk;
  const int key_head = head / (p.value_heads / p.key_heads), real = min(kChunk, p.tokens - first);
  const u32 queries = shared_address(shared), keys = queries + S::kTileBytes;
  float* inverse = reinterpret_cast<float*>(shared);
  float* a = reinterpret_cast<float*>(shared + S::kFirstBytes);
  allow_next_kernel();
  wait_for_previous_kernel();

  const u64 channels = conv_channels(p);
  const u16* q = p.convolved + first * channels + key_head * kKeyDim;
  copy_tile<kChunk, kKeyDim, S::kThreads>(queries, q, channels, real, thread);
  copy_tile<kChunk, kKeyDim, S::kThreads>(keys, q + p.key_heads * kKeyDim, channels, real, thread);
  chunk_gates<kChunk>(p, v, first, head, thread);
  copy_shared_wait();
  __syncthreads();
  const bool is_query = thread >= kChunk;
  const int row = thread % kChunk;
  const float length =
      row_inverse_length<kKeyDim>((is_query ? queries : keys) + 2 * row * S::kPitch);
  if (is_query) {
    v.query_scale[row] = length * rsqrtf(static_cast<float>(kKeyDim));
  } else {
    v.key_scale[row] = length;
    if (row >= 32) v.total[row] += v.warp_totals[0];
  }
  __syncthreads();

  const u64 index = static_cast<u64>(chunk) * p.value_heads + head;
  u16* scores = p.scores + index * (2 * kChunk * kChunk);
  products<kKeyDim, kChunk>(v, keys, queries, a, scores, warp, lane);
  __syncthreads();
  if (thread < kChunk) {
    float* scales = p.scales + index * (4 * kChunk) + thread;
    const float total = v.total[thread], last = v.total[kChunk - 1];
    const float since_start = expf(total);
    scales[0] = since_start * v.key_scale[thread];
    scales[kChunk] = since_start * v.query_scale[thread];
    scales[2 * kChunk] = expf(last - total) * v.key_scale[thread];
    scales[3 * kChunk] = expf(last);
    invert_diagonal<kPitch>(a, inverse, thread);
  }
  merge_blocks<16, kPitch>(a, inverse, thread);
  if constexpr (kChunk == 64) merge_blocks<32, kPitch>(a, inverse, thread);
  __syncthreads();
  u32* transform = reinterpret_cast<u32*>(p.transform + index * (2 * kChunk * kChunk));
  for (int pair = thread; pair < kChunk * kChunk / 2; pair += S::kThreads) {
    const int i = pair / (kChunk / 2), j = pair % (kChunk / 2) * 2;
    const float2 x = *reinterpret_cast<const float2*>(inverse + i * kPitch + j);
    const Split s = split_pair(j <= i ? x.x * v.strength[j] : 0.f,
                               j + 1 <= i ? x.y * v.strength[j + 1] : 0.f);
    transform[pair] = s.high;
    transform[pair + kChunk * kChunk / 2] = s.low;
  }
}

// ---- the state through all chunks, and the outputs

template <int kKeyDim, int kChunk, int kColumns>
struct Scan {
  static constexpr int kWarps = kScanThreads / 32;
  static constexpr int kTokenTiles = kChunk / 16, kStateTiles = kKeyDim / 16;
  static constexpr int kTokenSplits = kWarps / kTokenTiles, kStateSplits = kWarps / kStateTiles;
  static constexpr int kTiles = kColumns / 8 / kTokenSplits;       // of 8 columns a warp: tokens
  static constexpr int kStateColumns = kColumns / 8 / kStateSplits;  // the same: state
  static constexpr int kKeyPitch = kKeyDim + kTilePad, kSquarePitch = kChunk + kTilePad;
  static constexpr int kPitch = kColumns + kTilePad;
  static constexpr int kKeyBytes = kChunk * kKeyPitch * 2;
  static constexpr int kSquareBytes = kChunk * kSquarePitch * 2;
  static constexpr int kTokenBytes = kChunk * kPitch * 2;
  static constexpr int kStateBytes = kKeyDim * kPitch * 2;
  static constexpr int kScaleBytes = 4 * kChunk * 4;
  // Offsets; pairs are two stages, or high and low.
  static constexpr int kKeys = 0;
  static constexpr int kScales = kKeys + 2 * kKeyBytes;
  static constexpr int kQueries = kScales + 2 * kScaleBytes;
  static constexpr int kValues = kQueries + kKeyBytes;
  static constexpr int kTransform = kValues + kTokenBytes;
  static constexpr int kScores = kTransform + 2 * kSquareBytes;
  static constexpr int kState = kScores + 2 * kSquareBytes;
  static constexpr int kInputs = kState + 2 * kStateBytes;    // X
  static constexpr int kUpdates = kInputs + 2 * kTokenBytes;  // U
  static constexpr int kWrites = kUpdates + 2 * kTokenBytes;  // diag(write) U
  static constexpr int kSharedBytes = kWrites + 2 * kTokenBytes;
  static_assert(kTiles >= 1 && kStateColumns >= 1, "a tile a warp");
};

// sum += (a_high + a_low) (b_high + b_low) but for the product of both low parts.
template <int kTiles>
__device__ __forceinline__ void mma_split(float (&sum)[kTiles][4], uint4 a_high, uint4 a_low,
                                          const u32 (&b_high)[kTiles][2],
                                          const u32 (&b_low)[kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma_bf16_16x8x16(sum[i], a_high, b_high[i][0], b_high[i][1]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma_bf16_16x8x16(sum[i], a_low, b_high[i][0], b_high[i][1]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma_bf16_16x8x16(sum[i], a_high, b_low[i][0], b_low[i][1]);
}

// sum += a (b_high + b_low).
template <int kTiles>
__device__ __forceinline__ void mma_exact(float (&sum)[kTiles][4], uint4 a,
                                          const u32 (&b_high)[kTiles][2],
                                          const u32 (&b_low)[kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma_bf16_16x8x16(sum[i], a, b_high[i][0], b_high[i][1]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma_bf16_16x8x16(sum[i], a, b_low[i][0], b_low[i][1]);
}

// Writes a 16 x 8 accumulator tile as high and low bf16 at `tile`, `low_offset` bytes apart.
__device__ __forceinline__ void store_split(u32 tile, int low_offset, int pitch, int row, int column,
                                            float x0, float x1) {
  const Split s = split_pair(x0, x1);
  const u32 address = tile + 2 * (row * pitch + column);
  store_shared_4(address, s.high);
  store_shared_4(address + low_offset, s.low);
}

template <int kKeyDim, int kChunk, int kColumns>
struct ChunkLoader {
  using S = Scan<kKeyDim, kChunk, kColumns>;
  const u16* queries;
  const u16* keys;
  const u16* values;
  const u16* transform;
  const u16* scores;
  const float* scales;
  u64 channels;
  u64 square_stride;  // numbers from chunk to chunk
  u64 scale_stride;
  int tokens, num_chunks;
  u32 shared;
  int thread;

  // Keys, scales, queries and values: what a chunk needs first.
  __device__ __forceinline__ void load_vectors(int chunk) const {
    if (chunk < num_chunks) {
      const int real = min(kChunk, tokens - chunk * kChunk), stage = chunk % 2;
      const u64 offset = static_cast<u64>(chunk) * kChunk * channels;
      copy_tile<kChunk, kKeyDim, kScanThreads>(shared + S::kKeys + stage * S::kKeyBytes,
                                               keys + offset, channels, real, thread);
      copy_tile<kChunk, kKeyDim, kScanThreads>(shared + S::kQueries, queries + offset, channels, real,
                                               thread);
      copy_tile<kChunk, kColumns, kScanThreads>(shared + S::kValues, values + offset, channels, real,
                                                thread);
      if (thread < kChunk) {
        copy_shared_16(shared + S::kScales + stage * S::kScaleBytes + thread * 16,
                       scales + chunk * scale_stride + thread * 4, true);
      }
    }
    copy_group_commit();
  }

  __device__ __forceinline__ void load_transform(int chunk) const {
    load_square(transform, S::kTransform, chunk);
  }

  __device__ __forceinline__ void load_scores(int chunk) const {
    load_square(scores, S::kScores, chunk);
  }

  // High and low parts follow each other in both memories.
  __device__ __forceinline__ void load_square(const u16* from, int offset, int chunk) const {
    if (chunk < num_chunks) {
      copy_tile<2 * kChunk, kChunk, kScanThreads>(shared + offset, from + chunk * square_stride,
                                                  kChunk, 2 * kChunk, thread);
    }
    copy_group_commit();
  }
};

// All threads' copies but the newest group are there, and everybody is past the step before.
__device__ __forceinline__ void next_step() {
  copy_group_wait<1>();
  __syncthreads();
}

template <int kKeyDim, int kChunk, int kColumns>
__device__ __forceinline__ void scan_chunks(const GdnPrefillParams& p) {
  using S = Scan<kKeyDim, kChunk, kColumns>;
  extern __shared__ __align__(16) u8 shared_bytes[];
  const u32 shared = shared_address(shared_bytes);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, q = lane % 4;
  const int head = blockIdx.x, first_column = blockIdx.y * kColumns;
  const int key_head = head / (p.value_heads / p.key_heads);
  const int token_row = warp % S::kTokenTiles * 16;
  const int token_column = warp / S::kTokenTiles * (S::kTiles * 8);
  const int state_row = warp % S::kStateTiles * 16;
  const int state_column = warp / S::kStateTiles * (S::kStateColumns * 8);
  allow_next_kernel();
  wait_for_previous_kernel();

  ChunkLoader<kKeyDim, kChunk, kColumns> loader;
  loader.queries = p.convolved + key_head * kKeyDim;
  loader.keys = loader.queries + p.key_heads * kKeyDim;
  loader.values =
      p.convolved + 2 * p.key_heads * kKeyDim + head * p.value_dim + first_column;
  loader.transform = p.transform + static_cast<u64>(head) * (2 * kChunk * kChunk);
  loader.scores = p.scores + static_cast<u64>(head) * (2 * kChunk * kChunk);
  loader.scales = p.scales + head * (4 * kChunk);
  loader.channels = conv_channels(p);
  loader.square_stride = static_cast<u64>(p.value_heads) * (2 * kChunk * kChunk);
  loader.scale_stride = static_cast<u64>(p.value_heads) * (4 * kChunk);
  loader.tokens = p.tokens;
  loader.num_chunks = (p.tokens + kChunk - 1) / kChunk;
  loader.shared = shared;
  loader.thread = thread;
  loader.load_vectors(0);
  loader.load_transform(0);

  // state[i][..]: S^T's element (column, row) lies at [column][row] in memory.
  const u64 head_state = (static_cast<u64>(head) * p.value_dim + first_column) * kKeyDim;
  const float* read_state =
      p.states + static_cast<u64>(__ldcg(p.read_slots)) * p.state_stride + head_state;
  float state[S::kStateColumns][4];
#pragma unroll
  for (int i = 0; i < S::kStateColumns; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = state_row + e / 2 * 8 + g, column = state_column + i * 8 + 2 * q + e % 2;
      state[i][e] = __ldcg(read_state + column * kKeyDim + row);
    }
  }

  for (int chunk = 0; chunk < loader.num_chunks; ++chunk) {
    const u32 keys = shared + S::kKeys + chunk % 2 * S::kKeyBytes;
    const u32 scales = shared + S::kScales + chunk % 2 * S::kScaleBytes;
#pragma unroll
    for (int i = 0; i < S::kStateColumns; ++i) {
      const int column = state_column + i * 8 + 2 * q;
      store_split(shared + S::kState, S::kStateBytes, S::kPitch, state_row + g, column, state[i][0],
                  state[i][1]);
      store_split(shared + S::kState, S::kStateBytes, S::kPitch, state_row + 8 + g, column,
                  state[i][2], state[i][3]);
    }
    next_step();
    loader.load_scores(chunk);

    // What the state predicts for keys and answers to queries.
    float predicted[S::kTiles][4] = {}, y[S::kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kKeyDim; k += 16) {
      const uint4 key = load_a(keys, S::kKeyPitch, token_row, k, lane);
      const uint4 query = load_a(shared + S::kQueries, S::kKeyPitch, token_row, k, lane);
      u32 high[S::kTiles][2], low[S::kTiles][2];
      load_b(high, shared + S::kState, S::kPitch, k, token_column, lane);
      load_b(low, shared + S::kState + S::kStateBytes, S::kPitch, k, token_column, lane);
      mma_exact(predicted, key, high, low);
      mma_exact(y, query, high, low);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = token_row + half * 8 + g;
      const float read = load_shared_float(scales + 4 * row);
      const float answer = load_shared_float(scales + 4 * (kChunk + row));
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        const int column = token_column + i * 8 + 2 * q;
        const u32 v = load_shared_4(shared + S::kValues + 2 * (row * S::kPitch + column));
        store_split(shared + S::kInputs, S::kTokenBytes, S::kPitch, row, column,
                    fmaf(-read, predicted[i][2 * half], __uint_as_float(v << 16)),
                    fmaf(-read, predicted[i][2 * half + 1], __uint_as_float(v & 0xffff0000u)));
        y[i][2 * half] *= answer;
        y[i][2 * half + 1] *= answer;
      }
    }
    next_step();
    loader.load_vectors(chunk + 1);

    // Both factors of the next two products are zero over the diagonal: k <= rows of the tile.
    float update[S::kTiles][4] = {};
    for (int k = 0; k <= token_row; k += 16) {
      u32 high[S::kTiles][2], low[S::kTiles][2];
      load_b(high, shared + S::kInputs, S::kPitch, k, token_column, lane);
      load_b(low, shared + S::kInputs + S::kTokenBytes, S::kPitch, k, token_column, lane);
      const uint4 a = load_a(shared + S::kTransform, S::kSquarePitch, token_row, k, lane);
      const uint4 a_low =
          load_a(shared + S::kTransform + S::kSquareBytes, S::kSquarePitch, token_row, k, lane);
      mma_split(update, a, a_low, high, low);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = token_row + half * 8 + g;
      const float write = load_shared_float(scales + 4 * (2 * kChunk + row));
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        const int column = token_column + i * 8 + 2 * q;
        const float u0 = update[i][2 * half], u1 = update[i][2 * half + 1];
        store_split(shared + S::kUpdates, S::kTokenBytes, S::kPitch, row, column, u0, u1);
        store_split(shared + S::kWrites, S::kTokenBytes, S::kPitch, row, column, u0 * write,
                    u1 * write);
      }
    }
    next_step();
    loader.load_transform(chunk + 1);

    const float decay = load_shared_float(scales + 4 * (3 * kChunk));
#pragma unroll
    for (int i = 0; i < S::kStateColumns; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state[i][e] *= decay;
    }
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      const uint4 a = load_a_transposed(keys, S::kKeyPitch, state_row, k, lane);
      u32 high[S::kStateColumns][2], low[S::kStateColumns][2];
      load_b(high, shared + S::kWrites, S::kPitch, k, state_column, lane);
      load_b(low, shared + S::kWrites + S::kTokenBytes, S::kPitch, k, state_column, lane);
      mma_exact(state, a, high, low);
    }
    for (int k = 0; k <= token_row; k += 16) {
      u32 high[S::kTiles][2], low[S::kTiles][2];
      load_b(high, shared + S::kUpdates, S::kPitch, k, token_column, lane);
      load_b(low, shared + S::kUpdates + S::kTokenBytes, S::kPitch, k, token_column, lane);
      const uint4 a = load_a(shared + S::kScores, S::kSquarePitch, token_row, k, lane);
      const uint4 a_low =
          load_a(shared + S::kScores + S::kSquareBytes, S::kSquarePitch, token_row, k, lane);
      mma_split(y, a, a_low, high, low);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = chunk * kChunk + token_row + half * 8 + g;
      if (t >= p.tokens) continue;
      u16* row = p.y + static_cast<u64>(t) * p.y_stride + head * p.value_dim + first_column;
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        *reinterpret_cast<u32*>(row + token_column + i * 8 + 2 * q) =
            pack_bf16x2(y[i][2 * half], y[i][2 * half + 1]);
      }
    }
  }

  float* write_state =
      p.states + static_cast<u64>(__ldcg(p.write_slots)) * p.state_stride + head_state;
#pragma unroll
  for (int i = 0; i < S::kStateColumns; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = state_row + e / 2 * 8 + g, column = state_column + i * 8 + 2 * q + e % 2;
      write_state[column * kKeyDim + row] = state[i][e];
    }
  }
  copy_shared_wait();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 4)
gdn_convolve(const GdnPrefillParams p) { convolve_strip(p); }

extern "C" __global__ void __launch_bounds__(64, 8)
gdn_transform_32x32(const GdnPrefillParams p) { transform_chunk<32, 32>(p); }

extern "C" __global__ void __launch_bounds__(128, 4)
gdn_transform_32x64(const GdnPrefillParams p) { transform_chunk<32, 64>(p); }

extern "C" __global__ void __launch_bounds__(64, 8)
gdn_transform_64x32(const GdnPrefillParams p) { transform_chunk<64, 32>(p); }

extern "C" __global__ void __launch_bounds__(128, 4)
gdn_transform_64x64(const GdnPrefillParams p) { transform_chunk<64, 64>(p); }

extern "C" __global__ void __launch_bounds__(64, 8)
gdn_transform_128x32(const GdnPrefillParams p) { transform_chunk<128, 32>(p); }

extern "C" __global__ void __launch_bounds__(128, 4)
gdn_transform_128x64(const GdnPrefillParams p) { transform_chunk<128, 64>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_32x32x32(const GdnPrefillParams p) { scan_chunks<32, 32, 32>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_32x64x32(const GdnPrefillParams p) { scan_chunks<32, 64, 32>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_32x64x64(const GdnPrefillParams p) { scan_chunks<32, 64, 64>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_64x32x32(const GdnPrefillParams p) { scan_chunks<64, 32, 32>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_64x64x32(const GdnPrefillParams p) { scan_chunks<64, 64, 32>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_64x64x64(const GdnPrefillParams p) { scan_chunks<64, 64, 64>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_128x32x32(const GdnPrefillParams p) { scan_chunks<128, 32, 32>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_128x64x32(const GdnPrefillParams p) { scan_chunks<128, 64, 32>(p); }

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_chunks_128x64x64(const GdnPrefillParams p) { scan_chunks<128, 64, 64>(p); }
