// A token of Gated DeltaNet by one thread block: what gdn_decode and gdn_fold share, so that both
// leave the same bits.
//
// The state of a head is in registers. A row of it lies in dk / 4 lanes, 4 neighbours each; a thread
// holds the same 4 columns of kPasses rows.
//
//   q, k, v of the token: a thread a channel              -> shared memory
//   p = S^T k and r = S^T q of the decayed state S, all rows of a warp reduced together
//   u = beta (v - p);  S += k u^T;  o = r + (k . q) u     -> shared memory
#pragma once

#include "gdn.cuh"
#include "warp.cuh"

constexpr int kMaxStepWarps = 16;

// Blocks of the largest shapes that share a multiprocessor: two where 64 registers hold a thread.
#if __CUDA_ARCH__ == 900
constexpr int kResidentBlocks = 2;
#else
constexpr int kResidentBlocks = 1;
#endif

template <int kKeyDim, int kValueDim>
struct StepShape {
  static constexpr int kWarpsNeeded = kKeyDim * kValueDim / 128;
  static constexpr int kWarps = kWarpsNeeded < kMaxStepWarps ? kWarpsNeeded : kMaxStepWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowLanes = kKeyDim / 4;
  static constexpr int kRowsAtOnce = kWarps * (32 / kRowLanes);
  static constexpr int kPasses = kValueDim / kRowsAtOnce;
  static constexpr int kChannels = 2 * kKeyDim + kValueDim;
  static_assert(kPasses * kRowsAtOnce == kValueDim, "rows divide evenly");
  static_assert(kChannels <= kThreads - 32, "a thread a channel, and the last warp for the gates");
};

// Shared memory of a block. Constants of a thread's own are here, kept out of its registers.
template <int kKeyDim, int kValueDim>
struct StepMemory {
  alignas(16) float channels[StepShape<kKeyDim, kValueDim>::kChannels];
  float4 taps[StepShape<kKeyDim, kValueDim>::kChannels];
  float square_sums[2 * kKeyDim / 32];
  float gates[2];
  float gate_constants[2];
};

// What a thread does: its channel of the convolution, its part of the state.
template <int kKeyDim, int kValueDim>
struct StepThread {
  using S = StepShape<kKeyDim, kValueDim>;
  int thread, lane, warp, row_lane;
  bool is_channel, is_value;
  int channel;       // 0 for a thread without one
  u32 state_offset;  // of its first element, from slot and layer

  __device__ __forceinline__ StepThread(int head, int key_heads, int value_heads)
      : thread(threadIdx.x), lane(thread % 32), warp(thread / 32), row_lane(lane % S::kRowLanes),
        is_channel(thread < S::kChannels), is_value(thread >= 2 * kKeyDim), channel(0) {
    const int key_head = head / (value_heads / key_heads), key_channels = key_heads * kKeyDim;
    if (is_channel) {
      channel = is_value ? 2 * key_channels + head * kValueDim + thread - 2 * kKeyDim
                         : thread / kKeyDim * key_channels + key_head * kKeyDim + thread % kKeyDim;
    }
    const int first_row = warp * (32 / S::kRowLanes) + lane / S::kRowLanes;
    state_offset = head * (kValueDim * kKeyDim) + first_row * kKeyDim + row_lane * 4;
  }
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
__device__ __forceinline__ void load_constants(StepMemory<kKeyDim, kValueDim>& m, const StepThread<kKeyDim, kValueDim>& at,
                                               const u16* conv, int width, const float* a_log, const float* dt_bias, int head) {
  if (at.is_channel) {
    const ConvTaps own = load_taps(conv, at.channel, width);
    m.taps[at.thread] = make_float4(own.w[0], own.w[1], own.w[2], own.w[3]);
  }
  if (at.thread == StepShape<kKeyDim, kValueDim>::kThreads - 1) {
    m.gate_constants[0] = __ldg(a_log + head);
    m.gate_constants[1] = __ldg(dt_bias + head);
  }
}

// A head's part of a StateImage: `windows` [Cd, width - 1] and `states` [Hv, dv, dk] of slot and layer.
template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void load_image(const StepThread<kKeyDim, kValueDim>& at, const u16* windows, int width,
                                           const float* states, ConvWindow& window,
                                           float4 (&state)[StepShape<kKeyDim, kValueDim>::kPasses]) {
  using S = StepShape<kKeyDim, kValueDim>;
  window = load_window(windows, at.channel, width);
#pragma unroll
  for (int i = 0; i < S::kPasses; ++i) {
    const float* from = states + at.state_offset + i * S::kRowsAtOnce * kKeyDim;
    state[i] = __ldcg(reinterpret_cast<const float4*>(from));
  }
}

// Channels of q and k belong to `share` heads: the first of them stores their window.
template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void store_image(const StepThread<kKeyDim, kValueDim>& at, u16* windows, int width,
                                            float* states, const ConvWindow& window,
                                            const float4 (&state)[StepShape<kKeyDim, kValueDim>::kPasses], int head,
                                            int share) {
  using S = StepShape<kKeyDim, kValueDim>;
#pragma unroll
  for (int i = 0; i < S::kPasses; ++i) {
    float* to = states + at.state_offset + i * S::kRowsAtOnce * kKeyDim;
    __stcg(reinterpret_cast<float4*>(to), state[i]);
  }
  if (at.is_channel && (at.is_value || head % share == 0)) {
    store_window(windows, at.channel, width, window);
  }
}

// Convolution, lengths and gates of a token, for all threads behind the next barrier. `b` is the
// head's place among the token's b; a lies `value_heads` behind it.
template <int kKeyDim, int kValueDim>
__device__ __forceinline__ void take_token(StepMemory<kKeyDim, kValueDim>& m, const StepThread<kKeyDim, kValueDim>& at,
                                           ConvWindow& window, const u16* token, const u16* b, int value_heads) {
  if (at.is_channel) {
    const float4 own = m.taps[at.thread];
    const float c = bf16_to_float(convolve(window, {{own.x, own.y, own.z, own.w}},
                                           bf16_to_float(__ldcg(token + at.channel))));
    m.channels[at.thread] = c;
    if (!at.is_value) {
      const float sum = warp_sum(__fmul_rn(c, c));  // never fused with the sum's first step
      if (at.lane == 0) m.square_sums[at.warp] = sum;
    }
  } else if (at.thread == StepShape<kKeyDim, kValueDim>::kThreads - 1) {
    m.gates[0] = write_strength(__ldcg(b));
    m.gates[1] = expf(log_decay(__ldcg(b + value_heads), m.gate_constants[0], m.gate_constants[1]));
  }
}

// The delta rule. With kHasOutput the outputs o of the head are for all threads behind the next
// barrier. Lengths are applied to sums, so that q and k need not stay in registers.
template <int kKeyDim, int kValueDim, bool kHasOutput>
__device__ __forceinline__ void apply_token(const StepMemory<kKeyDim, kValueDim>& m,
                                            const StepThread<kKeyDim, kValueDim>& at,
                                            float4 (&state)[StepShape<kKeyDim, kValueDim>::kPasses], float* outputs) {
  using S = StepShape<kKeyDim, kValueDim>;
  constexpr int kPasses = S::kPasses, kRowLanes = S::kRowLanes;
  const int lane = at.lane, row_lane = at.row_lane;
  const float beta = m.gates[0], decay = m.gates[1];
  float predicted[kPasses], read[kPasses], overlap[1];
  {
    const float4 k = reinterpret_cast<const float4*>(m.channels + kKeyDim)[row_lane];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      state[i] = make_float4(state[i].x * decay, state[i].y * decay, state[i].z * decay,
                             state[i].w * decay);
      predicted[i] = dot(state[i], k);
    }
  }
  sum_together<kPasses, kRowLanes>(predicted, lane);
  if constexpr (kHasOutput) {
    const float4 q = reinterpret_cast<const float4*>(m.channels)[opaque(row_lane)];
    overlap[0] = dot(q, reinterpret_cast<const float4*>(m.channels + kKeyDim)[opaque(row_lane)]);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) read[i] = dot(state[i], q);
    sum_together<kPasses, kRowLanes>(read, lane);
    sum_together<1, kRowLanes>(overlap, lane);
  }
  float q_square = 0.f, k_square = 0.f;
#pragma unroll
  for (int i = 0; i < kKeyDim / 32; ++i) {
    q_square += m.square_sums[i];
    k_square += m.square_sums[kKeyDim / 32 + i];
  }
  const float k_scale = inverse_length(k_square);
  const int again = opaque(lane);
  const int owned_row = owned_value<kPasses, kRowLanes>(again) * S::kRowsAtOnce +
                        at.warp * (32 / kRowLanes) + again / kRowLanes;
  const float value = m.channels[2 * kKeyDim + owned_row];
  const float update = beta * fmaf(-k_scale, predicted[0], value) * k_scale;
  if constexpr (kHasOutput) {
    if (lane % (kRowLanes / kPasses) == 0) {
      const float q_scale = inverse_length(q_square) * rsqrtf(static_cast<float>(kKeyDim));
      outputs[owned_row] = fmaf(overlap[0], update, read[0]) * q_scale;
    }
  }
  const float4 k = reinterpret_cast<const float4*>(m.channels + kKeyDim)[opaque(row_lane)];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int owner = lane / kRowLanes * kRowLanes + i * (kRowLanes / kPasses);
    const float u = __shfl_sync(kAllLanes, update, owner);
    state[i] = make_float4(fmaf(k.x, u, state[i].x), fmaf(k.y, u, state[i].y),
                           fmaf(k.z, u, state[i].z), fmaf(k.w, u, state[i].w));
  }
}
