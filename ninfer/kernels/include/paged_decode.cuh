// Attention of a few columns a row over their pages, keys split in units: units, and their combination.
//
// A resident grid walks over items (sequence, unit, KV head, block of queries) that exist now, so
// that neither a long capacity nor lengths that differ cost anything. A query is a column and a
// head of the KV head's group. An item: scores of up to 256 keys, 64 keys a stage, warps share the
// keys (S^T = K Q^T on mma m16n8k16); maximum, exponentials and sum a query; then O^T = V^T P^T,
// warps share the dimensions. K and V pass through one ring of stages that runs ahead across items.
//
// Neither product needs its operands transposed in shared memory, as the order of a sum's terms is
// free: a lane takes 16 neighbouring bytes of a key as its share of D, and neighbouring dimensions
// of every fourth key as its share of the values; probabilities are stored in that order of keys.
// Bytes: K and V once (once more for every further block of 32 queries, mostly from L2). FLOP: 4 D
// for every query and key.
//
// With intervals (kInterval) a row's items begin at the first key that any of its columns sees: its
// unit is the first, and within that unit the pages and places in front are not read.
#pragma once

#include "attention_units.cuh"
#include "copy_groups.cuh"
#include "dtypes.cuh"
#include "kv_pages.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "vec.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kScorePitch = kUnitTokens + 16;
constexpr float kNever = -3.40282347e38f;

struct PagedDecodeParams {
  const u16* q;            // [T, H, stored D] bf16
  const u8* pages;         // one layer's
  const u8* scales;        // one layer's, null for bf16
  const int* page_tables;  // [R, max_pages]
  const int* row_starts;   // [R + 1]
  const int* ordinals;     // [T], negative: a column of padding
  float* outputs;          // [T, H, max_units, D] f32, of units that exist
  float2* sums;            // [T, H, max_units]: largest score, sum of exponentials; in powers of 2
  int rows, heads, kv_heads, group, max_pages, max_units, row_blocks, stages;
  float scale_log2e;
  int padding;
  const int* firsts;  // [T], negative: 0; with intervals only
};
static_assert(sizeof(PagedDecodeParams) == 112, "ninfer/ops/paged_attention_decode.py mirrors this struct");

struct PagedCombineParams {
  const float* outputs;
  const float2* sums;
  const int* ordinals;
  const u16* gate;  // [T, ..]: gate of head h at h * 2 D + D, null: none
  u16* y;           // [T, H * D] bf16
  int heads, max_units, gate_stride, y_stride;
  const int* firsts;  // [T], negative: 0; with intervals only
};
static_assert(sizeof(PagedCombineParams) == 64, "ninfer/ops/paged_attention_decode.py mirrors this struct");

struct Item {
  int row, kv_head, row_block, unit;
  int start, keys, pages;   // keys [start, start + keys) exist
  int skipped, first_page;  // of those, keys and whole pages in front that no column of the row sees
};

// Items in the order (unit of a sequence, KV head, block of queries), sequences one after another.
template <bool kInterval>
struct WorkList {
  const int* first_units;  // [R + 1] units of all sequences before
  const int* lengths;      // [R] keys
  const int* bounds;       // [R] keys that were there before this launch's columns;
                           // with intervals: the first key that any of these columns sees
  int count;

  // `row` is where an earlier item lay.
  __device__ __forceinline__ Item item(const PagedDecodeParams& p, int index, int row) const {
    Item item;
    const int pairs = index / p.row_blocks, units = pairs / p.kv_heads;
    item.row_block = index - pairs * p.row_blocks;
    item.kv_head = pairs - units * p.kv_heads;
    while (first_units[row + 1] <= units) ++row;
    item.row = row;
    item.unit = units - first_units[row];
    if constexpr (kInterval) item.unit += unit_of(bounds[row]);
    item.start = unit_start(item.unit);
    item.keys = min(unit_tokens(item.unit), lengths[row] - item.start);
    item.pages = (item.keys + kPageTokens - 1) / kPageTokens;
    item.skipped = kInterval ? max(bounds[row] - item.start, 0) : 0;
    item.first_page = item.skipped / kPageTokens;
    return item;
  }
};

// Keys of a row, and its entry of WorkList's bounds.
template <bool kInterval>
__device__ __forceinline__ int2 measure_row(const PagedDecodeParams& p, int row) {
  int length = 0, bound = 0x7fffffff;
  const int last = __ldcg(p.row_starts + row + 1);
  for (int t = __ldcg(p.row_starts + row); t < last; ++t) {
    const int ordinal = __ldcg(p.ordinals + t);
    if constexpr (kInterval) {
      const int first = max(__ldcg(p.firsts + t), 0);
      if (first <= ordinal) length = max(length, ordinal + 1), bound = min(bound, first);
    } else {
      length = max(length, ordinal + 1);
      if (ordinal >= 0) bound = min(bound, ordinal);
    }
  }
  return make_int2(length, min(bound, length));
}

// Called by all threads; a barrier has to follow.
template <bool kInterval>
__device__ __forceinline__ void count_units(const PagedDecodeParams& p, int* first_units, int* lengths, int* bounds) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int total = 0;
  for (int base = 0; base < p.rows; base += 32) {
    const int row = base + lane;
    int2 measures = make_int2(0, 0);
    if (row < p.rows) {
      measures = measure_row<kInterval>(p, row);
      lengths[row] = measures.x;
      bounds[row] = measures.y;
    }
    const int units = unit_count(measures.x) - (kInterval ? unit_of(measures.y) : 0);
    int until = units;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int before = __shfl_up_sync(kAllLanes, until, step);
      if (lane >= step) until += before;
    }
    if (row < p.rows) first_units[row] = total + until - units;
    total += __shfl_sync(kAllLanes, until, 31);
  }
  if (lane == 0) first_units[p.rows] = total;
}

// Where the 16-byte vectors of row r of a stage lie: moved by exclusive or with this. Reads of K
// (rows g and g + 1, four vectors each) and of V (rows q, 32 bytes each) then meet no bank twice.
template <int kRowBytes>
__device__ __forceinline__ int stage_swizzle(int row) {
  return kRowBytes == 64 ? (row & 2) : ((row & 1) << 2 | (row & 2));
}

// The same for rows of q, whose reads take one or two vectors a lane.
template <KvFormat kFormat>
__device__ __forceinline__ int query_swizzle(int row) {
  return kFormat == KvFormat::kBf16 ? ((row & 1) << 2 | (row & 2)) : (row & 1);
}

// Place of a key's probability among its 16: lane 4 g + q reads keys q, q + 4, q + 8, q + 12.
__device__ __forceinline__ int probability_place(int key) {
  return (key & ~15) | (key & 3) << 2 | (key >> 2 & 3);
}

// kBytes (2, 4, 8 or 16) of shared memory, aligned to their size.
template <int kBytes>
__device__ __forceinline__ void load_words(const u8* from, u32 (&words)[kBytes < 4 ? 1 : kBytes / 4]) {
  if constexpr (kBytes == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else if constexpr (kBytes == 4) {
    words[0] = *reinterpret_cast<const u32*>(from);
  } else {
    words[0] = *reinterpret_cast<const u16*>(from);
  }
}

template <KvFormat kFormat, int kDim, int kTiles, bool kInterval>
struct Decoder {
  static constexpr int kRowBytes = kDim * code_bytes<kFormat>();
  static constexpr int kPageBytes = kPageTokens * kRowBytes;
  static constexpr int kScaleBytes = scale_bytes<kFormat, kDim>();
  static constexpr int kStageBytes = kPageBytes + kScaleBytes;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kDimTiles = kDim / 64;  // of 16 dimensions, a warp; also the groups of int8
  static constexpr int kLaneDims = kDim / 32;  // neighbouring dimensions of a lane

  const PagedDecodeParams& p;
  u8* ring;
  u8* queries;      // [kRows][D] bf16, vectors swizzled
  float* scores;    // [kRows][kScorePitch], later probabilities; behind a row's last: see first_key
  int* ordinals;    // [kRows], -1: no such query
  int* heads;       // [kRows] t * H + head
  WorkList<kInterval> work;
  int thread, warp, g, q;

  // The next stage to be filled: a page of keys or values of an item, its page id read ahead.
  Item fill_item;
  int fill_index, fill_step, fill_stage, fill_page;
  int read_stage;

  // The first key that query r sees, not negative; with intervals only.
  __device__ __forceinline__ int& first_key(int r) {
    static_assert(kScorePitch > kUnitTokens, "a row of scores has room behind its last");
    return *reinterpret_cast<int*>(scores + r * kScorePitch + kUnitTokens);
  }

  // Steps of the item that is filled: pages of keys, then the same pages of values.
  __device__ __forceinline__ int fill_pages() const { return fill_item.pages - fill_item.first_page; }

  // The page of the next step, counted from the item's start.
  __device__ __forceinline__ int next_page() const {
    return (fill_step < fill_pages() ? fill_step : fill_step - fill_pages()) + fill_item.first_page;
  }

  __device__ __forceinline__ void look_ahead() {
    if (fill_index >= work.count) return;
    const int page = next_page();
    fill_page = __ldcg(p.page_tables + static_cast<u64>(fill_item.row) * p.max_pages + fill_item.start / kPageTokens + page);
  }

  __device__ __forceinline__ void fill() {
    if (fill_index < work.count) {
      const int part = fill_step >= fill_pages();
      const int page = fill_item.first_page + (part ? fill_step - fill_pages() : fill_step);
      const int first = fill_item.skipped - page * kPageTokens, end = fill_item.keys - page * kPageTokens;
      const u64 head = page_head(fill_page, part, p.kv_heads, fill_item.kv_head);
      copy_stage(ring + fill_stage * kStageBytes, head, first, end);
      fill_stage = fill_stage + 1 == p.stages ? 0 : fill_stage + 1;
      if (++fill_step == 2 * fill_pages()) {
        fill_step = 0;
        fill_index += gridDim.x;
        if (fill_index < work.count) fill_item = work.item(p, fill_index, fill_item.row);
      }
      look_ahead();
    }
    copy_group_commit();
  }

  // Rows outside [first, end) hold no key: they become zeros, as what lies there may be no number,
  // and 0 times that is none.
  __device__ __forceinline__ void copy_stage(u8* stage, u64 head, int first, int end) {
    constexpr int kVectors = kRowBytes / 16;
    const u8* from = p.pages + head * kPageBytes;
#pragma unroll
    for (int i = 0; i < kPageTokens * kVectors / kThreads; ++i) {
      const int index = i * kThreads + thread;
      const int row = index / kVectors, vector = index % kVectors;
      u8* to = stage + row * kRowBytes + (vector ^ stage_swizzle<kRowBytes>(row)) * 16;
      copy_shared_16(shared_address(to), from + index * 16, is_between(row, first, end));
    }
    if constexpr (kScaleBytes > 0) {
      if (thread < kScaleBytes / 16) {
        copy_shared_16(shared_address(stage + kPageBytes + thread * 16), p.scales + head * kScaleBytes + thread * 16, true);
      }
    }
  }

  // Without intervals `first` is not positive.
  static __device__ __forceinline__ bool is_between(int row, int first, int end) {
    return (!kInterval || row >= first) && row < end;
  }

  // The oldest stage, complete and visible to all; the one read before it is filled anew.
  __device__ __forceinline__ const u8* next_stage() {
    copy_group_wait(p.stages - 2);
    __syncthreads();
    fill();
    const u8* stage = ring + read_stage * kStageBytes;
    read_stage = read_stage + 1 == p.stages ? 0 : read_stage + 1;
    return stage;
  }

  __device__ __forceinline__ void load_queries(const Item& item) {
    constexpr int kVectors = kDim / 8;
    const int first = __ldcg(p.row_starts + item.row);
    const int count = (__ldcg(p.row_starts + item.row + 1) - first) * p.group;
    for (int index = thread; index < kRows * kVectors; index += kThreads) {
      const int r = index / kVectors, vector = index % kVectors;
      const int query = item.row_block * kRows + r, column = query / p.group;
      const int head = (first + column) * p.heads + item.kv_head * p.group + query - column * p.group;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (query < count) v = __ldcg(reinterpret_cast<const uint4*>(p.q) + static_cast<u64>(head) * kVectors + vector);
      *reinterpret_cast<uint4*>(queries + r * 2 * kDim + (vector ^ query_swizzle<kFormat>(r)) * 16) = v;
      if (vector == 0) {
        ordinals[r] = query < count ? __ldcg(p.ordinals + first + column) : -1;
        heads[r] = head;
        if constexpr (kInterval) {
          first_key(r) = query < count ? max(__ldcg(p.firsts + first + column), 0) : 0;
          if (first_key(r) > ordinals[r]) ordinals[r] = -1;
        }
      }
    }
  }

  // Scores of the warp's 16 keys of a page, unscaled, to shared memory.
  __device__ __forceinline__ void score(const u8* stage, int page) {
    const u8* low_row = stage + (16 * warp + g) * kRowBytes;
    const u8* high_row = low_row + 8 * kRowBytes;
    float sum[kTiles][4];
    float even[kTiles][4], odd[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = even[n][e] = odd[n][e] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < kRowBytes / 64; ++k) {
      const int offset = ((4 * k + q) ^ stage_swizzle<kRowBytes>(g)) * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(low_row + offset);
      const uint4 high = *reinterpret_cast<const uint4*>(high_row + offset);
      if constexpr (kFormat == KvFormat::kBf16) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b = query_vector(n, 4 * k + q);
          mma_bf16_16x8x16(even[n], make_uint4(low.x, high.x, low.y, high.y), b.x, b.y);
          mma_bf16_16x8x16(odd[n], make_uint4(low.z, high.z, low.w, high.w), b.z, b.w);
        }
      } else {
        const uint4 a0 = key_fragment(low.x, high.x), a1 = key_fragment(low.y, high.y);
        const uint4 a2 = key_fragment(low.z, high.z), a3 = key_fragment(low.w, high.w);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 first = query_vector(n, 8 * k + 2 * q), second = query_vector(n, 8 * k + 2 * q + 1);
          mma_bf16_16x8x16(even[n], a0, first.x, first.y);
          mma_bf16_16x8x16(odd[n], a1, first.z, first.w);
          mma_bf16_16x8x16(even[n], a2, second.x, second.y);
          mma_bf16_16x8x16(odd[n], a3, second.z, second.w);
        }
      }
      if constexpr (kFormat == KvFormat::kInt8) {
        const u16* scales = reinterpret_cast<const u16*>(stage + kPageBytes) + (16 * warp + g) * kDimTiles + k;
        add_scaled(sum, even, odd, half_to_float(scales[0]), half_to_float(scales[8 * kDimTiles]));
      }
    }
    if constexpr (kFormat == KvFormat::kBf16) {
      add_scaled(sum, even, odd, 1.f, 1.f);
    } else if constexpr (kFormat == KvFormat::kFp8) {
      const float* scales = reinterpret_cast<const float*>(stage + kPageBytes) + 16 * warp + g;
      add_scaled(sum, even, odd, scales[0], scales[8]);
    }
    const int key = page * kPageTokens + 16 * warp + g;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to = scores + (8 * n + 2 * q) * kScorePitch + key;
      to[0] = sum[n][0], to[kScorePitch] = sum[n][1];
      to[8] = sum[n][2], to[kScorePitch + 8] = sum[n][3];
    }
  }

  // sum += scale * (even + odd), for keys g (low) and g + 8 (high); even and odd start anew.
  __device__ __forceinline__ void add_scaled(float (&sum)[kTiles][4], float (&even)[kTiles][4],
                                             float (&odd)[kTiles][4], float low, float high) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[n][e] += (e < 2 ? low : high) * (even[n][e] + odd[n][e]);
        even[n][e] = odd[n][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ uint4 query_vector(int tile, int vector) const {
    const int offset = (8 * tile + g) * 2 * kDim + (vector ^ query_swizzle<kFormat>(g)) * 16;
    return *reinterpret_cast<const uint4*>(queries + offset);
  }

  // Four numbers of keys g and g + 8.
  static __device__ __forceinline__ uint4 key_fragment(u32 low, u32 high) {
    return make_uint4(code_pair<kFormat, 0, 1>(low, low), code_pair<kFormat, 0, 1>(high, high),
                      code_pair<kFormat, 2, 3>(low, low), code_pair<kFormat, 2, 3>(high, high));
  }

  // Probabilities of the warp's queries in place of their scores; maximum and sum to `sums`.
  __device__ __forceinline__ void soften(const Item& item) {
    const int lane = 4 * g + q;
    for (int r = warp; r < kRows; r += kWarps) {
      const int first = kInterval ? first_key(r) - item.start : 0;
      const int end = min(ordinals[r] + 1 - item.start, item.keys);
      float* row = scores + r * kScorePitch;
      float score[kUnitTokens / 32], most = kNever, sum = 0.f;
#pragma unroll
      for (int i = 0; i < kUnitTokens / 32; ++i) {
        const int key = 32 * i + lane;
        score[i] = is_between(key, first, end) ? row[key] * p.scale_log2e : kNever;
        most = fmaxf(most, score[i]);
      }
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kUnitTokens / 32; ++i) {
        const int key = 32 * i + lane;
        const float probability = is_between(key, first, end) ? exp2f(score[i] - most) : 0.f;
        sum += probability;
        row[probability_place(key)] = probability;
      }
      sum = warp_sum(sum);
      if (lane == 0 && end > max(first, 0)) {
        p.sums[static_cast<u64>(heads[r]) * p.max_units + item.unit] = make_float2(most, sum);
      }
    }
  }

  // Adds a page's values, weighted, to the warp's dimensions of every query; rows [first, end) hold some.
  __device__ __forceinline__ void weigh(const u8* stage, int page, int first, int end,
                                        float (&out)[kDimTiles][kTiles][4]) {
    constexpr int kBytes = kLaneDims * code_bytes<kFormat>();
    constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
    const int offset = (warp * 8 + g) * kBytes;
    const u8* lane_row = stage + q * kRowBytes + ((offset / 16) ^ stage_swizzle<kRowBytes>(q)) * 16 + offset % 16;
#pragma unroll
    for (int k = 0; k < kPageTokens / 16; ++k) {
      u32 words[4][kWords];
      float scale[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 16 * k + 4 * i + q;
        load_words<kBytes>(lane_row + (16 * k + 4 * i) * kRowBytes, words[i]);
        scale[i] = is_between(key, first, end) ? value_scale(stage, key) : 0.f;
      }
      u32 b[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float* from = scores + (8 * n + g) * kScorePitch + page * kPageTokens + 16 * k + 4 * q;
        float4 weight = *reinterpret_cast<const float4*>(from);
        if constexpr (kFormat != KvFormat::kBf16) {
          weight.x *= scale[0], weight.y *= scale[1], weight.z *= scale[2], weight.w *= scale[3];
        }
        b[n][0] = pack_bf16x2(weight.x, weight.y), b[n][1] = pack_bf16x2(weight.z, weight.w);
      }
#pragma unroll
      for (int j = 0; j < kDimTiles; ++j) {
        const uint4 a = value_fragment<kWords>(words, j);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_bf16_16x8x16(out[j][n], a, b[n][0], b[n][1]);
      }
    }
  }

  __device__ __forceinline__ float value_scale(const u8* stage, int key) const {
    if constexpr (kFormat == KvFormat::kFp8) {
      return reinterpret_cast<const float*>(stage + kPageBytes)[key];
    } else if constexpr (kFormat == KvFormat::kInt8) {
      const int group = warp * kDim / 4 / 64;
      return half_to_float(reinterpret_cast<const u16*>(stage + kPageBytes)[key * kDimTiles + group]);
    }
    return 1.f;
  }

  // Dimensions 2 j (rows g) and 2 j + 1 (rows g + 8) of the lane's; keys in the order of words.
  template <int kWords>
  static __device__ __forceinline__ uint4 value_fragment(const u32 (&words)[4][kWords], int j) {
    if constexpr (kFormat == KvFormat::kBf16) {
      return make_uint4(__byte_perm(words[0][j], words[1][j], 0x5410), __byte_perm(words[0][j], words[1][j], 0x7632),
                        __byte_perm(words[2][j], words[3][j], 0x5410), __byte_perm(words[2][j], words[3][j], 0x7632));
    } else {
      const u32 a = words[0][j / 2], b = words[1][j / 2], c = words[2][j / 2], d = words[3][j / 2];
      if (j % 2 == 0) {
        return make_uint4(code_pair<kFormat, 0, 0>(a, b), code_pair<kFormat, 1, 1>(a, b),
                          code_pair<kFormat, 0, 0>(c, d), code_pair<kFormat, 1, 1>(c, d));
      }
      return make_uint4(code_pair<kFormat, 2, 2>(a, b), code_pair<kFormat, 3, 3>(a, b),
                        code_pair<kFormat, 2, 2>(c, d), code_pair<kFormat, 3, 3>(c, d));
    }
  }

  __device__ __forceinline__ void store(const Item& item, const float (&out)[kDimTiles][kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = 8 * n + 2 * q + e;
        if (ordinals[r] < item.start) continue;
        if (kInterval && first_key(r) >= item.start + item.keys) continue;
        const u64 slot = static_cast<u64>(heads[r]) * p.max_units + item.unit;
        float* to = p.outputs + slot * kDim + (warp * 8 + g) * kLaneDims;
        if constexpr (kDimTiles == 1) {
          *reinterpret_cast<float2*>(to) = make_float2(out[0][n][e], out[0][n][e + 2]);
        } else {
#pragma unroll
          for (int j = 0; j < kDimTiles; j += 2) {
            reinterpret_cast<float4*>(to)[j / 2] =
                make_float4(out[j][n][e], out[j][n][e + 2], out[j + 1][n][e], out[j + 1][n][e + 2]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run_item(const Item& item) {
    for (int page = item.first_page; page < item.pages; ++page) score(next_stage(), page);
    __syncthreads();
    soften(item);
    float out[kDimTiles][kTiles][4];
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[j][n][e] = 0.f;
      }
    }
    for (int page = item.first_page; page < item.pages; ++page) {
      const int before = page * kPageTokens;
      weigh(next_stage(), page, item.skipped - before, item.keys - before, out);
    }
    store(item, out);
  }

  // Whether the next stage holds only keys that were there before the kernel ahead began.
  __device__ __forceinline__ bool is_fill_old() const {
    if (fill_index >= work.count) return true;
    const int end = min((next_page() + 1) * kPageTokens, fill_item.keys);
    return fill_item.start + end <= work.bounds[fill_item.row];
  }

  __device__ __forceinline__ void run() {
    fill_index = blockIdx.x;
    if (fill_index >= work.count) {
      wait_for_previous_kernel();
      return;
    }
    fill_item = work.item(p, fill_index, 0);
    fill_step = fill_stage = read_stage = 0;
    look_ahead();
    bool has_waited = kInterval;
    for (int stage = 0; stage < p.stages - 1; ++stage) {
      if (!has_waited && !is_fill_old()) {
        wait_for_previous_kernel();
        has_waited = true;
      }
      fill();
    }
    if (!has_waited) wait_for_previous_kernel();
    int row = 0, kv_head = -1, row_block = -1;
    for (int index = blockIdx.x; index < work.count; index += gridDim.x) {
      const Item item = work.item(p, index, row);
      if (item.row != row || item.kv_head != kv_head || item.row_block != row_block) {
        __syncthreads();  // the item before may still be storing
        load_queries(item);
        row = item.row, kv_head = item.kv_head, row_block = item.row_block;
      }
      run_item(item);
    }
  }
};

// kInterval: a column begins at its key of `firsts`; waits for the kernel ahead before it reads anything.
template <KvFormat kFormat, int kDim, int kTiles, bool kInterval = false>
__device__ __forceinline__ void paged_attention_decode(const PagedDecodeParams& p) {
  using Unit = Decoder<kFormat, kDim, kTiles, kInterval>;
  extern __shared__ __align__(128) u8 memory[];
  u8* queries = memory + p.stages * Unit::kStageBytes;
  float* scores = reinterpret_cast<float*>(queries + Unit::kRows * 2 * kDim);
  int* ordinals = reinterpret_cast<int*>(scores + Unit::kRows * kScorePitch);
  int* heads = ordinals + Unit::kRows;
  int* lengths = heads + Unit::kRows;
  int* bounds = lengths + p.rows;
  int* first_units = bounds + p.rows;
  allow_next_kernel();
  if constexpr (kInterval) wait_for_previous_kernel();
  // Without intervals, rows, ordinals and page tables were there before the kernel ahead began.
  count_units<kInterval>(p, first_units, lengths, bounds);
  __syncthreads();
  const WorkList<kInterval> work{first_units, lengths, bounds, first_units[p.rows] * p.kv_heads * p.row_blocks};
  const int thread = threadIdx.x, lane = thread % 32;
  Unit unit{p, memory, queries, scores, ordinals, heads, work, thread, thread / 32, lane / 4, lane % 4};
  unit.run();
}

constexpr int kCombineThreads = 256, kCombineDims = 64, kCombineParts = 16;

// The largest value of a block of 256 threads, in every thread.
__device__ __forceinline__ float block_max(float value) {
  __shared__ float values[kCombineThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value;
  __syncthreads();
  float most = values[0];
#pragma unroll
  for (int i = 1; i < kCombineThreads / 32; ++i) most = fmaxf(most, values[i]);
  return most;
}

// Units [begin, end) in which the column sees keys; every one of them holds such a key.
template <bool kInterval>
__device__ __forceinline__ int2 seen_units(const PagedCombineParams& p, int t) {
  const int last = __ldcg(p.ordinals + t);
  if constexpr (kInterval) {
    const int first = max(__ldcg(p.firsts + t), 0);
    return first <= last ? make_int2(unit_of(first), unit_count(last + 1)) : make_int2(0, 0);
  }
  return make_int2(0, unit_count(last + 1));
}

// A block takes 64 dimensions of a head; threads 16 i .. 16 i + 15 add up units i, i + 16, .. of those seen.
// The first kHeadDim of a head's kDim dimensions are stored.
template <int kDim, int kHeadDim = kDim, bool kInterval = false>
__device__ __forceinline__ void paged_attention_combine(const PagedCombineParams& p) {
  __shared__ float parts[kCombineParts][kCombineDims + 4];
  __shared__ float masses[kCombineParts];
  allow_next_kernel();
  const int thread = threadIdx.x, part = thread / 16, lane = thread % 16;
  const int head = blockIdx.x, t = head / p.heads, dim = blockIdx.y * kCombineDims;
  wait_for_previous_kernel();
  const int2 units = seen_units<kInterval>(p, t);
  const float2* sums = p.sums + static_cast<u64>(head) * p.max_units;
  const float* outputs = p.outputs + static_cast<u64>(head) * p.max_units * kDim + dim + 4 * lane;
  float most = kNever;
  for (int unit = units.x + thread; unit < units.y; unit += kCombineThreads) most = fmaxf(most, __ldcg(sums + unit).x);
  most = block_max(most);
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
  float mass = 0.f;
#pragma unroll 8
  for (int unit = units.x + part; unit < units.y; unit += kCombineParts) {
    const float2 sum = __ldcg(sums + unit);
    const float4 out = __ldcg(reinterpret_cast<const float4*>(outputs + static_cast<u64>(unit) * kDim));
    const float weight = exp2f(sum.x - most);
    mass += weight * sum.y;
    total.x += weight * out.x, total.y += weight * out.y;
    total.z += weight * out.z, total.w += weight * out.w;
  }
  *reinterpret_cast<float4*>(&parts[part][4 * lane]) = total;
  if (lane == 0) masses[part] = mass;
  __syncthreads();
  if (thread >= min(kCombineDims, kHeadDim)) return;
  float sum = 0.f, all = 0.f;
#pragma unroll
  for (int i = 0; i < kCombineParts; ++i) sum += parts[i][thread], all += masses[i];
  const int h = head - t * p.heads;
  float y = units.y > 0 ? sum / all : 0.f;
  if (p.gate != nullptr) {
    const u16* gate = p.gate + static_cast<u64>(t) * p.gate_stride + (2 * h + 1) * kHeadDim + dim;
    y *= 1.f / (1.f + __expf(-bf16_to_float(__ldcg(gate + thread))));
  }
  p.y[static_cast<u64>(t) * p.y_stride + h * kHeadDim + dim + thread] = units.y > 0 ? float_to_bf16(y) : u16{0};
}

}  // namespace
