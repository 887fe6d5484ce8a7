// How one token is chosen: the sampler's row, and the row of a token for which nothing but the
// sampling parameters count.
#pragma once

#include "vec.cuh"

struct SampleRow {
  u64 seed;
  double temperature;
  double top_p;
  float min_p, repetition, presence, frequency;
  int position, purpose;
  int top_k;      // 0: off
  int is_greedy;
  int num_top;    // -1: no log probabilities
  int has_mask;
  int bias_begin, bias_count;  // lists in ids; values has their biases and counts
  int suppressed_begin, suppressed_count;
  int prompt_begin, prompt_count;
  int generated_begin, generated_count;
};
static_assert(sizeof(SampleRow) == 96, "ninfer/ops/device_sampling.py mirrors this struct");

// The same as words; these are what a plain row changes.
constexpr int kRowWords = sizeof(SampleRow) / 4;
constexpr int kRepetition = 7, kPresence = 8, kFrequency = 9, kPosition = 10, kIsGreedy = 13, kNumTop = 14;
constexpr int kHasMask = 15;
constexpr int kFirstList = 16;  // begins and counts of lists from here to the end

// A word of the row of the token at `position`: no lists, mask, penalties, log probabilities.
__device__ __forceinline__ u32 plain_word(u32 word, int index, int position) {
  constexpr u32 kOne = 0x3f800000u;  // 1.f
  if (index >= kFirstList || index == kHasMask || index == kPresence || index == kFrequency) return 0;
  if (index == kRepetition) return kOne;
  if (index == kNumTop) return 0xffffffffu;
  return index == kPosition ? static_cast<u32>(position) : word;
}
