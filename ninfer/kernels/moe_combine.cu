// moe_combine: the ranks of every token, the shared expert and the residual, added up.
//
// Contract: ninfer/ops/moe_combine.py. Entries moe_combine_<f32 or bf16>: one block a token, 8
// columns a thread, added in the order of ranks. Bytes: every operand once.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "square_sums.cuh"
#include "vec.cuh"

namespace {

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

extern "C" __global__ void __launch_bounds__(512, 2)
moe_combine_f32(const CombineParams p) { combine<float>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
moe_combine_bf16(const CombineParams p) { combine<u16>(p); }
