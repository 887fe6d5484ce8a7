// dflash: what a block of guesses needs round its forward pass.
//
// Contracts: ninfer/ops/dflash_block.py, dflash_proposals.py, dflash_conv.py and dflash_logits.py.
//   dflash_block        a block a row: its columns, the keys that they see, the sampler's rows
//   dflash_proposals    a thread a proposal
//   dflash_conv         a thread 8 channels of a token, of one group: a multiple of 8 channels wide
//   dflash_conv_narrow  the same for groups of any width
//   dflash_logits       a thread 4 logits of a token
// Bytes: every operand once, but x of a convolution once a tap, from the L2. Latency of a launch is
// all that the first two cost.

#include "dtypes.cuh"
#include "pdl.cuh"
#include "sample_row.cuh"
#include "vec.cuh"

namespace {

constexpr int kMaxKinds = 4;

struct BlockParams {
  // The newest token of each row.
  const int* chain_ordinals;        // [R]
  const int* chain_rope_positions;  // [3, R]
  const u32* chain_rows;            // [R, kRowWords]
  const int* newest_tokens;         // [P]
  const int* last_columns;          // [R]
  const int* proposed;              // [R]
  const int* limits;                // [R]
  // The block: R rows of W columns.
  int* token_ids;                   // [R W]
  int* ordinals;                    // [R W]
  int* rope_positions;              // [3, R W]
  int* column_rows;                 // [R W]
  int* row_starts;                  // [R + 1]
  int* firsts;                      // [kinds, R W]
  int* lasts;                       // [kinds, R W]
  u32* rows;                        // [R W, kRowWords]
  int num_rows;
  int columns;                      // W
  int mask_token_id;
  int num_candidates;               // 0: tokens are drawn, not listed
  int num_kinds;
  int windows[kMaxKinds];           // 0: none
  int is_causal[kMaxKinds];
  int padding;
};
static_assert(sizeof(BlockParams) == 176, "ninfer/ops/dflash_block.py mirrors this struct");

struct ProposalsParams {
  const int* chosen;    // [R W]
  const int* ordinals;  // [R W]
  int* proposals;       // [R, num_proposals]
  int num_rows;
  int columns;          // W
  int num_proposals;
  int padding;
};
static_assert(sizeof(ProposalsParams) == 40, "ninfer/ops/dflash_proposals.py mirrors this struct");

struct ConvParams {
  const u16* x;        // [N, C] bf16
  const u16* dynamic;  // [N, taps * groups] bf16, of this side
  const u16* base;     // [taps, C] bf16, of this side
  u16* y;              // [N, C] bf16
  int channels;        // C
  int taps;
  int groups;
  int columns;         // W
  int x_stride, dynamic_stride, y_stride;
  int is_residual;
};
static_assert(sizeof(ConvParams) == 64, "ninfer/ops/dflash_conv.py mirrors this struct");

struct LogitsParams {
  const float* logits;   // [T, Vd]
  const int* token_ids;  // [Vd] or null: the columns of y
  float* y;              // [T, V], or logits
  int columns;           // Vd
  int num_ids;           // V
  int logits_stride, y_stride;
  float scale;
  float cap;             // 0: none
};
static_assert(sizeof(LogitsParams) == 48, "ninfer/ops/dflash_logits.py mirrors this struct");

// Guesses of the row whose newest token stands at ordinal `start`.
__device__ __forceinline__ int count_guesses(const BlockParams& p, int row, int start) {
  if (start < 0) return 0;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    if (__ldcg(p.chain_rope_positions + axis * p.num_rows + row) != start) return 0;
  }
  const int room = __ldcg(p.limits + row) - start - 1;
  return max(min(min(__ldcg(p.proposed + row), p.columns - 1), room), 0);
}

// The keys that column i sees in the layers of one kind.
__device__ __forceinline__ void write_keys(const BlockParams& p, int kind, int at, int start, int i, int guesses,
                                           bool is_real) {
  const int window = p.windows[kind], ordinal = start + i;
  int first = 0, last = p.is_causal[kind] ? ordinal : start + guesses;
  if (window > 0) first = max(0, ordinal - window + 1), last = min(last, ordinal + window - 1);
  const int index = kind * p.num_rows * p.columns + at;
  p.firsts[index] = is_real ? first : 0;
  p.lasts[index] = is_real ? last : -1;
}

__device__ __forceinline__ void write_column(const BlockParams& p, int row, int i, int start, int guesses) {
  const int at = row * p.columns + i;
  const bool is_real = guesses > 0 && i <= guesses;
  const int newest = max(__ldcg(p.newest_tokens + __ldcg(p.last_columns + row)), 0);
  p.token_ids[at] = is_real && i > 0 ? p.mask_token_id : newest;
  p.ordinals[at] = is_real ? start + i : -1;
  p.column_rows[at] = row;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) p.rope_positions[axis * p.num_rows * p.columns + at] = max(start, 0) + i;
#pragma unroll
  for (int kind = 0; kind < kMaxKinds; ++kind) {
    if (kind < p.num_kinds) write_keys(p, kind, at, start, i, guesses, is_real);
  }
}

// A word of the sampler's row of a column, whose token stands at `position`.
__device__ __forceinline__ u32 column_word(const BlockParams& p, u32 word, int index, int position) {
  if (p.num_candidates > 0 && index == kIsGreedy) return 1;
  if (p.num_candidates > 0 && index == kNumTop) return p.num_candidates;
  return plain_word(word, index, position);
}

// sum[j] += (base + dynamic) * x for the 8 channels from `channel` on, of one tap.
template <bool kIsWide>
__device__ __forceinline__ void add_tap(float (&sum)[8], uint4 x, uint4 base, const u16* dynamic, int channel,
                                        int group_size) {
  const u32 in[4] = {x.x, x.y, x.z, x.w}, by[4] = {base.x, base.y, base.z, base.w};
  const float shared = kIsWide ? bf16_to_float(__ldcg(dynamic + channel / group_size)) : 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float own = kIsWide ? shared : bf16_to_float(__ldcg(dynamic + (channel + j) / group_size));
    const u32 value = j % 2 == 0 ? in[j / 2] << 16 : in[j / 2] & 0xffff0000u;
    const u32 weight = j % 2 == 0 ? by[j / 2] << 16 : by[j / 2] & 0xffff0000u;
    sum[j] = fmaf(__uint_as_float(weight) + own, __uint_as_float(value), sum[j]);
  }
}

template <bool kIsWide>
__device__ __forceinline__ void convolve(const ConvParams& p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int t = blockIdx.x, channel = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (channel >= p.channels) return;
  const int taps = min(p.taps, t % p.columns + 1), group_size = p.channels / p.groups;
  float sum[8] = {};
  for (int tap = 0; tap < taps; ++tap) {
    const u16* x = p.x + static_cast<u64>(t - tap) * p.x_stride + channel;
    const u16* base = p.base + static_cast<u64>(tap) * p.channels + channel;
    const u16* dynamic = p.dynamic + static_cast<u64>(t) * p.dynamic_stride + tap * p.groups;
    add_tap<kIsWide>(sum, __ldcg(reinterpret_cast<const uint4*>(x)), __ldg(reinterpret_cast<const uint4*>(base)),
                     dynamic, channel, group_size);
  }
  uint4* y = reinterpret_cast<uint4*>(p.y + static_cast<u64>(t) * p.y_stride + channel);
  const uint4 before = p.is_residual ? __ldcg(y) : make_uint4(0, 0, 0, 0);
  const u32 old[4] = {before.x, before.y, before.z, before.w};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = pack_bf16x2(__uint_as_float(old[i] << 16) + sum[2 * i],
                         __uint_as_float(old[i] & 0xffff0000u) + sum[2 * i + 1]);
  }
  *y = make_uint4(out[0], out[1], out[2], out[3]);
}

__device__ __forceinline__ float bounded(float logit, float scale, float cap) {
  const float x = logit * scale;
  return cap > 0.f ? cap * tanhf(x / cap) : x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) dflash_block(const BlockParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x, start = __ldcg(p.chain_ordinals + row);
  const int guesses = count_guesses(p, row, start);
  for (int i = threadIdx.x; i < p.columns; i += blockDim.x) write_column(p, row, i, start, guesses);
  const u32* chain = p.chain_rows + row * kRowWords;
  const int first = static_cast<int>(__ldcg(chain + kPosition)) - 1;
  u32* rows = p.rows + static_cast<u64>(row) * p.columns * kRowWords;
  for (int i = threadIdx.x; i < p.columns * kRowWords; i += blockDim.x) {
    const int column = i / kRowWords, index = i % kRowWords;
    rows[i] = column_word(p, __ldcg(chain + index), index, first + column);
  }
  if (threadIdx.x == 0) {
    p.row_starts[row] = row * p.columns;
    if (row == p.num_rows - 1) p.row_starts[p.num_rows] = p.num_rows * p.columns;
  }
}

extern "C" __global__ void __launch_bounds__(256) dflash_proposals(const ProposalsParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= p.num_rows * p.num_proposals) return;
  const int row = index / p.num_proposals, column = index % p.num_proposals + 1;
  const int at = row * p.columns + column;
  const bool is_real = column < p.columns && __ldcg(p.ordinals + at) >= 0;
  p.proposals[index] = is_real ? __ldcg(p.chosen + at) : -1;
}

extern "C" __global__ void __launch_bounds__(256) dflash_conv(const ConvParams p) { convolve<true>(p); }

extern "C" __global__ void __launch_bounds__(256) dflash_conv_narrow(const ConvParams p) { convolve<false>(p); }

extern "C" __global__ void __launch_bounds__(256) dflash_logits(const LogitsParams p) {
  constexpr int kLogits = 4;
  allow_next_kernel();
  wait_for_previous_kernel();
  const float* logits = p.logits + static_cast<u64>(blockIdx.x) * p.logits_stride;
  float* y = p.y + static_cast<u64>(blockIdx.x) * p.y_stride;
#pragma unroll
  for (int i = 0; i < kLogits; ++i) {
    const int column = (blockIdx.y * kLogits + i) * blockDim.x + threadIdx.x;
    if (column >= p.columns) return;
    const int token = p.token_ids == nullptr ? column : __ldg(p.token_ids + column);
    if (token >= 0 && token < p.num_ids) y[token] = bounded(__ldcg(logits + column), p.scale, p.cap);
  }
}
