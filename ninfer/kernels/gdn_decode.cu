// gdn_decode: convolution, gates, delta rule, gated norm; a token at a time, all in one kernel.
//
// Contract: ninfer/ops/gdn_decode.py. Entries gdn_decode_<dk>x<dv>: one block a value head and row,
// its state in registers from the first token of the row to the last (gdn_step.cuh).
//
//   S and the convolution's window: before the kernel ahead has ended
//   S and o of the token, o to shared memory
//   y = o / rms(o) * weight * silu(z)
//
// Whole heads, so that the norm needs no other block: a node less (about 1 us) outweighs the 48 of
// 132 multiprocessors that one row of Hv = 48 keeps busy. Bytes: state read and written once,
// 2 * 4 * Hv * dv * dk a row, 6.3 MB at Hv = 48. Expected there: 0.8 us to the first byte, 0.8 us
// for 64 KB a multiprocessor, 0.5 us for a token, 0.9 us to write: 3 us, floor 1.3 us. From 3 rows
// on two blocks share a multiprocessor and hide each other's latency: 13 us for 8 rows, floor 11.

#include "gdn_step.cuh"
#include "pdl.cuh"

namespace {

struct GdnDecodeParams {
  const u16* projection;  // [T, C] bf16
  const u16* conv;        // [Cd, width] bf16
  const float* a_log;     // [Hv]
  const float* dt_bias;   // [Hv]
  const u16* norm;        // [dv] bf16
  u16* windows;           // [slots] x window_stride, [Cd, width - 1] each
  float* states;          // [slots] x state_stride, [Hv, dv, dk] each
  const int* row_starts;  // [R + 1]
  const int* row_ends;    // [R]
  const int* read_slots;  // [R]
  const int* write_slots; // [R]
  u16* y;                 // [T, Hv * dv] bf16
  u64 window_stride;      // elements from slot to slot
  u64 state_stride;
  int projection_stride, y_stride;
  int key_heads, value_heads;
  int width;
  float eps;
  int keeps_state;
  int padding;
};
static_assert(sizeof(GdnDecodeParams) == 144, "ninfer/ops/gdn_decode.py mirrors this struct");

template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void gdn_decode(const GdnDecodeParams& p) {
  using S = StepShape<kKeyDim, kValueDim>;
  __shared__ StepMemory<kKeyDim, kValueDim> memory;
  __shared__ float outputs[kValueDim];
  __shared__ float norm[kValueDim];
  __shared__ int write_slot, row_stop;

  allow_next_kernel();
  const int head = blockIdx.x, row = blockIdx.y;
  const StepThread<kKeyDim, kValueDim> at(head, p.key_heads, p.value_heads);
  const int thread = at.thread, lane = at.lane;
  load_constants(memory, at, p.conv, p.width, p.a_log, p.dt_bias, head);
  if (thread < kValueDim) norm[thread] = bf16_to_float(__ldg(p.norm + thread));
  // Rows, states and windows were there before the kernel ahead began.
  const int first = __ldcg(p.row_starts + row), last = __ldcg(p.row_ends + row);
  const u64 read_slot = static_cast<u32>(__ldcg(p.read_slots + row));
  if (thread == 0) {
    write_slot = __ldcg(p.write_slots + row);
    row_stop = __ldcg(p.row_starts + row + 1);
  }
  ConvWindow window;
  float4 state[S::kPasses];
  load_image(at, p.windows + read_slot * p.window_stride, p.width, p.states + read_slot * p.state_stride, window,
             state);
  wait_for_previous_kernel();

  const int z_channels = 2 * p.key_heads * kKeyDim + p.value_heads * kValueDim;
  for (int t = first; t < last; ++t) {
    const u16* token = p.projection + static_cast<u64>(t) * p.projection_stride;
    u16 z = 0;
    if (thread < kValueDim) z = __ldcg(token + z_channels + head * kValueDim + thread);
    take_token(memory, at, window, token, token + z_channels + p.value_heads * kValueDim + head,
               p.value_heads);
    __syncthreads();
    apply_token<kKeyDim, kValueDim, true>(memory, at, state, outputs);
    __syncthreads();

    if (thread < kValueDim) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kValueDim / 32; ++i) {
        const float o = outputs[i * 32 + lane];
        sum = fmaf(o, o, sum);
      }
      const float scale = rsqrtf(warp_sum(sum) * (1.f / kValueDim) + p.eps);
      p.y[static_cast<u64>(t) * p.y_stride + head * kValueDim + thread] =
          float_to_bf16(outputs[thread] * scale * norm[thread] * silu(bf16_to_float(z)));
    }
  }

  __syncthreads();
  if (thread < kValueDim) {
    for (int t = last; t < row_stop; ++t) {
      p.y[static_cast<u64>(t) * p.y_stride + head * kValueDim + thread] = 0;
    }
  }
  if (!p.keeps_state) return;
  const u64 target = static_cast<u32>(write_slot);
  store_image(at, p.windows + target * p.window_stride, p.width, p.states + target * p.state_stride, window, state,
              head, p.value_heads / p.key_heads);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_decode_32x32(const GdnDecodeParams p) { gdn_decode<32, 32>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_decode_32x64(const GdnDecodeParams p) { gdn_decode<32, 64>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_decode_32x128(const GdnDecodeParams p) { gdn_decode<32, 128>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_decode_64x32(const GdnDecodeParams p) { gdn_decode<64, 32>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_decode_64x64(const GdnDecodeParams p) { gdn_decode<64, 64>(p); }

extern "C" __global__ void __launch_bounds__(512, kResidentBlocks)
gdn_decode_64x128(const GdnDecodeParams p) { gdn_decode<64, 128>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_decode_128x32(const GdnDecodeParams p) { gdn_decode<128, 32>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_decode_128x64(const GdnDecodeParams p) { gdn_decode<128, 64>(p); }

extern "C" __global__ void __launch_bounds__(512, kResidentBlocks)
gdn_decode_128x128(const GdnDecodeParams p) { gdn_decode<128, 128>(p); }
