// linear_small_t: y[t, n] = sum_k x[t, k] * W[n, k] for few columns t, with fused ends.
//
// Contract: ninfer/ops/linear_small_t.py. Weight image: ninfer/ops/linear_packing.py.
// Entries: linear_small_t_<format>_<8 or 16>, T up to 8 or 16; one block shape for all.
//
// The image is one long row of units of eight 2 KiB parts, row block after row block; a part is 32
// rows by 32 (bf16), 64 (e4m3) or 128 (e2m1) columns. Thread block b owns units
// [b * U / B, (b + 1) * U / B): one contiguous stretch of memory, which a warp streams into a ring in
// shared memory. Each of eight other warps multiplies its part of every unit on tensor cores. Warps with the
// same rows add up in shared memory when a row block ends; thread blocks with the same rows add up
// in the block that has the first of them, in the order of k. So which numbers are added in which
// order depends on the weight's shape and the grid, never on T.
//
// Sums travel between blocks as words that are never all ones: the reader polls the data itself
// and leaves ones behind. All blocks of the grid must therefore be resident at once.
//
// Bytes: the image once, x once a row block (from L2), partial sums (in L2). The fragment-major
// layout and the striped split are ideas of IST-DASLab/marlin.

#include "bulk.cuh"
#include "dtypes.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kWarps = 8;  // consumers; one more warp fills the ring
constexpr int kConsumers = kWarps * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kResidentBlocks = __CUDA_ARCH__ >= 900 ? 2 : 1;
constexpr int kStripRows = 32;  // rows of a warp: two tiles of 16
constexpr u32 kPartBytes = 2048;
constexpr int kMaxStages = 12;
constexpr u32 kEmpty = 0xffffffffu;  // no arithmetic yields this pattern

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
  const u8* next_weights;   // image of a later launch or null
  u64 next_bytes;
  int rows;                 // N
  int columns;              // K
  int tokens;               // T
  int x_stride;             // elements between two columns t of x
  int y_stride;
  int units_per_block;
  int row_blocks;
  int strips_per_block;     // 1, 2, 4 or 8; the 8 warps split k 8 / strips ways
  int last_strips;          // strips of the last row block
  int stages;
  int window;               // columns k of x in shared memory at once
  int epilogue;
  int num_square_sums;
  float norm_eps;
  float norm_offset;        // added to norm_weight
  int lookahead;            // units beyond the first ring that are called into the L2 at the start
  int next_units, next_blocks, next_unit_bytes;  // how the later launch splits its image
  int next_count;           // units of each of its blocks to call into the L2
};
static_assert(sizeof(LinearParams) == 168, "ninfer/ops/linear_small_t.py mirrors this struct");

struct Bf16 {
  static constexpr int kPartColumns = 32;
  static constexpr u32 kPartSlab = 0, kUnitSlab = 0;
  static constexpr int kPitchPad = 32;  // elements; makes fragment reads free of bank conflicts
  static constexpr bool kScalesUnit = false, kScalesRows = false;
};

struct E4m3Row : Bf16 {
  static constexpr int kPartColumns = 64;
  static constexpr bool kScalesRows = true;
};

struct E4m3Block : E4m3Row {
  static constexpr u32 kUnitSlab = 64;  // a part: f32 of rows g, f32 of rows g + 8
  static constexpr bool kScalesUnit = true, kScalesRows = false;
};

struct E2m1 : Bf16 {
  static constexpr int kPartColumns = 128;
  static constexpr u32 kPartSlab = 256;  // e4m3 a row and 16 columns
  static constexpr int kPitchPad = 8;
  static constexpr bool kScalesRows = true;
};

template <class Format>
__device__ __forceinline__ u32 unit_bytes(int parts) {
  return parts * (kPartBytes + Format::kPartSlab) + Format::kUnitSlab;
}

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

struct SharedLayout {
  u32 ring, full, empty, scales, scratch, window;
};

template <class Format, int kTiles>
__device__ __forceinline__ SharedLayout shared_layout(const void* base, const LinearParams& p) {
  SharedLayout layout;
  layout.ring = shared_address(base);
  layout.full = layout.ring + p.stages * unit_bytes<Format>(kWarps);
  layout.empty = layout.full + kMaxStages * 8;
  layout.scales = layout.empty + kMaxStages * 8;  // 1 / rms of every column t
  layout.scratch = layout.scales + 64;  // sums of the warps that share rows with another
  layout.window = layout.scratch + (kWarps - p.strips_per_block) * (kTiles * 1024);
  return layout;
}

// units * blocks fits 31 bits: the plan sees to it.
__device__ __forceinline__ int range_begin(u32 block, u32 units) {
  return static_cast<int>(block * units / gridDim.x);
}

// The block whose range holds `unit`.
__device__ __forceinline__ int block_of_unit(u32 unit, u32 units) {
  return static_cast<int>(((unit + 1) * gridDim.x - 1) / units);
}

// Where units lie: those of the last row block may be smaller.
template <class Format>
struct Image {
  const u8* base;
  u32 full_bytes, last_bytes;
  int last_begin;

  __device__ __forceinline__ explicit Image(const LinearParams& p)
      : base(p.weights),
        full_bytes(unit_bytes<Format>(kWarps)),
        last_bytes(unit_bytes<Format>(p.last_strips * (kWarps / p.strips_per_block))),
        last_begin((p.row_blocks - 1) * p.units_per_block) {}
  __device__ __forceinline__ u32 bytes(int unit) const {
    return unit >= last_begin ? last_bytes : full_bytes;
  }
  __device__ __forceinline__ const u8* at(int unit) const {
    return base + static_cast<u64>(min(unit, last_begin)) * full_bytes +
           static_cast<u64>(max(unit - last_begin, 0)) * last_bytes;
  }
};

// Calls the first units of every block of a later launch into the L2. At the end of a block's own
// stream: then memory would idle until the next kernel is under way.
__device__ void call_next_weights(const LinearParams& p) {
  const u64 step = p.next_unit_bytes;
#pragma unroll 1
  for (u32 block = blockIdx.x; block < static_cast<u32>(p.next_blocks); block += gridDim.x) {
    u64 at = block * static_cast<u32>(p.next_units) / p.next_blocks * step;
    const u64 end = min(at + p.next_count * step, p.next_bytes);
#pragma unroll 1
    for (; at < end; at += step) {
      prefetch_global(p.next_weights + at, static_cast<u32>(min(step, end - at)));
    }
  }
}

// Streams units into the ring. What lies just behind the first ring is called into the L2, so that
// memory stays busy while the block waits for the kernel before it.
template <class Format>
__device__ void fill_ring(const LinearParams& p, const SharedLayout& shared, int begin, int end,
                          int lane) {
  const u64 policy = evict_first_policy();
  const Image<Format> image(p);
  RingPosition at;
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    if (unit - begin == p.stages && lane == 0) {
      for (int ahead = unit; ahead < min(end, unit + p.lookahead); ++ahead) {
        prefetch_global(image.at(ahead), image.bytes(ahead));
      }
    }
    if (unit - begin >= p.stages) barrier_wait(shared.empty + at.stage * 8, at.parity ^ 1);
    fill_shared(shared.ring + at.stage * image.full_bytes, image.at(unit), image.bytes(unit),
                shared.full + at.stage * 8, policy, lane);
    at.advance(p.stages);
  }
  if (p.next_weights != nullptr && lane == 0) call_next_weights(p);
}

__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// 1 / rms of the columns of x from the sums the kernel before left, in a fixed order.
__device__ void load_norm_scales(const LinearParams& p, u32 scales, int warp, int lane) {
#pragma unroll 1
  for (int t = warp; t < p.tokens; t += kWarps) {
    float sum = 0.f;
#pragma unroll 1
    for (int i = lane; i < p.num_square_sums; i += 32) {
      sum += __ldcg(p.x_square_sums + static_cast<size_t>(t) * p.num_square_sums + i);
    }
    const float scale = 1.f / sqrtf(warp_sum(sum) / p.columns + p.norm_eps);
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

// Columns of x in shared memory for `count` consecutive units, from unit `first_unit` of a row block
// on, in that order: after column K comes column 0 of the next row block. Zeros from K to the end of its unit. Normalised if
// asked, by the thread that copied. Every copy is in flight before the first wait.
__device__ void load_window(const LinearParams& p, const SharedLayout& shared, u32 pitch,
                            int unit_columns, int first_unit, int count, int thread) {
  const int block_columns = p.units_per_block * unit_columns;
  const int first = first_unit * unit_columns;
  const int vectors = count * unit_columns / 8, total = vectors * p.tokens;
  const bool is_normalised = p.x_square_sums != nullptr;
#pragma unroll 1
  for (int pass = 0; pass <= is_normalised; ++pass) {
#pragma unroll 1
    for (int i = thread, v = thread, t = 0; i < total; i += kConsumers, v += kConsumers) {
      while (v >= vectors) v -= vectors, ++t;
      int k = first + v * 8;
      while (k >= block_columns) k -= block_columns;
      const u32 at = shared.window + t * pitch + v * 16;
      if (pass == 0) {
        const u16* from = p.x + static_cast<size_t>(t) * p.x_stride + (k < p.columns ? k : 0);
        copy_shared_16(at, from, k < p.columns);
      } else if (k < p.columns) {
        const uint4 weight = __ldg(reinterpret_cast<const uint4*>(p.norm_weight + k));
        const float scale = load_shared_float(shared.scales + t * 4);
        store_shared_16(at, normalise(load_shared_16(at), weight, scale, p.norm_offset));
      }
    }
    if (pass == 0) copy_shared_wait();
  }
}

template <int kTiles>
struct Accumulators {
  float at[2][kTiles][4];  // row tile, column tile, fragment
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles * 4; ++i) (&at[0][0][0])[i] = 0.f;
  }
};

template <int kTiles>
__device__ __forceinline__ void multiply(Accumulators<kTiles>& sum, int row_tile, uint4 a,
                                         const u32 (&b0)[kTiles], const u32 (&b1)[kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    mma_bf16_16x8x16(sum.at[row_tile][tile], a, b0[tile], b1[tile]);
  }
}

// A part of a unit: its weights, and the addresses of x's fragments.
template <int kTiles>
__device__ __forceinline__ void multiply_part(Bf16, Accumulators<kTiles>& sum,
                                              const uint4 (&weights)[2][2],
                                              const u32 (&columns)[kTiles], uint2) {
  u32 b[4][kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const uint4 x = load_shared_16(columns[tile]);
    b[0][tile] = x.x, b[1][tile] = x.y, b[2][tile] = x.z, b[3][tile] = x.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) {
      multiply(sum, row_tile, weights[half][row_tile], b[2 * half], b[2 * half + 1]);
    }
  }
}

__device__ __forceinline__ uint4 e4m3_fragment(u32 low_word, u32 high_word) {
  return make_uint4(mul_bf16x2(e4m3_first_pair(low_word), kTwoTo120),
                    mul_bf16x2(e4m3_second_pair(low_word), kTwoTo120),
                    mul_bf16x2(e4m3_first_pair(high_word), kTwoTo120),
                    mul_bf16x2(e4m3_second_pair(high_word), kTwoTo120));
}

template <int kTiles>
__device__ __forceinline__ void multiply_part(E4m3Row, Accumulators<kTiles>& sum,
                                              const uint4 (&weights)[2][2],
                                              const u32 (&columns)[kTiles], uint2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 b[4][kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 x = load_shared_16(columns[tile] + half * 64);
      b[0][tile] = x.x, b[1][tile] = x.y, b[2][tile] = x.z, b[3][tile] = x.w;
    }
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) {
      const uint4 w = weights[half][row_tile];
      multiply(sum, row_tile, e4m3_fragment(w.x, w.y), b[0], b[1]);
      multiply(sum, row_tile, e4m3_fragment(w.z, w.w), b[2], b[3]);
    }
  }
}

// Scale pairs {row g, row g + 8} of the four (half, row tile) combinations, as bf16 pairs that
// also carry the 2^118 by which e2m1 patterns are too small; the 2^8 left is in row_scale.
__device__ __forceinline__ void e2m1_scales(uint2 slab, u32 (&low)[4], u32 (&high)[4]) {
  const u32 pairs[4] = {e4m3_first_pair(slab.x), e4m3_second_pair(slab.x), e4m3_first_pair(slab.y),
                        e4m3_second_pair(slab.y)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 scale = mul_bf16x2(mul_bf16x2(pairs[i], kTwoTo120), kTwoTo118);
    low[i] = __byte_perm(scale, scale, 0x1010);
    high[i] = __byte_perm(scale, scale, 0x3232);
  }
}

template <int kTiles>
__device__ __forceinline__ void multiply_part(E2m1, Accumulators<kTiles>& sum,
                                              const uint4 (&weights)[2][2],
                                              const u32 (&columns)[kTiles], uint2 slab) {
  u32 low[4], high[4];
  e2m1_scales(slab, low, high);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 b[8][kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 x = load_shared_16(columns[tile] + half * 128);
      const uint4 y = load_shared_16(columns[tile] + half * 128 + 16);
      b[0][tile] = x.x, b[1][tile] = x.y, b[2][tile] = x.z, b[3][tile] = x.w;
      b[4][tile] = y.x, b[5][tile] = y.y, b[6][tile] = y.z, b[7][tile] = y.w;
    }
#pragma unroll
    for (int row_tile = 0; row_tile < 2; ++row_tile) {
      const uint4 w = weights[half][row_tile];
      const u32 words[4] = {w.x, w.y, w.z, w.w};
      const int scale = half * 2 + row_tile;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint4 pairs = e2m1_pairs(words[m]);
        const uint4 a =
            make_uint4(mul_bf16x2(pairs.x, low[scale]), mul_bf16x2(pairs.y, high[scale]),
                       mul_bf16x2(pairs.z, low[scale]), mul_bf16x2(pairs.w, high[scale]));
        multiply(sum, row_tile, a, b[2 * m], b[2 * m + 1]);
      }
    }
  }
}

__device__ __forceinline__ void add_fragment(float (&c)[4], uint4 other) {
  c[0] += __uint_as_float(other.x), c[1] += __uint_as_float(other.y);
  c[2] += __uint_as_float(other.z), c[3] += __uint_as_float(other.w);
}

// sum += scale * part, with one scale for rows g of the tiles and one for rows g + 8.
template <int kTiles>
__device__ __forceinline__ void add_scaled(Accumulators<kTiles>& sum, const Accumulators<kTiles>& part,
                                           uint2 scales) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles * 4; ++i) {
    const float scale = __uint_as_float(i % 4 < 2 ? scales.x : scales.y);
    (&sum.at[0][0][0])[i] += scale * (&part.at[0][0][0])[i];
  }
}

// Where a warp's sums go: strip `index` of all.
struct Strip {
  int index, lane;
  __device__ __forceinline__ int first_row() const { return index * kStripRows; }
};

// y may be the residual: a lane reads its elements before it writes them.
__device__ __forceinline__ u16 load_residual(const u16* from) {
  return __ldcg(from);
}

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

// One column as bf16, the residual added before the one rounding; returns the sum of squares.
__device__ __forceinline__ float store_bf16(const LinearParams& p, const Column& column,
                                            float (&values)[4]) {
  const int rows = p.rows - column.row;
  if (p.epilogue == kAddResidual) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (r * 8 < rows) values[r] += bf16_to_float(load_residual(p.residual + column.at + r * 8));
    }
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
__device__ __forceinline__ void store_rows(const LinearParams& p, const Strip& strip,
                                           const Accumulators<kTiles>& sum) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Column column(p, strip, tile, i);
      float values[4], squares = 0.f;
      column_sums(sum, tile, i, values);
      if (column.t < p.tokens) squares = store_bf16(p, column, values);
      if (p.square_sums == nullptr) continue;
      squares = row_group_sum(squares);
      const int strips = (p.rows + kStripRows - 1) / kStripRows;
      if (strip.lane < 4 && column.t < p.tokens) {
        p.square_sums[column.t * strips + strip.index] = squares;
      }
    }
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
__device__ __forceinline__ void finish_strip(const LinearParams& p, const Strip& strip,
                                             const RowScales& scales, Accumulators<kTiles>& sum) {
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
    store_rows(p, strip, sum);
  }
}

// Adds up the warps that worked on the same strip, in the order of k; warps of the first slice
// get the sums.
template <int kTiles>
__device__ void add_slices(const LinearParams& p, u32 scratch, int warp, int lane,
                           Accumulators<kTiles>& sum) {
  const int first = p.strips_per_block;
  const u32 mine = scratch + (warp - first) * (kTiles * 1024) + lane * 16;
  consumer_barrier();
  if (warp >= first) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const float* c = sum.at[i / kTiles][i % kTiles];
      store_shared_16(mine + i * 512, make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]),
                                                 __float_as_uint(c[2]), __float_as_uint(c[3])));
    }
  }
  consumer_barrier();
  if (warp >= first) return;
#pragma unroll 1
  for (int other = warp + first; other < kWarps; other += first) {
    const u32 theirs = scratch + (other - first) * (kTiles * 1024) + lane * 16;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) add_fragment(sum.at[i / kTiles][i % kTiles], load_shared_16(theirs + i * 512));
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
  for (int i = 0; i < 2 * kTiles; ++i) {
    const float* c = sum.at[i / kTiles][i % kTiles];
    store_relaxed_16(slot + i * 32, make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]),
                                               __float_as_uint(c[2]), __float_as_uint(c[3])));
  }
}

__device__ __forceinline__ bool is_complete(uint4 v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

// Adds the other blocks' sums of a strip in order, waiting for each; kBatch reads are under way
// at a time. Slots are left empty.
template <int kTiles>
__device__ void take_strips(const LinearParams& p, int slot, int count, int strip, int lane,
                            Accumulators<kTiles>& sum) {
  constexpr int kFragments = 2 * kTiles, kBatch = 8 / kFragments;
#pragma unroll 1
  for (int done = 0; done < count; done += kBatch) {
    uint4 values[kBatch][kFragments];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint4* from = partial_of<kTiles>(p, slot + min(done + b, count - 1), strip, lane);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) values[b][i] = load_relaxed_16(from + i * 32);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (done + b >= count) break;
      uint4* from = partial_of<kTiles>(p, slot + done + b, strip, lane);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        for (u32 polls = 0; !is_complete(values[b][i]); ++polls) {
          if (polls == kMaxPolls) __trap();
          values[b][i] = load_relaxed_16(from + i * 32);
        }
        add_fragment(sum.at[i / kTiles][i % kTiles], values[b][i]);
        store_relaxed_16(from + i * 32, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
      }
    }
  }
}

// A warp's part of a unit, in registers.
struct Part {
  uint4 weights[2][2];
  uint2 slab;
};

// Copies part `part` of `parts` of the unit at `stage`.
template <class Format>
__device__ __forceinline__ Part load_part(u32 stage, int part, int parts, int lane) {
  const u32 slab = stage + parts * kPartBytes;
  Part loaded{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    loaded.weights[i / 2][i % 2] = load_shared_16(stage + part * kPartBytes + i * 512 + lane * 16);
  }
  if constexpr (Format::kScalesUnit) {
    loaded.slab = load_shared_8(slab + part * 8);
  } else if constexpr (Format::kPartSlab > 0) {
    loaded.slab = load_shared_8(slab + part * Format::kPartSlab + lane * 8);
  }
  return loaded;
}

template <class Format, int kTiles>
__device__ __forceinline__ void multiply_scaled(Accumulators<kTiles>& sum, const Part& part,
                                                const u32 (&columns)[kTiles]) {
  if constexpr (Format::kScalesUnit) {
    Accumulators<kTiles> unscaled;
    unscaled.clear();
    multiply_part(Format{}, unscaled, part.weights, columns, part.slab);
    add_scaled(sum, unscaled, part.slab);
  } else {
    multiply_part(Format{}, sum, part.weights, columns, part.slab);
  }
}

// Units whose columns of x shared memory holds. A whole row of x, once there, serves every row
// block.
struct Window {
  int begin = 0, end = 0;
  bool is_whole = false;
};

// From here on what the kernel before has written may be read, and memory may be written.
__device__ __forceinline__ void begin_reading(const LinearParams& p, const SharedLayout& shared, int thread) {
  wait_for_previous_kernel();
  if (p.x_square_sums != nullptr) {
    load_norm_scales(p, shared.scales, thread / 32, thread % 32);
    consumer_barrier();
  }
}

template <class Format, int kTiles>
__device__ void consume_ring(const LinearParams& p, const SharedLayout& shared, int begin, int end,
                             int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int slices = kWarps / p.strips_per_block;
  const int strip = warp % p.strips_per_block, slice = warp / p.strips_per_block;
  const int unit_columns = slices * Format::kPartColumns, window_units = p.window / unit_columns;
  const u32 stage_bytes = unit_bytes<Format>(kWarps);
  const u32 pitch = (p.window + Format::kPitchPad) * 2;
  // Columns past T repeat the last one: their products are never stored.
  u32 fragment[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int t = min(tile * 8 + lane / 4, p.tokens - 1);
    fragment[tile] = shared.window + t * pitch + slice * (Format::kPartColumns * 2) +
                     (lane % 4) * (Format::kPartColumns == 128 ? 32 : 16);
  }
  Window window;
  RingPosition at;
#pragma unroll 1
  for (int unit = begin; unit < end;) {
    const int row_block = unit / p.units_per_block;
    const int block_begin = row_block * p.units_per_block, block_end = block_begin + p.units_per_block;
    const int piece_begin = unit, piece_end = min(end, block_end);
    const int strips = row_block == p.row_blocks - 1 ? p.last_strips : p.strips_per_block;
    // A warp without a strip repeats the last one; nobody reads its sums.
    const int part_index = slice * strips + min(strip, strips - 1);
    Accumulators<kTiles> sum;
    sum.clear();
    if (window.is_whole) window.begin = block_begin;
#pragma unroll 1
    for (; unit < piece_end; ++unit) {
      if (unit >= window.end && !window.is_whole) {
        window.is_whole = window_units >= p.units_per_block && end - unit > window_units;
        window.begin = window.is_whole ? block_begin : unit;
        const int count = window.is_whole ? p.units_per_block : min(window_units, end - unit);
        window.end = window.begin + count;
        if (unit == begin) {
          begin_reading(p, shared, thread);
        } else {
          consumer_barrier();
        }
        load_window(p, shared, pitch, unit_columns, window.begin - block_begin, count, thread);
        consumer_barrier();
      }
      barrier_wait(shared.full + at.stage * 8, at.parity);
      const Part part = load_part<Format>(shared.ring + at.stage * stage_bytes, part_index,
                                          slices * strips, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.empty + at.stage * 8);
      at.advance(p.stages);
      u32 columns[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        columns[tile] = fragment[tile] + (unit - window.begin) * (unit_columns * 2);
      }
      multiply_scaled<Format>(sum, part, columns);
    }
    const Strip target{row_block * p.strips_per_block + strip, opaque(lane)};
    const RowScales scales = load_row_scales<Format>(p, target);
    if (slices > 1) add_slices(p, shared.scratch, warp, target.lane, sum);
    if (slice > 0 || strip >= strips) continue;
    const int slot = blockIdx.x + row_block;
    if (piece_begin > block_begin) {
      give_strip(partial_of<kTiles>(p, slot, strip, target.lane), sum);
      continue;
    }
    if (piece_end < block_end) {
      const int last = block_of_unit(block_end - 1, p.units_per_block * p.row_blocks);
      take_strips(p, slot + 1, last - static_cast<int>(blockIdx.x), strip, target.lane, sum);
    }
    finish_strip(p, target, scales, sum);
  }
}

template <class Format, int kTiles>
__device__ __forceinline__ void linear_small_t(const LinearParams& p) {
  extern __shared__ __align__(128) u8 memory[];
  const SharedLayout shared = shared_layout<Format, kTiles>(memory, p);
  const int thread = threadIdx.x;
  const int units = p.units_per_block * p.row_blocks;
  const int begin = range_begin(blockIdx.x, units), end = range_begin(blockIdx.x + 1, units);
  if (thread == kConsumers) {
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      barrier_init(shared.full + stage * 8, fill_threads());
      barrier_init(shared.empty + stage * 8, kWarps);
    }
    barrier_init_fence();
  }
  allow_next_kernel();
  __syncthreads();
  if (thread >= kConsumers) {
    const int lane = thread - kConsumers;
    if (lane < fill_threads()) fill_ring<Format>(p, shared, begin, end, lane);
    return;
  }
  consume_ring<Format, kTiles>(p, shared, begin, end, thread);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_bf16_8(const LinearParams p) { linear_small_t<Bf16, 1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_bf16_16(const LinearParams p) { linear_small_t<Bf16, 2>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_fp8_row_8(const LinearParams p) { linear_small_t<E4m3Row, 1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_fp8_row_16(const LinearParams p) { linear_small_t<E4m3Row, 2>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_fp8_block_8(const LinearParams p) { linear_small_t<E4m3Block, 1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_fp8_block_16(const LinearParams p) { linear_small_t<E4m3Block, 2>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_nvfp4_8(const LinearParams p) { linear_small_t<E2m1, 1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks)
linear_small_t_nvfp4_16(const LinearParams p) { linear_small_t<E2m1, 2>(p); }
