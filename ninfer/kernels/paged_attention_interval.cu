// paged_attention_interval: paged_attention_decode of columns that see an interval of keys each.
//
// Contract: ninfer/ops/paged_attention_decode.py, with `firsts`. Entries
//   paged_attention_interval_<kv dtype>_<head_dim>_<rows>   units of keys, `rows` queries at a time
//   paged_attention_interval_combine_<head_dim>             the units that a column sees joined, gated
// include/paged_decode.cuh has the algorithm. A family of its own, so that who needs no intervals
// does not wait for their compilation.

#include "paged_decode.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_64_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 64, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_64_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 64, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_64_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 64, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_128_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 128, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_128_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 128, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_128_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 128, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_256_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 256, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_256_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 256, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_bf16_256_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 256, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_64_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 64, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_64_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 64, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_64_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 64, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_128_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 128, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_128_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 128, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_128_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 128, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_256_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 256, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_256_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 256, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_fp8_256_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 256, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_64_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 64, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_64_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 64, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_64_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 64, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_128_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 128, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_128_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 128, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_128_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 128, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_256_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 256, 1, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_256_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 256, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_interval_int8_256_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 256, 4, true>(p);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_interval_combine_32(const PagedCombineParams p) { paged_attention_combine<64, 32, true>(p); }

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_interval_combine_64(const PagedCombineParams p) { paged_attention_combine<64, 64, true>(p); }

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_interval_combine_128(const PagedCombineParams p) { paged_attention_combine<128, 128, true>(p); }

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_interval_combine_256(const PagedCombineParams p) { paged_attention_combine<256, 256, true>(p); }
