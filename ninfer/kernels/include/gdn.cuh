// What the step and the chunk kernels of Gated DeltaNet share: convolution, gates, lengths.
//
// One source, so that a token's q, k, v, g and beta have the same bits whichever kernel it meets.
// The projection of a token is q [Hk, dk], k [Hk, dk], v [Hv, dv], z [Hv, dv], b [Hv], a [Hv].
#pragma once

#include "dtypes.cuh"

constexpr int kMaxTaps = 4;
constexpr float kLengthEps = 1e-6f;

// Inputs of one channel that later tokens still need, oldest first; shorter windows lie at the end.
struct ConvWindow {
  float x[kMaxTaps - 1];
};

// Taps of one channel; shorter filters lie at the end, behind zeros.
struct ConvTaps {
  float w[kMaxTaps];
};

__device__ __forceinline__ ConvTaps load_taps(const u16* weights, int channel, int width) {
  ConvTaps taps;
#pragma unroll
  for (int i = 0; i < kMaxTaps; ++i) {
    const int tap = i - (kMaxTaps - width);
    taps.w[i] = tap < 0 ? 0.f : bf16_to_float(__ldg(weights + channel * width + tap));
  }
  return taps;
}

// `windows` is [Cd, width - 1] of one slot and layer.
__device__ __forceinline__ ConvWindow load_window(const u16* windows, int channel, int width) {
  ConvWindow window;
#pragma unroll
  for (int i = 0; i < kMaxTaps - 1; ++i) {
    const int age = i - (kMaxTaps - width);
    window.x[i] = age < 0 ? 0.f : bf16_to_float(__ldcg(windows + channel * (width - 1) + age));
  }
  return window;
}

__device__ __forceinline__ void store_window(u16* windows, int channel, int width, ConvWindow window) {
#pragma unroll
  for (int i = 0; i < kMaxTaps - 1; ++i) {
    const int age = i - (kMaxTaps - width);
    if (age >= 0) windows[channel * (width - 1) + age] = float_to_bf16(window.x[i]);
  }
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Takes the newest input in; the result is rounded to bf16.
__device__ __forceinline__ u16 convolve(ConvWindow& window, ConvTaps taps, float newest) {
  float sum = window.x[0] * taps.w[0];
  sum = fmaf(window.x[1], taps.w[1], sum);
  sum = fmaf(window.x[2], taps.w[2], sum);
  sum = fmaf(newest, taps.w[3], sum);
  window.x[0] = window.x[1];
  window.x[1] = window.x[2];
  window.x[2] = newest;
  return float_to_bf16(silu(sum));
}

__device__ __forceinline__ float write_strength(u16 b) {
  return __fdividef(1.f, 1.f + expf(-bf16_to_float(b)));
}

// Natural logarithm of the factor that a step applies to the state; at most 0.
__device__ __forceinline__ float log_decay(u16 a, float a_log, float dt_bias) {
  const float x = bf16_to_float(a) + dt_bias;
  return -expf(a_log) * (x > 20.f ? x : log1pf(expf(x)));
}

__device__ __forceinline__ float inverse_length(float square_sum) {
  return rsqrtf(square_sum + kLengthEps);
}
