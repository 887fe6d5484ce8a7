// attention_prepare: q and k normalised and rotated, q to its tensor, k and v into the KV pages.
//
// Contract: ninfer/ops/attention_prepare.py. Entries attention_prepare_<kv dtype>_<head_dim>: one
// warp a head of a column, D / 32 numbers a lane (heads of 32 as 64, the upper half zeros); a column
// depends on itself alone. The rotation
// exchanges numbers through shared memory, as rotary_dim need not fit the lanes. Angles are f32 and
// reduced by 2 pi in two exact steps, so that the fast sine and cosine serve any position.
// Bytes: qkv once in, q, keys and values once out.

#include "dtypes.cuh"
#include "kv_pages.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kWarps = 8;
constexpr float kE4m3Max = 448.f, kInt8Max = 127.f, kHalfMax = 65504.f;

struct AttentionPrepareParams {
  const u16* qkv;              // [T, H * (D or 2 D) + 2 * Hk * D] bf16, H may be 0
  const u16* q_norm;           // [D] bf16
  const u16* k_norm;           // [D] bf16
  const float* inverse;        // [half] f32
  const int* axes;             // [half]
  const int* rope_positions;   // [3, T]
  const int* ordinals;         // [T], negative: a column of padding
  const int* column_rows;      // [T]
  const int* page_tables;      // [R, max_pages]
  u16* q;                      // [T, H, stored D] bf16, null where H is 0
  u8* pages;                   // one layer's
  u8* scales;                  // one layer's, null for bf16
  int tokens, heads, kv_heads, qkv_stride, has_gate, half, max_pages;
  float eps, norm_offset, rope_scale, value_scale;
  int padding;
};
static_assert(sizeof(AttentionPrepareParams) == 144, "ninfer/ops/attention_prepare.py mirrors this struct");

// kCount (2, 4 or 8) bf16 numbers, aligned to their size.
template <int kCount>
__device__ __forceinline__ void load_numbers(const u16* from, float (&x)[kCount]) {
  u32 words[kCount / 2];
  if constexpr (kCount == 8) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kCount == 4) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = __ldcg(reinterpret_cast<const u32*>(from));
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <int kCount>
__device__ __forceinline__ void store_numbers(u16* to, const float (&x)[kCount]) {
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]),
                                               pack_bf16x2(x[4], x[5]), pack_bf16x2(x[6], x[7]));
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]));
  } else {
    *reinterpret_cast<u32*>(to) = pack_bf16x2(x[0], x[1]);
  }
}

// kCount bytes, aligned to their size.
template <int kCount>
__device__ __forceinline__ void store_codes(u8* to, const u32 (&codes)[kCount]) {
  if constexpr (kCount == 2) {
    *reinterpret_cast<u16*>(to) = static_cast<u16>(codes[0] | codes[1] << 8);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<u32*>(to + i) =
          codes[i] | codes[i + 1] << 8 | codes[i + 2] << 16 | codes[i + 3] << 24;
    }
  }
}

// Round to nearest, ties to even; saturates.
__device__ __forceinline__ u32 e4m3_code(float value) {
  const u32 sign = __float_as_uint(value) >> 24 & 0x80;
  const float magnitude = fminf(fabsf(value), kE4m3Max);
  if (magnitude < 0.015625f) return sign | static_cast<u32>(__float2int_rn(magnitude * 512.f));
  const u32 bits = __float_as_uint(magnitude);
  return sign | (((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3));
}

__device__ __forceinline__ u32 int8_code(float value) {
  return static_cast<u32>(__float2int_rn(fminf(fmaxf(value, -kInt8Max), kInt8Max))) & 0xff;
}

// x = x / sqrt(mean(x^2) + eps) * (offset + gain) over the kHeadDim numbers of the warp's head.
template <int kHeadDim, int kCount>
__device__ __forceinline__ void normalise(float (&x)[kCount], const float (&gain)[kCount], float eps, float offset) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i] * x[i];
  const float scale = 1.f / sqrtf(warp_sum(sum) / kHeadDim + eps);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = x[i] * scale * (offset + gain[i]);
}

// cos and sin of a non-negative angle of up to 2^20 turns.
__device__ __forceinline__ float2 cos_sin(float angle) {
  constexpr float kTurn = 6.28318548f, kTurnRest = -1.74845553e-7f, kPerTurn = 0.159154943f;
  const float turns = rintf(angle * kPerTurn);
  const float rest = fmaf(-turns, kTurnRest, fmaf(-turns, kTurn, angle));
  return make_float2(__cosf(rest), __sinf(rest));
}

// The frequencies of a lane's numbers: those of numbers d and d + half, d < half, are the same.
template <int kCount>
struct Frequencies {
  float inverse[kCount];
  int axes[kCount];
};

template <int kCount>
__device__ __forceinline__ Frequencies<kCount> load_frequencies(const AttentionPrepareParams& p, int lane) {
  Frequencies<kCount> lanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int d = lane * kCount + i, j = d < p.half ? d : d - p.half;
    lanes.inverse[i] = j < p.half ? __ldg(p.inverse + j) : 0.f;
    lanes.axes[i] = j < p.half ? __ldg(p.axes + j) : 0;
  }
  return lanes;
}

// Rotates numbers d and d + half of the head; `head` is the warp's, in shared memory.
template <int kCount>
__device__ __forceinline__ void rotate(const AttentionPrepareParams& p, const Frequencies<kCount>& lanes,
                                       const int (&positions)[kCount], int lane, float* head, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) head[lane * kCount + i] = x[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int d = lane * kCount + i;
    if (d >= 2 * p.half) continue;
    const bool is_first = d < p.half;
    const float2 turn = cos_sin(static_cast<float>(positions[i]) * lanes.inverse[i]);
    const float other = head[is_first ? d + p.half : d - p.half];
    const float cosine = turn.x * p.rope_scale, sine = turn.y * p.rope_scale;
    x[i] = is_first ? x[i] * cosine - other * sine : x[i] * cosine + other * sine;
  }
}

// Puts a head of keys or values into its place, rounded to bf16 and then coded.
template <KvFormat kFormat, int kCount>
__device__ __forceinline__ void write_page(const AttentionPrepareParams& p, u64 place, int lane, float (&x)[kCount]) {
  constexpr int kDim = 32 * kCount;
  u8* to = p.pages + (place * kDim + lane * kCount) * code_bytes<kFormat>();
  if constexpr (kFormat == KvFormat::kBf16) {
    store_numbers<kCount>(reinterpret_cast<u16*>(to), x);
  } else {
    constexpr int kLanes = kFormat == KvFormat::kFp8 ? 32 : 64 / kCount;
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = bf16_to_float(float_to_bf16(x[i]));
      amax = fmaxf(amax, fabsf(x[i]));
    }
#pragma unroll
    for (int step = 1; step < kLanes; step <<= 1) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
    float scale;
    if constexpr (kFormat == KvFormat::kFp8) {
      scale = __fdiv_rn(amax, kE4m3Max);
      if (lane == 0) reinterpret_cast<float*>(p.scales)[place] = scale;
    } else {
      const u16 bits = float_to_half(fminf(__fdiv_rn(amax, kInt8Max), kHalfMax));
      scale = half_to_float(bits);
      if (lane % kLanes == 0) reinterpret_cast<u16*>(p.scales)[place * (kDim / 64) + lane / kLanes] = bits;
    }
    u32 codes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float value = scale > 0.f ? __fdiv_rn(x[i], scale) : 0.f;
      codes[i] = kFormat == KvFormat::kFp8 ? e4m3_code(value) : int8_code(value);
    }
    store_codes<kCount>(to, codes);
  }
}

// Heads of kHeadDim numbers in places of kDim, zeros behind them.
template <KvFormat kFormat, int kDim, int kHeadDim = kDim>
__device__ __forceinline__ void attention_prepare(const AttentionPrepareParams& p) {
  constexpr int kCount = kDim / 32;
  static_assert(kHeadDim % kCount == 0, "a lane's numbers are all of the head or all behind it");
  __shared__ float heads[kWarps][kDim];
  allow_next_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int per_column = p.heads + 2 * p.kv_heads;
  const int task = blockIdx.x * kWarps + warp;
  const int t = task / per_column, slot = task - t * per_column;
  const bool is_query = slot < p.heads, is_value = slot >= p.heads + p.kv_heads;
  const bool is_real = kHeadDim == kDim || lane * kCount < kHeadDim;
  float gain[kCount] = {};
  if (is_real) load_numbers<kCount>((is_query ? p.q_norm : p.k_norm) + lane * kCount, gain);
  const Frequencies<kCount> lanes = load_frequencies<kCount>(p, lane);
  wait_for_previous_kernel();
  if (t >= p.tokens) return;
  const int ordinal = __ldcg(p.ordinals + t), row = __ldcg(p.column_rows + t);
  const int width = p.has_gate ? 2 * kHeadDim : kHeadDim;
  const int first = is_query ? slot * width : p.heads * width + (slot - p.heads) * kHeadDim;
  float x[kCount] = {};
  if (is_real) load_numbers<kCount>(p.qkv + static_cast<u64>(t) * p.qkv_stride + first + lane * kCount, x);
  int positions[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    positions[i] = __ldcg(p.rope_positions + static_cast<u64>(lanes.axes[i]) * p.tokens + t);
  }
  int page = 0;
  if (!is_query && ordinal >= 0) {
    page = __ldcg(p.page_tables + static_cast<u64>(row) * p.max_pages + ordinal / kPageTokens);
  }
  if (is_value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= p.value_scale;
  } else {
    normalise<kHeadDim>(x, gain, p.eps, p.norm_offset);
    rotate<kCount>(p, lanes, positions, lane, heads[warp], x);
  }
  if (is_query) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = ordinal < 0 ? 0.f : x[i];
    store_numbers<kCount>(p.q + (static_cast<u64>(t) * p.heads + slot) * kDim + lane * kCount, x);
  } else if (ordinal >= 0) {
    const int kv_head = slot - p.heads - (is_value ? p.kv_heads : 0);
    const u64 head = page_head(page, is_value, p.kv_heads, kv_head);
    write_page<kFormat, kCount>(p, head * kPageTokens + ordinal % kPageTokens, lane, x);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_bf16_32(const AttentionPrepareParams p) { attention_prepare<KvFormat::kBf16, 64, 32>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_bf16_64(const AttentionPrepareParams p) { attention_prepare<KvFormat::kBf16, 64>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_bf16_128(const AttentionPrepareParams p) { attention_prepare<KvFormat::kBf16, 128>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_bf16_256(const AttentionPrepareParams p) { attention_prepare<KvFormat::kBf16, 256>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_fp8_32(const AttentionPrepareParams p) { attention_prepare<KvFormat::kFp8, 64, 32>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_fp8_64(const AttentionPrepareParams p) { attention_prepare<KvFormat::kFp8, 64>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_fp8_128(const AttentionPrepareParams p) { attention_prepare<KvFormat::kFp8, 128>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_fp8_256(const AttentionPrepareParams p) { attention_prepare<KvFormat::kFp8, 256>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_int8_32(const AttentionPrepareParams p) { attention_prepare<KvFormat::kInt8, 64, 32>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_int8_64(const AttentionPrepareParams p) { attention_prepare<KvFormat::kInt8, 64>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_int8_128(const AttentionPrepareParams p) { attention_prepare<KvFormat::kInt8, 128>(p); }

extern "C" __global__ void __launch_bounds__(256)
attention_prepare_int8_256(const AttentionPrepareParams p) { attention_prepare<KvFormat::kInt8, 256>(p); }
