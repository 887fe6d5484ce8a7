// Units: the stretches of keys whose attention is computed apart and then combined.
//
// The first kFineUnits units hold kFineTokens keys each, so that a short context is spread over many
// multiprocessors; the others kUnitTokens. Borders depend on positions alone, never on the length.
// ninfer/ops/paged_attention_decode.py has the same count.
#pragma once

constexpr int kFineTokens = 64, kFineUnits = 32, kUnitTokens = 256;
constexpr int kFineEnd = kFineTokens * kFineUnits;

__device__ __forceinline__ int unit_start(int unit) {
  return unit < kFineUnits ? unit * kFineTokens : kFineEnd + (unit - kFineUnits) * kUnitTokens;
}

__device__ __forceinline__ int unit_tokens(int unit) { return unit < kFineUnits ? kFineTokens : kUnitTokens; }

// Units that hold the first `length` keys.
__device__ __forceinline__ int unit_count(int length) {
  if (length <= kFineEnd) return (length + kFineTokens - 1) / kFineTokens;
  return kFineUnits + (length - kFineEnd + kUnitTokens - 1) / kUnitTokens;
}

// The unit that holds a key.
__device__ __forceinline__ int unit_of(int key) {
  return key < kFineEnd ? key / kFineTokens : kFineUnits + (key - kFineEnd) / kUnitTokens;
}
