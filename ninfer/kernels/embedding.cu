// embedding: y[t] = scale * table[token_ids[t]], and the square sums that the next norm takes.
//
// Contract: ninfer/ops/embedding.py. Entry embedding_bf16: one block a token, 16 bytes a thread and
// step. Bytes: the rows read and written once. A row depends on its own id alone.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "square_sums.cuh"
#include "vec.cuh"

namespace {

struct EmbeddingParams {
  const int* token_ids;  // [T]
  const u16* table;      // [V, C] bf16
  u16* y;                // [T, C] bf16
  float* square_sums;    // [T, ceil(C / 32)] f32 or null
  int num_rows;          // V
  int columns;           // C
  int y_stride;
  float scale;
};
static_assert(sizeof(EmbeddingParams) == 48, "ninfer/ops/embedding.py mirrors this struct");

constexpr u32 kNanPair = 0x7fc07fc0u;

__device__ __forceinline__ u32 scaled(u32 pair, float scale) {
  return pack_bf16x2(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

__device__ __forceinline__ uint4 scaled(uint4 x, float scale) {
  return make_uint4(scaled(x.x, scale), scaled(x.y, scale), scaled(x.z, scale), scaled(x.w, scale));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512) embedding_bf16(const EmbeddingParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int t = blockIdx.x, vectors = p.columns / 8;
  const int token = __ldcg(p.token_ids + t);
  // An id outside the table makes a row of NaN: whoever checks for finite logits sees it.
  const bool is_real = token >= 0 && token < p.num_rows;
  const uint4* from = reinterpret_cast<const uint4*>(p.table + static_cast<u64>(is_real ? token : 0) * p.columns);
  uint4* to = reinterpret_cast<uint4*>(p.y + static_cast<u64>(t) * p.y_stride);
  const int rounds = (vectors + blockDim.x - 1) / blockDim.x;
  for (int i = 0; i < rounds; ++i) {
    const int v = i * blockDim.x + threadIdx.x;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (v < vectors) {
      x = is_real ? __ldg(from + v) : make_uint4(kNanPair, kNanPair, kNanPair, kNanPair);
      if (p.scale != 1.f) x = scaled(x, p.scale);
      to[v] = x;
    }
    if (p.square_sums == nullptr) continue;
    const float sum = strip_sum(square_sum(x));
    if (threadIdx.x % 4 == 0 && v < vectors) store_strip_sum(p.square_sums, t, p.columns, v, sum);
  }
}
