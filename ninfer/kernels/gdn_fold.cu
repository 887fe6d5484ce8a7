// gdn_fold: the states of all layers behind the first tokens of each row, from recorded projections.
//
// Contract: ninfer/ops/gdn_fold.py. Entries gdn_fold_<dk>x<dv>: one block a value head, row and
// layer. The steps are those of gdn_decode without their outputs (gdn_step.cuh): the same functions
// in the same order leave the same bits.
//
//   S and the convolution's window: before the kernel ahead has ended
//   S after each token, then S and the window to the slot that is written
//
// Bytes: every state read and written once, 2 * 4 * L * Hv * dv * dk a row: 302 MB at L = Hv = 48.

#include "gdn_step.cuh"
#include "pdl.cuh"

namespace {

struct FoldLayer {
  const u16* projection;  // [T, C] bf16
  const u16* conv;        // [Cd, width] bf16
  const float* a_log;     // [Hv]
  const float* dt_bias;   // [Hv]
  int projection_stride;
  int padding;
};
static_assert(sizeof(FoldLayer) == 40, "ninfer/ops/gdn_fold.py mirrors this struct");

struct GdnFoldParams {
  const FoldLayer* layers; // [L]
  u16* windows;            // [slots] x window_stride, [L, Cd, width - 1] each
  float* states;           // [slots] x state_stride, [L, Hv, dv, dk] each
  const int* row_starts;   // [R + 1]
  const int* row_ends;     // [R]
  const int* read_slots;   // [R]
  const int* write_slots;  // [R]
  u64 window_stride;       // elements from slot to slot
  u64 state_stride;
  int key_heads, value_heads;
  int width;
  int padding;
};
static_assert(sizeof(GdnFoldParams) == 88, "ninfer/ops/gdn_fold.py mirrors this struct");

template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void gdn_fold(const GdnFoldParams& p) {
  using S = StepShape<kKeyDim, kValueDim>;
  __shared__ StepMemory<kKeyDim, kValueDim> memory;

  allow_next_kernel();
  const int head = blockIdx.x, row = blockIdx.y, layer = blockIdx.z;
  const StepThread<kKeyDim, kValueDim> at(head, p.key_heads, p.value_heads);
  const FoldLayer& own = p.layers[layer];
  load_constants(memory, at, own.conv, p.width, own.a_log, own.dt_bias, head);
  // Slots, states and windows were there before the kernel ahead began.
  const int channels = 2 * p.key_heads * kKeyDim + p.value_heads * kValueDim;
  const u64 window_offset = static_cast<u64>(layer) * channels * (p.width - 1);
  const u64 state_offset = static_cast<u64>(layer) * p.value_heads * (kValueDim * kKeyDim);
  const u64 source = static_cast<u32>(__ldcg(p.read_slots + row));
  ConvWindow window;
  float4 state[S::kPasses];
  load_image(at, p.windows + source * p.window_stride + window_offset, p.width,
             p.states + source * p.state_stride + state_offset, window, state);
  wait_for_previous_kernel();

  const int first = __ldcg(p.row_starts + row), last = __ldcg(p.row_ends + row);
  if (last <= first) return;
  const int stride = own.projection_stride;
  const u16* token = own.projection + static_cast<u64>(first) * stride;
  for (int t = first; t < last; ++t, token += stride) {
    take_token(memory, at, window, token, token + channels + p.value_heads * kValueDim + head, p.value_heads);
    __syncthreads();
    apply_token<kKeyDim, kValueDim, false>(memory, at, state, nullptr);
    __syncthreads();
  }

  const u64 target = static_cast<u32>(__ldcg(p.write_slots + row));
  store_image(at, p.windows + target * p.window_stride + window_offset, p.width,
              p.states + target * p.state_stride + state_offset, window, state, head, p.value_heads / p.key_heads);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1)
gdn_fold_32x32(const GdnFoldParams p) { gdn_fold<32, 32>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_fold_32x64(const GdnFoldParams p) { gdn_fold<32, 64>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_fold_32x128(const GdnFoldParams p) { gdn_fold<32, 128>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_fold_64x32(const GdnFoldParams p) { gdn_fold<64, 32>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_fold_64x64(const GdnFoldParams p) { gdn_fold<64, 64>(p); }

extern "C" __global__ void __launch_bounds__(512, kResidentBlocks)
gdn_fold_64x128(const GdnFoldParams p) { gdn_fold<64, 128>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_fold_128x32(const GdnFoldParams p) { gdn_fold<128, 32>(p); }

extern "C" __global__ void __launch_bounds__(512, 2)
gdn_fold_128x64(const GdnFoldParams p) { gdn_fold<128, 64>(p); }

extern "C" __global__ void __launch_bounds__(512, kResidentBlocks)
gdn_fold_128x128(const GdnFoldParams p) { gdn_fold<128, 128>(p); }
