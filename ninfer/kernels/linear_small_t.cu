// linear_small_t: y[t, n] = sum_k x[t, k] * W[n, k] for few columns t, with fused ends.
//
// Contract: ninfer/ops/linear_small_t.py. Weight image: ninfer/ops/linear_packing.py.
// Entries: linear_small_t_<format>_<8, 16, 24 or 32>, T up to that; one block shape a format.
//
// The image is one long row of units of eight 2 KiB parts, row block after row block; a part is 32
// rows by 32 (bf16), 64 (e4m3) or 128 (e2m1) columns. Thread block b owns units
// [b * U / B, (b + 1) * U / B): one contiguous stretch of memory, which a warp streams into a ring in
// shared memory. Other warps multiply on tensor cores, each its part of every unit, or half of a
// part where weights have to be decoded. Warps with the same rows add up in shared memory when a
// row block ends; thread blocks with the same rows add up in the block that has the first of them,
// in the order of k. So which numbers are added in which order depends on the weight's shape and the
// number of thread blocks, never on T.
//
// Sums travel between blocks as words that are never all ones: the reader polls the data itself
// and leaves ones behind. All blocks of the grid must therefore be resident at once.
//
// A window of x is in shared memory. Where all that a stretch needs does not fit, there are two windows, and
// one is on its way while the other is multiplied.
//
// Bytes: the image once, x once a row block (from L2), partial sums (in L2). The fragment-major
// layout and the striped split are ideas of IST-DASLab/marlin.

#include "bulk.cuh"
#include "dtypes.cuh"
#include "linear_parts.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kMaxStages = 12;
constexpr int kMaxTokens = 32;
constexpr int kUnitsAhead = 4;  // of a piece's end, when what the end needs is asked for
constexpr u32 kEmpty = 0xffffffffu;  // no arithmetic yields this pattern

template <class Format>
struct Shape {
  static constexpr int kWarps = kPartsPerUnit * Format::kWarpsPerPart;  // consumers; one more warp fills the ring
  static constexpr int kConsumers = kWarps * 32;
  static constexpr int kThreads = kConsumers + 32;
};

// Blocks whose registers fit a multiprocessor: two of one kernel, or of a kernel and the next. With 32 columns
// of e2m1 one does.
template <class Format, int kTiles>
constexpr int kResident =
    __CUDA_ARCH__ == 900 && Format::kWarpsPerPart == 1 && (Format::kPartSlab == 0 || kTiles < 4) ? 2 : 1;

enum Epilogue : int { kStoreBf16 = 0, kStoreFloat = 1, kAddResidual = 2, kSwiglu = 3 };

struct LinearParams {
  const u8* weights;
  const u16* x;             // [T, K] bf16
  void* y;                  // [T, N] bf16 or f32; [T, N / 2] bf16 for kSwiglu
  const u16* residual;      // [T, N] bf16, for kAddResidual
  const float* row_scale;   // [N] f32, of the formats that scale rows
  float* partials;          // all ones before and after
  float* square_sums;       // out [T, N / 32] f32 or null: of the rounded y, by strip
  const float* x_square_sums;  // in [T, num_square_sums] f32 or null: normalise x with them
  const u16* norm_weight;   // [K] bf16
  int rows;                 // N
  int columns;              // K
  int tokens;               // T
  int x_stride;             // elements between two columns t of x
  int y_stride;
  int units_per_block;
  int row_blocks;
  int strips_per_block;     // 1, 2, 4 or 8; the warps split k
  int last_strips;          // strips of the last row block
  int stages;
  int window;               // columns k of x in a window
  int epilogue;
  int num_square_sums;
  float norm_eps;
  float norm_offset;        // added to norm_weight
  int lookahead;            // units beyond the first ring that are called into the L2 at the start
  int windows;              // 1 or 2; from 17 columns on 1 means that it holds all that a stretch needs
};
static_assert(sizeof(LinearParams) == 144, "ninfer/ops/linear_small_t.py mirrors this struct");

// Position in the ring; the parity flips at every wrap.
struct RingPosition {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Whether a window may keep whole rows of x for all row blocks of a stretch. Many columns seldom fit, and
// registers are short: they have two windows, or one that holds all of the stretch.
template <int kTiles>
constexpr bool kKeepsRows = kTiles <= 2;

// Column tiles whose sums come in at once: more would take shared memory from x, and registers.
template <int kTiles>
constexpr int kTilesAtOnce = kTiles < 2 ? kTiles : 2;

// Shared memory: the ring, then at fixed distances its barriers, 1 / rms of every column t, sums of
// the warps that share rows with another; last the windows of x.
struct SharedLayout {
  u32 ring, full;

  template <class Format>
  static __device__ __forceinline__ SharedLayout of(Format, const void* base, const LinearParams& p) {
    const u32 ring = shared_address(base);
    return SharedLayout{ring, ring + p.stages * unit_bytes<Format>(kPartsPerUnit)};
  }
  __device__ __forceinline__ u32 empty() const { return full + kMaxStages * 8; }
  __device__ __forceinline__ u32 scales() const { return full + kMaxStages * 16; }
  __device__ __forceinline__ u32 scratch() const { return scales() + kMaxTokens * 4; }
  template <class Format, int kTiles>
  __device__ __forceinline__ u32 windows(const LinearParams& p) const {
    return scratch() + (Shape<Format>::kWarps - p.strips_per_block) * (kTilesAtOnce<kTiles> * 1024);
  }
};

// Units [begin, end) that are this thread block's. units * blocks fits 31 bits: the plan sees to it.
struct Stretch {
  int begin, end;

  __device__ __forceinline__ explicit Stretch(const LinearParams& p)
      : begin(first_of(p, blockIdx.x)), end(first_of(p, blockIdx.x + 1)) {}

  // The first unit of the piece that ends before `unit`, worked out anew where registers are short.
  static __device__ __forceinline__ int piece_begin(const LinearParams& p, int unit) {
    const int block_begin = static_cast<u32>(unit - 1) / static_cast<u32>(p.units_per_block) * p.units_per_block;
    return max(first_of(p, opaque(blockIdx.x)), block_begin);
  }

  static __device__ __forceinline__ int first_of(const LinearParams& p, u32 block) {
    return static_cast<int>(block * units(p) / gridDim.x);
  }
  static __device__ __forceinline__ u32 units(const LinearParams& p) { return p.units_per_block * p.row_blocks; }
};

// The block whose stretch holds `unit`.
__device__ __forceinline__ int block_of_unit(const LinearParams& p, u32 unit) {
  return static_cast<int>(((unit + 1) * gridDim.x - 1) / Stretch::units(p));
}

// Where units lie: those of the last row block may be smaller.
template <class Format>
struct Image {
  const u8* base;
  u32 full_bytes, last_bytes;
  int last_begin;

  __device__ __forceinline__ explicit Image(const LinearParams& p)
      : base(p.weights),
        full_bytes(unit_bytes<Format>(kPartsPerUnit)),
        last_bytes(unit_bytes<Format>(p.last_strips * (kPartsPerUnit / p.strips_per_block))),
        last_begin((p.row_blocks - 1) * p.units_per_block) {}
  __device__ __forceinline__ u32 bytes(int unit) const {
    return unit >= last_begin ? last_bytes : full_bytes;
  }
  __device__ __forceinline__ const u8* at(int unit) const {
    return base + static_cast<u64>(min(unit, last_begin)) * full_bytes +
           static_cast<u64>(max(unit - last_begin, 0)) * last_bytes;
  }
};

// Streams units into the ring. What lies just behind the first ring is called into the L2, so that
// memory stays busy while the block waits for the kernel before it.
template <class Format>
__device__ void fill_ring(const LinearParams& p, const SharedLayout& shared, int lane) {
  const u64 policy = evict_first_policy();
  const Image<Format> image(p);
  const Stretch mine(p);
  RingPosition at;
#pragma unroll 1
  for (int unit = mine.begin; unit < mine.end; ++unit) {
    if (unit - mine.begin == p.stages && lane == 0) {
      for (int ahead = unit; ahead < min(mine.end, unit + p.lookahead); ++ahead) {
        prefetch_global(image.at(ahead), image.bytes(ahead));
      }
    }
    if (unit - mine.begin >= p.stages) barrier_wait(shared.empty() + at.stage * 8, at.parity ^ 1);
    fill_shared(shared.ring + at.stage * image.full_bytes, image.at(unit), image.bytes(unit),
                shared.full + at.stage * 8, policy, lane);
    at.advance(p.stages);
  }
}

template <class Format>
__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(Shape<Format>::kConsumers) : "memory");
}

// Constants that nobody has read lately, into the L2 while there is time.
__device__ __forceinline__ void call_norm_weight(const LinearParams& p, int thread) {
  if (p.x_square_sums == nullptr || thread != 0) return;
  for (int k = blockIdx.x * 64; k < p.columns; k += gridDim.x * 64) prefetch_line(p.norm_weight + k);
}

// 1 / rms of the columns of x from the sums their writer left, in a fixed order.
template <class Format>
__device__ void load_norm_scales(const LinearParams& p, u32 scales, int warp, int lane) {
  constexpr int kBatch = 8;  // loads under way at once
#pragma unroll 1
  for (int t = warp; t < p.tokens; t += Shape<Format>::kWarps) {
    const float* sums = p.x_square_sums + static_cast<size_t>(t) * p.num_square_sums;
    float sum = 0.f;
#pragma unroll 1
    for (int first = lane; first < p.num_square_sums; first += 32 * kBatch) {
      float values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        values[i] = first + 32 * i < p.num_square_sums ? __ldcg(sums + first + 32 * i) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += values[i];
    }
    const float scale = 1.f / sqrtf(warp_sum(sum) / opaque(p.columns) + p.norm_eps);
    if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + t * 4), "f"(scale));
  }
}

__device__ __forceinline__ uint4 normalise(uint4 x, uint4 weight, float scale, float offset) {
  const u32 in[4] = {x.x, x.y, x.z, x.w};
  const u32 by[4] = {weight.x, weight.y, weight.z, weight.w};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __uint_as_float(in[i] << 16) * scale;
    const float high = __uint_as_float(in[i] & 0xffff0000u) * scale;
    out[i] = pack_bf16x2(low * (offset + __uint_as_float(by[i] << 16)),
                         high * (offset + __uint_as_float(by[i] & 0xffff0000u)));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Columns of x in shared memory: those of `count` consecutive units from unit `first_unit` of a row
// block on, in that order; after column K comes column 0 of the next row block.
struct WindowRange {
  int first, block_columns, vectors;  // first column; columns of a row block; vectors of 8 columns

  __device__ __forceinline__ WindowRange(const LinearParams& p, int unit_columns, int first_unit, int count)
      : first(first_unit * unit_columns),
        block_columns(p.units_per_block * unit_columns),
        vectors(count * unit_columns / 8) {}
  __device__ __forceinline__ int column(int vector) const {
    int k = first + vector * 8;
    while (k >= block_columns) k -= block_columns;
    return k;
  }
};

template <class Format>
__device__ __forceinline__ u32 window_pitch(const LinearParams& p) {
  return (opaque(p.window) + Format::kPitchPad) * 2;
}

// A thread's way over the vectors of a window's rows: those of one row, then those of the next.
template <class Format>
struct WindowWalk {
  int vectors, row, vector;
  int row_step, vector_step;

  __device__ __forceinline__ WindowWalk(int row_vectors, u32 start)
      : vectors(row_vectors),
        row(start / static_cast<u32>(vectors)),
        vector(start - row * vectors),
        row_step(Shape<Format>::kConsumers / static_cast<u32>(vectors)),
        vector_step(Shape<Format>::kConsumers - row_step * vectors) {}
  // On by as many vectors as there are consumers.
  __device__ __forceinline__ void advance() {
    row += row_step, vector += vector_step;
    if (vector >= vectors) vector -= vectors, ++row;
  }
};

// Begins to copy a window; zeros from K to the end of its unit. Thread blocks begin at different
// places: all of them read the same x at the same time.
template <class Format>
__device__ void copy_window(const LinearParams& p, u32 window, u32 pitch, const WindowRange& range, int thread) {
  const int total = range.vectors * p.tokens;
  WindowWalk<Format> at(range.vectors, static_cast<u32>(total) * blockIdx.x / gridDim.x + thread);
#pragma unroll 1
  for (int i = thread; i < total; i += Shape<Format>::kConsumers, at.advance()) {
    int t = at.row;
    while (t >= p.tokens) t -= p.tokens;
    const int v = at.vector, k = range.column(v);
    const u16* from = p.x + static_cast<size_t>(t) * p.x_stride + (k < p.columns ? k : 0);
    copy_shared_16(window + t * pitch + v * 16, from, k < p.columns);
  }
}

// Normalises a window in place, two columns t together where registers allow.
template <class Format, int kTiles>
__device__ void normalise_window(const LinearParams& p, u32 scales, u32 window, u32 pitch,
                                 const WindowRange& range, int thread) {
  constexpr bool kHasRoom = Format::kWarpsPerPart == 1 ? kTiles > 2 : kTiles < 4;
  constexpr int kColumnGroup = kHasRoom ? 2 : 1;
  const int total = range.vectors * ((p.tokens + kColumnGroup - 1) / kColumnGroup);
  WindowWalk<Format> walk(range.vectors, thread);
#pragma unroll 1
  for (int i = thread; i < total; i += Shape<Format>::kConsumers, walk.advance()) {
    const int t = walk.row * kColumnGroup, v = walk.vector, k = range.column(v);
    if (k >= p.columns) continue;
    const uint4 weight = __ldg(reinterpret_cast<const uint4*>(p.norm_weight + k));
    const u32 at = window + t * pitch + v * 16;
    uint4 x[kColumnGroup];
#pragma unroll
    for (int c = 0; c < kColumnGroup; ++c) {
      if (t + c < p.tokens) x[c] = load_shared_16(at + c * pitch);
    }
#pragma unroll
    for (int c = 0; c < kColumnGroup; ++c) {
      if (t + c >= p.tokens) break;
      const float scale = load_shared_float(scales + (t + c) * 4);
      store_shared_16(at + c * pitch, normalise(x[c], weight, scale, p.norm_offset));
    }
  }
}

// Fragments of sums go out and come in column tile by column tile: 2 * tile + row tile.
template <int kTiles>
__device__ __forceinline__ uint4 fragment(const Accumulators<kTiles>& sum, int index) {
  const float* c = sum.at[index % 2][index / 2];
  return make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]), __float_as_uint(c[3]));
}

template <int kTiles>
__device__ __forceinline__ void add_fragment(Accumulators<kTiles>& sum, int index, uint4 other) {
  float* c = sum.at[index % 2][index / 2];
  c[0] += __uint_as_float(other.x), c[1] += __uint_as_float(other.y);
  c[2] += __uint_as_float(other.z), c[3] += __uint_as_float(other.w);
}

// Where a warp's sums go: strip `index` of all.
struct Strip {
  int index, lane;
  __device__ __forceinline__ int first_row() const { return index * kStripRows; }
};

__device__ __forceinline__ float silu(float gate) { return gate / (1.f + __expf(-gate)); }

// Where a lane's sums of one column t go: rows row, row + 8, row + 16 and row + 24 of the strip.
struct Column {
  int t, row;
  u32 at;  // of the first row in y

  __device__ __forceinline__ Column(const LinearParams& p, const Strip& strip, int tile, int i)
      : t(tile * 8 + (strip.lane % 4) * 2 + i),
        row(strip.first_row() + strip.lane / 4),
        at(static_cast<u32>(t) * p.y_stride + row) {}
};

// The four sums of a column, in the order of rows.
template <int kTiles>
__device__ __forceinline__ void column_sums(const Accumulators<kTiles>& sum, int tile, int i,
                                            float (&values)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) values[r] = sum.at[r / 2][tile][r % 2 * 2 + i];
}

// Gate rows are rows 0..7 of a tile and their up rows 8..15: a lane holds both of a pair.
template <int kTiles>
__device__ __forceinline__ void store_swiglu(const LinearParams& p, const Strip& strip,
                                             const Accumulators<kTiles>& sum) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = tile * 8 + (strip.lane % 4) * 2 + i;
      if (t >= p.tokens) continue;
      float values[4];
      column_sums(sum, tile, i, values);
      const int row = strip.first_row() / 2 + strip.lane / 4;
      u16* y = static_cast<u16*>(p.y) + static_cast<u32>(t) * p.y_stride + row;
      if (row * 2 < p.rows) y[0] = float_to_bf16(silu(values[0]) * values[1]);
      if (row * 2 + 16 < p.rows) y[8] = float_to_bf16(silu(values[2]) * values[3]);
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void store_float(const LinearParams& p, const Strip& strip,
                                            const Accumulators<kTiles>& sum) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Column column(p, strip, tile, i);
      if (column.t >= p.tokens) continue;
      float values[4];
      column_sums(sum, tile, i, values);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (column.row + r * 8 < p.rows) static_cast<float*>(p.y)[column.at + r * 8] = values[r];
      }
    }
  }
}

// The residual of a lane's rows in a column; zeros if there is none.
__device__ __forceinline__ void load_residual(const LinearParams& p, const Column& column, u32* values) {
  const bool has_residual = p.epilogue == kAddResidual && column.t < p.tokens;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const bool is_real = has_residual && column.row + r * 8 < p.rows;
    // y may be the residual: a lane reads its elements before it writes them.
    values[r] = is_real ? __ldcg(p.residual + column.at + r * 8) : 0;
  }
}

// Column tiles whose residuals are on their way at once: a round trip for each would be seen.
template <int kTiles>
constexpr int kTilesAhead = kTiles < 4 ? kTiles : 2;

// Those of a column tile.
__device__ __forceinline__ void load_residuals(const LinearParams& p, const Strip& strip, int tile, u32 (&residuals)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) load_residual(p, Column(p, strip, tile, i), residuals + 4 * i);
}

// One column as bf16, the residual added before the one rounding; returns the sum of squares.
__device__ __forceinline__ float store_bf16(const LinearParams& p, const Column& column,
                                            const u32* residual, float (&values)[4]) {
  const int rows = p.rows - column.row;
  if (p.epilogue == kAddResidual) {
#pragma unroll
    for (int r = 0; r < 4; ++r) values[r] += bf16_to_float(static_cast<u16>(residual[r]));
  }
  float squares = 0.f;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (r * 8 >= rows) continue;
    const u16 rounded = float_to_bf16(values[r]);
    static_cast<u16*>(p.y)[column.at + r * 8] = rounded;
    squares += bf16_to_float(rounded) * bf16_to_float(rounded);
  }
  return squares;
}

template <int kTiles>
__device__ __forceinline__ void store_tile(const LinearParams& p, const Strip& strip, int tile, const u32 (&residuals)[8],
                                           const Accumulators<kTiles>& sum) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Column column(p, strip, tile, i);
    float values[4], squares = 0.f;
    column_sums(sum, tile, i, values);
    if (column.t < p.tokens) squares = store_bf16(p, column, residuals + 4 * i, values);
    if (p.square_sums == nullptr) continue;
    squares = row_group_sum(squares);
    const int strips = (opaque(p.rows) + kStripRows - 1) / kStripRows;
    if (strip.lane < 4 && column.t < p.tokens) {
      p.square_sums[column.t * strips + strip.index] = squares;
    }
  }
}

// `residuals` are those of the first tiles; the others come as places become free.
template <int kTiles>
__device__ __forceinline__ void store_rows(const LinearParams& p, const Strip& strip, u32 (&residuals)[kTilesAhead<kTiles>][8],
                                           const Accumulators<kTiles>& sum) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    u32 (&own)[8] = residuals[tile % kTilesAhead<kTiles>];
    store_tile(p, strip, tile, own, sum);
    if (tile + kTilesAhead<kTiles> < kTiles) load_residuals(p, strip, tile + kTilesAhead<kTiles>, own);
  }
}

// Scales of the lane's rows g, g + 8 of the first and the second tile.
struct RowScales {
  float at[4];
};

template <class Format>
__device__ __forceinline__ RowScales load_row_scales(const LinearParams& p, const Strip& strip) {
  RowScales scales;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = strip.first_row() + i * 8 + strip.lane / 4;
    scales.at[i] = Format::kScalesRows && row < p.rows ? __ldg(p.row_scale + row) : 1.f;
  }
  return scales;
}

template <int kTiles>
__device__ __forceinline__ void finish_strip(const LinearParams& p, const Strip& strip, const RowScales& scales,
                                             u32 (&residuals)[kTilesAhead<kTiles>][8], Accumulators<kTiles>& sum) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles * 4; ++i) {
    const int row_tile = i / (kTiles * 4), upper = i % 4 / 2;
    sum.at[row_tile][i / 4 % kTiles][i % 4] *= scales.at[row_tile * 2 + upper];
  }
  if (p.epilogue == kSwiglu) {
    store_swiglu(p, strip, sum);
  } else if (p.epilogue == kStoreFloat) {
    store_float(p, strip, sum);
  } else {
    store_rows(p, strip, residuals, sum);
  }
}

// Adds up the warps that worked on the same strip, in the order of k; warps of the first slice
// get the sums.
template <class Format, int kTiles>
__device__ void add_slices(const LinearParams& p, u32 scratch, int warp, int lane,
                           Accumulators<kTiles>& sum) {
  const int first = p.strips_per_block;
  constexpr int kFragments = 2 * kTilesAtOnce<kTiles>, kBytes = kFragments * 512;
  const u32 mine = scratch + (warp - first) * kBytes + lane * 16;
#pragma unroll
  for (int done = 0; done < 2 * kTiles; done += kFragments) {
    consumer_barrier<Format>();
    if (warp >= first) {
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if (done + i < 2 * kTiles) store_shared_16(mine + i * 512, fragment(sum, done + i));
      }
    }
    consumer_barrier<Format>();
    if (warp >= first) continue;
#pragma unroll 1
    for (int other = warp + first; other < Shape<Format>::kWarps; other += first) {
      const u32 theirs = scratch + (other - first) * kBytes + lane * 16;
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if (done + i < 2 * kTiles) add_fragment(sum, done + i, load_shared_16(theirs + i * 512));
      }
    }
  }
}

// Sums of one strip in memory, by lane. Pieces of a row block have consecutive slots: thread block
// plus row block.
template <int kTiles>
__device__ __forceinline__ uint4* partial_of(const LinearParams& p, int slot, int strip, int lane) {
  return reinterpret_cast<uint4*>(p.partials) +
         static_cast<size_t>(slot * p.strips_per_block + strip) * (2 * kTiles * 32) + lane;
}

template <int kTiles>
__device__ __forceinline__ void give_strip(uint4* slot, const Accumulators<kTiles>& sum) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) store_relaxed_16(slot + i * 32, fragment(sum, i));
}

__device__ __forceinline__ bool is_complete(uint4 v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

// strips_per_block is a power of two. Opaque: what follows from it would be kept in registers.
__device__ __forceinline__ int strip_shift(const LinearParams& p) { return __ffs(opaque(p.strips_per_block)) - 1; }

// A thread block's units of one row block.
struct Piece {
  int row_block, begin, end;
  int block_begin, block_end;
  int strips;

  __device__ __forceinline__ Piece(const LinearParams& p, int unit, int stretch_end)
      : row_block(static_cast<u32>(unit) / static_cast<u32>(p.units_per_block)),
        begin(unit),
        block_begin(row_block * p.units_per_block),
        block_end(block_begin + p.units_per_block),
        strips(row_block == p.row_blocks - 1 ? p.last_strips : p.strips_per_block) {
    end = min(stretch_end, block_end);
  }
  // Whether it begins its row block: then its sums end here.
  __device__ __forceinline__ bool is_first() const { return begin == block_begin; }
};

// A consumer's place among those of its block.
template <class Format>
struct Consumer {
  int warp, lane, half;  // half: of a part, for formats whose parts two warps share
  int strip, slice, slices;

  __device__ __forceinline__ Consumer(const LinearParams& p, int thread)
      : warp(thread / 32),
        lane(thread % 32),
        half((warp >> strip_shift(p)) % Format::kWarpsPerPart),
        strip(warp & (p.strips_per_block - 1)),
        slice((warp >> strip_shift(p)) / Format::kWarpsPerPart),
        slices(kPartsPerUnit >> strip_shift(p)) {}
  // Whether the warp gets the sums of one of `strips` strips.
  __device__ __forceinline__ bool is_finisher(int strips) const { return slice + half == 0 && strip < strips; }
  __device__ __forceinline__ Strip target(const LinearParams& p, const Piece& piece) const {
    return Strip{piece.row_block * p.strips_per_block + strip, lane};
  }
};

// The end of a piece: its sums go to y, or to the thread block that has the row block's first piece.
// There the finisher of a strip needs the residual, and the other warps of the strip each fetch sums
// of other thread blocks. Of one column tile, both are asked for some units ahead and take the same
// registers; more would not fit.
template <class Format, int kTiles>
struct PieceEnd {
  static constexpr bool kAsksAhead = kTiles == 1;

  u32 asked[8];
  RowScales scales;

  // A warp's share of what comes from other thread blocks: slots first, first + step, .. up to last.
  struct Slots {
    int first, step, last;

    __device__ __forceinline__ Slots(const LinearParams& p, const Piece& piece, const Consumer<Format>& me) {
      const int team = Shape<Format>::kWarps >> strip_shift(p), member = me.warp >> strip_shift(p);
      const int slot = blockIdx.x + piece.row_block;
      const bool takes = piece.is_first() && piece.end < piece.block_end && me.strip < piece.strips &&
                         (member > 0 || team == 1);
      const int others = takes ? block_of_unit(p, piece.block_end - 1) - static_cast<int>(blockIdx.x) : 0;
      first = slot + max(member, 1), step = max(team - 1, 1), last = slot + others;
    }
  };

  __device__ __forceinline__ void ask(const LinearParams& p, const Piece& piece, const Consumer<Format>& me) {
    if constexpr (!kAsksAhead) return;
    else if (me.is_finisher(piece.strips) && piece.is_first()) {
      load_residuals(p, me.target(p, piece), 0, asked);
      scales = load_row_scales<Format>(p, me.target(p, piece));
    } else {
      const Slots slots(p, piece, me);
      if (slots.first <= slots.last) ask_slot(partial_of<1>(p, slots.first, me.strip, me.lane), 0, asked);
    }
  }

  __device__ __forceinline__ void finish(const LinearParams& p, const Piece& piece, const Consumer<Format>& me,
                                         u32 scratch, Accumulators<kTiles>& sum) {
    const bool is_finisher = me.is_finisher(piece.strips);
    const Slots slots(p, piece, me);
#pragma unroll 1
    for (int slot = slots.first; slot <= slots.last; slot += slots.step) {
      take_slot(partial_of<kTiles>(p, slot, me.strip, me.lane), is_finisher || slot > slots.first, sum);
    }
    const bool is_alone = Shape<Format>::kWarps == p.strips_per_block;
    if (!is_alone) add_slices<Format>(p, scratch, me.warp, me.lane, sum);
    if (!is_finisher) return;
    if (piece.is_first()) {
      u32 residuals[kTilesAhead<kTiles>][8];
#pragma unroll
      for (int tile = 0; tile < kTilesAhead<kTiles>; ++tile) {
        if (kAsksAhead && !is_alone) {
#pragma unroll
          for (int i = 0; i < 8; ++i) residuals[tile][i] = asked[i];
        } else {
          load_residuals(p, me.target(p, piece), tile, residuals[tile]);
        }
      }
      if (!kAsksAhead) scales = load_row_scales<Format>(p, me.target(p, piece));
      finish_strip(p, me.target(p, piece), scales, residuals, sum);
    } else {
      give_strip(partial_of<kTiles>(p, blockIdx.x + piece.row_block, me.strip, me.lane), sum);
    }
  }

 private:
  using Words = u32[8 * kTilesAtOnce<kTiles>];
  static constexpr int kFragments = 2 * kTilesAtOnce<kTiles>;  // in them

  // Adds a slot; `is_new`: nobody has asked for it yet.
  __device__ __forceinline__ void take_slot(uint4* from, bool is_new, Accumulators<kTiles>& sum) {
    if constexpr (kAsksAhead) {
      if (is_new) ask_slot(from, 0, asked);
      add_slot(from, 0, asked, sum);
    } else {
#pragma unroll
      for (int first = 0; first < 2 * kTiles; first += kFragments) {
        Words words;
        ask_slot(from, first, words);
        add_slot(from, first, words, sum);
      }
    }
  }

  // Of a slot, the fragments from `first` on.
  static __device__ __forceinline__ void ask_slot(const uint4* from, int first, Words& words) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (first + i >= 2 * kTiles) break;
      const uint4 v = load_relaxed_16(from + (first + i) * 32);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }

  // Waits for what was asked for and adds it. The slot is left empty.
  static __device__ __forceinline__ void add_slot(uint4* from, int first, const Words& words, Accumulators<kTiles>& sum) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (first + i >= 2 * kTiles) break;
      uint4 v = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
      for (u32 polls = 0; !is_complete(v); ++polls) {
        if (polls == kMaxPolls) __trap();
        v = load_relaxed_16(from + (first + i) * 32);
      }
      add_fragment(sum, first + i, v);
      store_relaxed_16(from + (first + i) * 32, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
    }
  }
};

// Constants of a piece's end, into the L2 while there is time.
template <class Format>
__device__ __forceinline__ void prefetch_row_scales(const LinearParams& p, const Piece& piece, int thread) {
  if (!Format::kScalesRows || thread >= piece.strips) return;
  prefetch_line(p.row_scale + (piece.row_block * p.strips_per_block + thread) * kStripRows);
}

// Units whose columns of x a window holds, and its address. A whole row of x, once there, serves every
// row block.
struct Window {
  int begin, end;
  bool is_whole;
  u32 address;
};

// Moves the window to `unit`, which it does not hold. With two windows it was on its way from the second
// move on, and the one after it is begun.
template <class Format, int kTiles>
__device__ __forceinline__ void move_window(const LinearParams& p, const SharedLayout& shared, Window& window,
                                            const Piece& piece, int unit, int stretch_end, int thread) {
  const int unit_columns = (kPartsPerUnit >> strip_shift(p)) * Format::kPartColumns;
  const int window_units = p.window >> (__ffs(unit_columns) - 1);
  const u32 pitch = window_pitch<Format>(p), base = shared.windows<Format, kTiles>(p);
  const u32 both = 2 * base + p.tokens * pitch;  // sum of the two windows' addresses
  const bool is_first = window.end == 0, is_double = !kKeepsRows<kTiles> || p.windows == 2;
  const bool is_on_its_way = is_double && !is_first;
  window.is_whole = !is_double && window_units >= p.units_per_block && stretch_end - unit > window_units;
  window.begin = window.is_whole ? piece.block_begin : unit;
  window.end = window.begin + (window.is_whole ? p.units_per_block : min(window_units, stretch_end - unit));
  window.address = is_on_its_way ? both - window.address : base;
  const WindowRange range(p, unit_columns, window.begin - piece.block_begin, window.end - window.begin);
  if (!is_on_its_way) {
    if (!is_first) consumer_barrier<Format>();
    copy_window<Format>(p, window.address, pitch, range, thread);
  }
  const bool has_norm = p.x_square_sums != nullptr;
  if (has_norm && is_first) load_norm_scales<Format>(p, shared.scales(), thread / 32, thread % 32);
  copy_shared_wait();
  consumer_barrier<Format>();
  if (is_double && window.end < stretch_end) {
    const int count = min(window_units, stretch_end - window.end);
    const WindowRange next(p, unit_columns, window.end - piece.block_begin, count);
    copy_window<Format>(p, both - window.address, pitch, next, thread);
  }
  if (has_norm) {
    normalise_window<Format, kTiles>(p, shared.scales(), window.address, pitch, range, thread);
    consumer_barrier<Format>();
  }
}

// Where a warp finds its share of a unit in its stage, and the addresses of x's fragments.
template <class Format, int kTiles>
struct Reader {
  u32 weights, slab, step;
  u32 columns[kTiles];

  // Columns past T repeat the last one: their products are never stored. A warp without a strip
  // repeats the last one; nobody reads its sums.
  __device__ __forceinline__ Reader(const LinearParams& p, const Consumer<Format>& me, int strips, u32 window,
                                    int units_before)
      : step(me.slices * Format::kPartColumns * 2) {
    const u32 part = me.slice * strips + min(me.strip, strips - 1);
    weights = part * kPartBytes + me.half * 1024 + me.lane * 16;
    slab = me.slices * strips * kPartBytes + part_slab<Format>(part, me.half, me.lane);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int t = min(tile * 8 + me.lane / 4, p.tokens - 1);
      columns[tile] = window + t * window_pitch<Format>(p) + units_before * step +
                      me.slice * (Format::kPartColumns * 2) + me.half * Format::kPartColumns +
                      me.lane % 4 * Format::kLaneBytes;
    }
  }
};

// Multiplies `count` units that follow each other in the ring.
template <class Format, int kTiles>
__device__ __forceinline__ void multiply_units(const SharedLayout& shared, RingPosition& at, int stages,
                                               Reader<Format, kTiles>& from, int count, int lane,
                                               Accumulators<kTiles>& sum) {
  const u32 unknown_zero = static_cast<u32>(stages) >> 31;
#pragma unroll 1
  for (; count > 0; --count) {
    const u32 stage = shared.ring + at.stage * unit_bytes<Format>(kPartsPerUnit);
    barrier_wait(shared.full + at.stage * 8, at.parity);
    const Part<Format> part = load_part<Format>(stage + from.weights, stage + from.slab);
    // Every lane for itself: one for all would be as fast, but racecheck follows no warp barrier.
    give_stage_back(shared.empty() + at.stage * 8, word_of_each_load(part), unknown_zero);
    at.advance(stages);
    multiply_part(sum, part, from.columns);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) from.columns[tile] += from.step;
  }
}

template <class Format, int kTiles>
__device__ __forceinline__ void consume_ring(const LinearParams& p, const SharedLayout& shared, int thread) {
  const Stretch mine(p);
  RingPosition at;
  Window window{};
  call_norm_weight(p, thread);
  // From here on what the kernel before has written may be read, and memory may be written.
  wait_for_previous_kernel();
#pragma unroll 1
  for (int unit = mine.begin; unit < mine.end;) {
    const int first = unit;
    prefetch_row_scales<Format>(p, Piece(p, first, mine.end), opaque(thread));
    PieceEnd<Format, kTiles> end;
    Accumulators<kTiles> sum;
    sum.clear();
    bool is_done;
#pragma unroll 1
    do {
      const Piece piece(p, opaque(unit), mine.end);
      if (kKeepsRows<kTiles> && window.is_whole) window.begin = piece.block_begin, window.end = piece.block_end;
      if (unit >= window.end) {
        move_window<Format, kTiles>(p, shared, window, piece, unit, mine.end, opaque(thread));
      }
      const int count = min(piece.end, window.end) - unit;
      const Consumer<Format> me(p, opaque(thread));
      Reader<Format, kTiles> from(p, me, piece.strips, window.address, unit - window.begin);
      unit += count;
      is_done = unit == piece.end;
      const int late = end.kAsksAhead && is_done ? min(count, kUnitsAhead) : 0;
      multiply_units(shared, at, p.stages, from, count - late, me.lane, sum);
      if (end.kAsksAhead && is_done) {
        end.ask(p, Piece(p, first, mine.end), me);
        multiply_units(shared, at, p.stages, from, late, me.lane, sum);
      }
    } while (!is_done);
    const Piece done(p, kTiles == 1 ? opaque(first) : Stretch::piece_begin(p, unit), mine.end);
    const Consumer<Format> me(p, opaque(thread));
    end.finish(p, done, me, shared.scratch(), sum);
  }
}

template <class Format, int kTiles>
__device__ __forceinline__ void linear_small_t(const LinearParams& p) {
  constexpr int kConsumers = Shape<Format>::kConsumers;
  extern __shared__ __align__(128) u8 memory[];
  const SharedLayout shared = SharedLayout::of(Format{}, memory, p);
  const int thread = threadIdx.x;
  if (thread == kConsumers) {
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      barrier_init(shared.full + stage * 8, fill_threads());
      barrier_init(shared.empty() + stage * 8, Shape<Format>::kConsumers);
    }
    barrier_init_fence();
  }
  allow_next_kernel();
  __syncthreads();
  if (thread >= kConsumers) {
    const int lane = thread - kConsumers;
    if (lane < fill_threads()) fill_ring<Format>(p, shared, lane);
    return;
  }
  consume_ring<Format, kTiles>(p, shared, thread);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Shape<Bf16>::kThreads, kResident<Bf16, 1>)
linear_small_t_bf16_8(const LinearParams p) { linear_small_t<Bf16, 1>(p); }

extern "C" __global__ void __launch_bounds__(Shape<Bf16>::kThreads, kResident<Bf16, 2>)
linear_small_t_bf16_16(const LinearParams p) { linear_small_t<Bf16, 2>(p); }

extern "C" __global__ void __launch_bounds__(Shape<Bf16>::kThreads, kResident<Bf16, 3>)
linear_small_t_bf16_24(const LinearParams p) { linear_small_t<Bf16, 3>(p); }

extern "C" __global__ void __launch_bounds__(Shape<Bf16>::kThreads, kResident<Bf16, 4>)
linear_small_t_bf16_32(const LinearParams p) { linear_small_t<Bf16, 4>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Row>::kThreads, kResident<E4m3Row, 1>)
linear_small_t_fp8_row_8(const LinearParams p) { linear_small_t<E4m3Row, 1>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Row>::kThreads, kResident<E4m3Row, 2>)
linear_small_t_fp8_row_16(const LinearParams p) { linear_small_t<E4m3Row, 2>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Row>::kThreads, kResident<E4m3Row, 3>)
linear_small_t_fp8_row_24(const LinearParams p) { linear_small_t<E4m3Row, 3>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Row>::kThreads, kResident<E4m3Row, 4>)
linear_small_t_fp8_row_32(const LinearParams p) { linear_small_t<E4m3Row, 4>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Block>::kThreads, kResident<E4m3Block, 1>)
linear_small_t_fp8_block_8(const LinearParams p) { linear_small_t<E4m3Block, 1>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Block>::kThreads, kResident<E4m3Block, 2>)
linear_small_t_fp8_block_16(const LinearParams p) { linear_small_t<E4m3Block, 2>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Block>::kThreads, kResident<E4m3Block, 3>)
linear_small_t_fp8_block_24(const LinearParams p) { linear_small_t<E4m3Block, 3>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E4m3Block>::kThreads, kResident<E4m3Block, 4>)
linear_small_t_fp8_block_32(const LinearParams p) { linear_small_t<E4m3Block, 4>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E2m1>::kThreads, kResident<E2m1, 1>)
linear_small_t_nvfp4_8(const LinearParams p) { linear_small_t<E2m1, 1>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E2m1>::kThreads, kResident<E2m1, 2>)
linear_small_t_nvfp4_16(const LinearParams p) { linear_small_t<E2m1, 2>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E2m1>::kThreads, kResident<E2m1, 3>)
linear_small_t_nvfp4_24(const LinearParams p) { linear_small_t<E2m1, 3>(p); }

extern "C" __global__ void __launch_bounds__(Shape<E2m1>::kThreads, kResident<E2m1, 4>)
linear_small_t_nvfp4_32(const LinearParams p) { linear_small_t<E2m1, 4>(p); }
