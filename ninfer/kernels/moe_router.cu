// moe_router: the experts of every token and the shared expert's gate.
//
// Contract: ninfer/ops/moe_router.py. Entry moe_router_f32: two warps a token, one chooses, the
// other forms the gate's dot product. A token depends on itself alone. Bytes: logits and x once.

#include "moe_routing.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

struct RouterParams {
  RoutingParams routing;
  const u16* x;        // [T, C] bf16, with gate
  const u16* gate;     // [C] bf16 or null
  int* expert_ids;     // [T, k]
  float* weights;      // [T, k]
  float* shared_gate;  // [T]
  int x_stride, columns;
};
static_assert(sizeof(RouterParams) == 72, "ninfer/ops/moe_router.py mirrors this struct");

__device__ __forceinline__ void route(const RouterParams& p, int t, int lane) {
  const Choice choice = choose_experts(p.routing, t, lane);
  if (lane >= p.routing.experts_per_token) return;
  const u64 at = static_cast<u64>(t) * p.routing.experts_per_token + lane;
  p.expert_ids[at] = choice.expert;
  p.weights[at] = choice.weight;
}

__device__ __forceinline__ void gate_shared(const RouterParams& p, int t, int lane) {
  float sum = 0.f;
  for (int v = lane; v < p.columns / 8; v += 32) {
    const uint4 x = __ldcg(reinterpret_cast<const uint4*>(p.x + static_cast<u64>(t) * p.x_stride) + v);
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(p.gate) + v);
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16);
      sum += __uint_as_float(a[i] & 0xffff0000u) * __uint_as_float(b[i] & 0xffff0000u);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) p.shared_gate[t] = 1.f / (1.f + expf(-sum));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(64) moe_router_f32(const RouterParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  if (threadIdx.x < 32) {
    route(p, blockIdx.x, threadIdx.x);
  } else if (p.gate != nullptr) {
    gate_shared(p, blockIdx.x, threadIdx.x - 32);
  }
}
