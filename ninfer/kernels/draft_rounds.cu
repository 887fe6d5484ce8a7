// draft_rounds: what a draft model needs between forward passes: which drafts were right, its next
// inputs, rows of outputs to and fro.
//
// Contracts: ninfer/ops/draft_match.py, draft_step.py, draft_input.py and copy_rows.py.
//   draft_match      a warp a row, a lane a column: the first column that ends the row is a ballot
//   draft_step       a thread a row
//   draft_input_<n>  a block a token and half, n vectors of 8 numbers a thread: the norms of
//                    rms_norm_bf16_<n>, sums in the same order
//   copy_rows        a block a row
// Bytes: every operand once. Latency of a launch is all that the first two cost.

#include "normalise.cuh"
#include "pdl.cuh"
#include "sample_row.cuh"
#include "square_sums.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

struct MatchParams {
  // The unit: R rows of T columns.
  const int* token_ids;       // [R T]
  const int* counts;          // [R]
  const int* ordinals;        // [R T]
  const int* rope_positions;  // [3, R T]
  const int* read_slots;      // [R]
  const int* limits;          // [R]
  const u32* rows;            // [R T, kRowWords]
  const int* chosen;          // [R T]
  const int* is_finite;       // [R T]
  int* accepted;              // [R]
  int* row_ends;              // [R]
  int* kept_columns;          // [R]
  // The pairs: R rows of T + 1 columns.
  int* pair_token_ids;
  int* pair_sources;
  int* pair_ordinals;
  int* pair_rope_positions;   // [3, R (T + 1)]
  int* pair_column_rows;
  int* pair_row_starts;       // [R + 1]
  int* last_columns;          // [R]
  int* chain_ordinals;        // [R]
  int* chain_rope_positions;  // [3, R]
  u32* chain_rows;            // [R, kRowWords]
  int num_rows;
  int columns;                // T
};
static_assert(sizeof(MatchParams) == 184, "ninfer/ops/draft_match.py mirrors this struct");

struct StepParams {
  const int* chosen;     // [R]
  const int* limits;     // [R]
  int* token_ids;        // [R]
  int* sources;          // [R]
  int* proposals;        // [R, num_proposals]
  int* ordinals;         // [R]
  int* rope_positions;   // [3, R]
  u32* rows;             // [R, kRowWords]
  int num_rows;
  int num_proposals;
  int index;
  int padding;
};
static_assert(sizeof(StepParams) == 80, "ninfer/ops/draft_step.py mirrors this struct");

struct InputParams {
  const int* token_ids;       // [N]
  const int* sources;         // [N] or null: a unit of one row
  const int* read_slot;       // [1], of such a unit
  const u16* table;           // [V, C] bf16
  const u16* hidden;          // [T, C] bf16
  const u16* kept;            // [slots, C] bf16
  const u16* embedding_norm;  // [C] bf16
  const u16* hidden_norm;     // [C] bf16
  u16* x;                     // [N, 2 C] bf16
  int num_ids;                // V
  int columns;                // C
  int hidden_stride, kept_stride, x_stride;
  float eps;
};
static_assert(sizeof(InputParams) == 96, "ninfer/ops/draft_input.py mirrors this struct");

struct CopyRowsParams {
  const u16* source;       // [S, C] bf16
  u16* target;             // [D, C] bf16
  const int* source_rows;  // [B] or null: b
  const int* target_rows;  // [B] or null: b
  int columns;             // C
  int source_stride, target_stride;
  int padding;
};
static_assert(sizeof(CopyRowsParams) == 48, "ninfer/ops/copy_rows.py mirrors this struct");

// Right drafts of a row whose column `lane` is this lane's.
__device__ __forceinline__ int count_right(const MatchParams& p, int row, int lane) {
  const int first = row * p.columns;
  const int drafts = min(max(__ldcg(p.counts + row) - 1, 0), p.columns - 1);
  bool has_none = false, ends = false;
  if (lane <= drafts) {
    const int chosen = __ldcg(p.chosen + first + lane);
    has_none = chosen < 0 || __ldcg(p.is_finite + first + lane) == 0;
    ends = has_none || lane == drafts || chosen != __ldcg(p.token_ids + first + lane + 1);
  }
  const int end = __ffs(static_cast<int>(__ballot_sync(kAllLanes, ends))) - 1;
  const bool is_failure = __ballot_sync(kAllLanes, has_none) >> end & 1;
  return is_failure ? max(end - 1, 0) : end;
}

// 16 bytes of the row of h that goes with token t.
__device__ __forceinline__ const uint4* hidden_row(const InputParams& p, int t) {
  const int source = p.sources != nullptr ? __ldcg(p.sources + t) : t > 0 ? t - 1 : -1 - __ldcg(p.read_slot);
  const u16* row = source < 0 ? p.kept + static_cast<u64>(-1 - source) * p.kept_stride
                              : p.hidden + static_cast<u64>(source) * p.hidden_stride;
  return reinterpret_cast<const uint4*>(row);
}

template <int kVectors>
__device__ __forceinline__ void draft_input(const InputParams& p) {
  constexpr u32 kNanPair = 0x7fc07fc0u;
  allow_next_kernel();
  const int t = blockIdx.x, vectors = p.columns / 8, threads = blockDim.x, thread = threadIdx.x;
  const bool is_embedding = blockIdx.y == 0;
  const uint4* gain = reinterpret_cast<const uint4*>(is_embedding ? p.embedding_norm : p.hidden_norm);
  uint4 weight[kVectors], x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    weight[i] = v < vectors ? __ldg(gain + v) : make_uint4(0, 0, 0, 0);
  }
  wait_for_previous_kernel();
  const int token = is_embedding ? __ldcg(p.token_ids + t) : 0;
  const bool is_real = token >= 0 && token < p.num_ids;
  const uint4* from = is_embedding
      ? reinterpret_cast<const uint4*>(p.table + static_cast<u64>(is_real ? token : 0) * p.columns)
      : hidden_row(p, t);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    x[i] = make_uint4(0, 0, 0, 0);
    if (v < vectors) x[i] = is_real ? __ldcg(from + v) : make_uint4(kNanPair, kNanPair, kNanPair, kNanPair);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += strip_sum(square_sum(x[i]));
  const float scale = 1.f / sqrtf(row_sum(sum) / p.columns + p.eps);
  u16* half = p.x + static_cast<u64>(t) * p.x_stride + (is_embedding ? 0 : p.columns);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * threads + thread;
    if (v < vectors) reinterpret_cast<uint4*>(half)[v] = normalised(x[i], weight[i], scale, 1.f);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32) draft_match(const MatchParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x, lane = threadIdx.x, first = row * p.columns;
  const int accepted = count_right(p, row, lane);
  const int start = __ldcg(p.ordinals + first), limit = __ldcg(p.limits + row);
  const int width = p.columns + 1, pair = row * width + lane;
  if (lane < width) {
    const bool is_real = start >= 0 && lane <= accepted + 1 && start + lane < limit;
    int token = 0, source = 0;
    if (is_real) {
      token = lane == 0 ? __ldcg(p.token_ids + first) : max(__ldcg(p.chosen + first + lane - 1), 0);
      source = lane == 0 ? -1 - __ldcg(p.read_slots + row) : first + lane - 1;
    }
    p.pair_token_ids[pair] = token;
    p.pair_sources[pair] = source;
    p.pair_ordinals[pair] = is_real ? start + lane : -1;
    p.pair_column_rows[pair] = row;
    if (lane == accepted + 1) p.chain_ordinals[row] = is_real ? start + lane : -1;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int position = __ldcg(p.rope_positions + axis * p.num_rows * p.columns + first) + lane;
      p.pair_rope_positions[axis * p.num_rows * width + pair] = position;
      if (lane == accepted + 1) p.chain_rope_positions[axis * p.num_rows + row] = position;
    }
  }
  if (lane < kRowWords) {
    const u32 word = __ldcg(p.rows + static_cast<u64>(first) * kRowWords + lane);
    p.chain_rows[row * kRowWords + lane] = plain_word(word, lane, start + accepted + 2);
  }
  if (lane == 0) {
    p.accepted[row] = accepted;
    p.row_ends[row] = first + accepted + 1;
    p.kept_columns[row] = first + accepted;
    p.last_columns[row] = row * width + accepted + 1;
    p.pair_row_starts[row] = row * width;
    if (row == p.num_rows - 1) p.pair_row_starts[p.num_rows] = p.num_rows * width;
  }
}

extern "C" __global__ void __launch_bounds__(256) draft_step(const StepParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= p.num_rows) return;
  const int chosen = __ldcg(p.chosen + row), ordinal = p.ordinals[row];
  p.proposals[row * p.num_proposals + p.index] = ordinal >= 0 ? chosen : -1;
  const bool is_alive = ordinal >= 0 && chosen >= 0 && ordinal + 1 < __ldcg(p.limits + row);
  p.ordinals[row] = is_alive ? ordinal + 1 : -1;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) p.rope_positions[axis * p.num_rows + row] += 1;
  p.rows[row * kRowWords + kPosition] += 1;
  p.token_ids[row] = max(chosen, 0);
  p.sources[row] = row;
}

extern "C" __global__ void __launch_bounds__(512)
draft_input_1(const InputParams p) { draft_input<1>(p); }

extern "C" __global__ void __launch_bounds__(512)
draft_input_2(const InputParams p) { draft_input<2>(p); }

extern "C" __global__ void __launch_bounds__(512)
draft_input_4(const InputParams p) { draft_input<4>(p); }

extern "C" __global__ void __launch_bounds__(512)
draft_input_8(const InputParams p) { draft_input<8>(p); }

extern "C" __global__ void __launch_bounds__(256) copy_rows(const CopyRowsParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x, vectors = p.columns / 8;
  const int source = p.source_rows == nullptr ? row : __ldcg(p.source_rows + row);
  const int target = p.target_rows == nullptr ? row : __ldcg(p.target_rows + row);
  const uint4* from = reinterpret_cast<const uint4*>(p.source + static_cast<u64>(source) * p.source_stride);
  uint4* to = reinterpret_cast<uint4*>(p.target + static_cast<u64>(target) * p.target_stride);
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) to[v] = __ldcg(from + v);
}
