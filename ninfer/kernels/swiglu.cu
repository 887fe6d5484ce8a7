// swiglu: y[t, i] = silu(x[t, i]) * x[t, I + i].
//
// Contract: ninfer/ops/swiglu.py. Entry swiglu_bf16: 8 columns a thread and step, grid-stride over
// tokens and columns. Bytes: x read once, y written once.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace {

struct SwigluParams {
  const u16* x;  // [T, 2 * I] bf16
  u16* y;        // [T, I] bf16
  int tokens;
  int inner;     // I
  int x_stride;
  int y_stride;
};
static_assert(sizeof(SwigluParams) == 32, "ninfer/ops/swiglu.py mirrors this struct");

__device__ __forceinline__ float gated(float gate, float up) {
  return gate / (1.f + __expf(-gate)) * up;
}

__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
  return pack_bf16x2(gated(__uint_as_float(gate << 16), __uint_as_float(up << 16)),
                     gated(__uint_as_float(gate & 0xffff0000u), __uint_as_float(up & 0xffff0000u)));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) swiglu_bf16(const SwigluParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const u32 vectors = p.inner / 8;
  const u64 total = static_cast<u64>(p.tokens) * vectors, step = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const u32 t = static_cast<u32>(i / vectors), v = static_cast<u32>(i - static_cast<u64>(t) * vectors);
    const u16* row = p.x + static_cast<u64>(t) * p.x_stride + v * 8;
    const uint4 gate = __ldcg(reinterpret_cast<const uint4*>(row));
    const uint4 up = __ldcg(reinterpret_cast<const uint4*>(row + p.inner));
    *reinterpret_cast<uint4*>(p.y + static_cast<u64>(t) * p.y_stride + v * 8) =
        make_uint4(gated_pair(gate.x, up.x), gated_pair(gate.y, up.y), gated_pair(gate.z, up.z),
                   gated_pair(gate.w, up.w));
  }
}
