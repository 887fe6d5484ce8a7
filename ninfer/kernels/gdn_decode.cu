// gdn_decode: convolution, gates, delta rule, gated norm; a token at a time, all in one kernel.
//
// Contract: ninfer/ops/gdn_decode.py. Entries gdn_decode_<dk>x<dv>: one block a value head and row,
// its state in registers from the first token of the row to the last. A row of the state lies in
// dk / 4 lanes, 4 neighbours each; a thread holds the same 4 columns of kPasses rows.
//
//   S and the convolution's window: before the kernel ahead has ended
//   q, k, v of the token: a thread a channel              -> shared memory
//   p = S^T k and r = S^T q of the decayed state S, all rows of a warp reduced together
//   u = beta (v - p);  S += k u^T;  o = r + (k . q) u     -> shared memory
//   y = o / rms(o) * weight * silu(z)
//
// Whole heads, so that the norm needs no other block: a node less (about 1 us) outweighs the 48 of
// 132 multiprocessors that one row of Hv = 48 keeps busy. Bytes: state read and written once,
// 2 * 4 * Hv * dv * dk a row, 6.3 MB at Hv = 48. Expected there: 0.8 us to the first byte, 0.8 us
// for 64 KB a multiprocessor, 0.5 us for a token, 0.9 us to write: 3 us, floor 1.3 us. From 3 rows
// on two blocks share a multiprocessor and hide each other's latency: 13 us for 8 rows, floor 11.

#include "gdn.cuh"
#include "pdl.cuh"
#include "warp.cuh"

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
  const int* read_slots;  // [R]
  const int* write_slots; // [R]
  u16* y;                 // [T, Hv * dv] bf16
  u64 window_stride;      // elements from slot to slot
  u64 state_stride;
  int projection_stride, y_stride;
  int key_heads, value_heads;
  int width;
  float eps;
};
static_assert(sizeof(GdnDecodeParams) == 128, "ninfer/ops/gdn_decode.py mirrors this struct");

constexpr int kMaxWarps = 16;

// Blocks of the largest shapes that share a multiprocessor: two where 64 registers hold a thread.
#if __CUDA_ARCH__ == 900
constexpr int kResidentBlocks = 2;
#else
constexpr int kResidentBlocks = 1;
#endif

template <int kKeyDim, int kValueDim>
struct Shape {
  static constexpr int kWarpsNeeded = kKeyDim * kValueDim / 128;
  static constexpr int kWarps = kWarpsNeeded < kMaxWarps ? kWarpsNeeded : kMaxWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowLanes = kKeyDim / 4;
  static constexpr int kRowsAtOnce = kWarps * (32 / kRowLanes);
  static constexpr int kPasses = kValueDim / kRowsAtOnce;
  static constexpr int kChannels = 2 * kKeyDim + kValueDim;
  static_assert(kPasses * kRowsAtOnce == kValueDim, "rows divide evenly");
  static_assert(kChannels <= kThreads - 32, "a thread a channel, and the last warp for the gates");
};

// Sums kCount values over kLanes neighbouring lanes at once: while there are several values, a lane
// keeps half of them and hands the other half to its partner. Value i ends, summed, in the lanes l
// with owned_value(l) == i, at v[0].
template <int kCount, int kLanes>
__device__ __forceinline__ void sum_together(float* v, int lane) {
  if constexpr (kLanes > 1) {
    constexpr int kStep = kLanes / 2;
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
      const bool is_upper = lane & kStep;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float given = is_upper ? v[i] : v[i + kHalf];
        const float kept = is_upper ? v[i + kHalf] : v[i];
        v[i] = kept + __shfl_xor_sync(kAllLanes, given, kStep);
      }
      sum_together<kHalf, kStep>(v, lane);
    } else {
      v[0] += __shfl_xor_sync(kAllLanes, v[0], kStep);
      sum_together<1, kStep>(v, lane);
    }
  }
}

// Of kCount values over kLanes lanes: bits from the top of the lane's number in its group.
template <int kCount, int kLanes>
__device__ __forceinline__ int owned_value(int lane) {
  static_assert(kCount <= kLanes, "one value a lane at most");
  return (lane % kLanes) / (kLanes / kCount);
}

__device__ __forceinline__ float dot(float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}

template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void gdn_decode(const GdnDecodeParams& p) {
  using S = Shape<kKeyDim, kValueDim>;
  constexpr int kPasses = S::kPasses, kRowLanes = S::kRowLanes;
  __shared__ __align__(16) float channels[S::kChannels];
  __shared__ float outputs[kValueDim];
  __shared__ float square_sums[2 * kKeyDim / 32];
  __shared__ float gates[2];
  // Constants of a thread's own, kept out of its registers.
  __shared__ float4 taps[S::kChannels];
  __shared__ float norm[kValueDim];
  __shared__ float gate_constants[2];
  __shared__ int write_slot;

  allow_next_kernel();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = blockIdx.x, row = blockIdx.y;
  const int share = p.value_heads / p.key_heads, key_head = head / share;
  const int key_channels = p.key_heads * kKeyDim;
  const bool is_channel = thread < S::kChannels;
  const bool is_value = thread >= 2 * kKeyDim;
  int channel = 0;
  if (is_channel) {
    channel = is_value ? 2 * key_channels + head * kValueDim + thread - 2 * kKeyDim
                       : thread / kKeyDim * key_channels + key_head * kKeyDim + thread % kKeyDim;
  }
  if (is_channel) {
    const ConvTaps own = load_taps(p.conv, channel, p.width);
    taps[thread] = make_float4(own.w[0], own.w[1], own.w[2], own.w[3]);
  }
  if (thread < kValueDim) norm[thread] = bf16_to_float(__ldg(p.norm + thread));
  if (thread == S::kThreads - 1) {
    gate_constants[0] = __ldg(p.a_log + head);
    gate_constants[1] = __ldg(p.dt_bias + head);
  }
  // Rows, states and windows were there before the kernel ahead began.
  const int first = __ldcg(p.row_starts + row), last = __ldcg(p.row_starts + row + 1);
  const u64 read_slot = static_cast<u32>(__ldcg(p.read_slots + row));
  if (thread == 0) write_slot = __ldcg(p.write_slots + row);
  ConvWindow window = load_window(p.windows + read_slot * p.window_stride, channel, p.width);
  const int row_lane = lane % kRowLanes;
  const int first_state_row = warp * (32 / kRowLanes) + lane / kRowLanes;
  const u32 state_offset =
      head * (kValueDim * kKeyDim) + first_state_row * kKeyDim + row_lane * 4;
  const float* read_state = p.states + read_slot * p.state_stride + state_offset;
  float4 state[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    state[i] = __ldcg(reinterpret_cast<const float4*>(read_state + i * S::kRowsAtOnce * kKeyDim));
  }
  wait_for_previous_kernel();

  const int z_channels = 2 * key_channels + p.value_heads * kValueDim;
  for (int t = first; t < last; ++t) {
    const u16* token = p.projection + static_cast<u64>(t) * p.projection_stride;
    u16 z = 0;
    if (thread < kValueDim) z = __ldcg(token + z_channels + head * kValueDim + thread);
    if (is_channel) {
      const float4 own = taps[thread];
      const float c = bf16_to_float(convolve(window, {{own.x, own.y, own.z, own.w}},
                                             bf16_to_float(__ldcg(token + channel))));
      channels[thread] = c;
      if (!is_value) {
        const float sum = warp_sum(c * c);
        if (lane == 0) square_sums[warp] = sum;
      }
    } else if (thread == S::kThreads - 1) {
      const u16* b = token + z_channels + p.value_heads * kValueDim + head;
      gates[0] = write_strength(__ldcg(b));
      gates[1] = expf(log_decay(__ldcg(b + p.value_heads), gate_constants[0],
                                gate_constants[1]));
    }
    __syncthreads();

    // Lengths are applied to sums, so that q and k need not stay in registers.
    const float beta = gates[0], decay = gates[1];
    float predicted[kPasses], read[kPasses];
    {
      const float4 k = reinterpret_cast<const float4*>(channels + kKeyDim)[row_lane];
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        state[i] = make_float4(state[i].x * decay, state[i].y * decay, state[i].z * decay,
                               state[i].w * decay);
        predicted[i] = dot(state[i], k);
      }
    }
    sum_together<kPasses, kRowLanes>(predicted, lane);
    float overlap[1];
    {
      const float4 q = reinterpret_cast<const float4*>(channels)[opaque(row_lane)];
      overlap[0] = dot(q, reinterpret_cast<const float4*>(channels + kKeyDim)[opaque(row_lane)]);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) read[i] = dot(state[i], q);
    }
    sum_together<kPasses, kRowLanes>(read, lane);
    sum_together<1, kRowLanes>(overlap, lane);
    float q_square = 0.f, k_square = 0.f;
#pragma unroll
    for (int i = 0; i < kKeyDim / 32; ++i) {
      q_square += square_sums[i];
      k_square += square_sums[kKeyDim / 32 + i];
    }
    const float k_scale = inverse_length(k_square);
    const int again = opaque(lane);
    const int owned_row = owned_value<kPasses, kRowLanes>(again) * S::kRowsAtOnce +
                          warp * (32 / kRowLanes) + again / kRowLanes;
    const float value = channels[2 * kKeyDim + owned_row];
    const float update = beta * fmaf(-k_scale, predicted[0], value) * k_scale;
    if (lane % (kRowLanes / kPasses) == 0) {
      const float q_scale = inverse_length(q_square) * rsqrtf(static_cast<float>(kKeyDim));
      outputs[owned_row] = fmaf(overlap[0], update, read[0]) * q_scale;
    }
    const float4 k = reinterpret_cast<const float4*>(channels + kKeyDim)[opaque(row_lane)];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int owner = lane / kRowLanes * kRowLanes + i * (kRowLanes / kPasses);
      const float u = __shfl_sync(kAllLanes, update, owner);
      state[i] = make_float4(fmaf(k.x, u, state[i].x), fmaf(k.y, u, state[i].y),
                             fmaf(k.z, u, state[i].z), fmaf(k.w, u, state[i].w));
    }
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
  const u64 target = static_cast<u32>(write_slot);
  float* write_state = p.states + target * p.state_stride + state_offset;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    __stcg(reinterpret_cast<float4*>(write_state + i * S::kRowsAtOnce * kKeyDim), state[i]);
  }
  // Channels of q and k belong to `share` blocks: the first of them stores their window.
  if (is_channel && (is_value || head % share == 0)) {
    store_window(p.windows + target * p.window_stride, channel, p.width, window);
  }
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
