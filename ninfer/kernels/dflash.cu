// dflash: what a block of guesses needs round its forward pass.
//
// Contracts: ninfer/ops/dflash_block.py and dflash_proposals.py.
//   dflash_block      a block a row: its columns, the keys that they see, the sampler's rows
//   dflash_proposals  a thread a proposal
// Bytes: every operand once. Latency of a launch is all that they cost.

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
