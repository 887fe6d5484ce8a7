// paged_attention_decode: attention of a few columns a row over their pages, keys split in units.
//
// Contract: ninfer/ops/paged_attention_decode.py. Entries
//   paged_attention_decode_<kv dtype>_<head_dim>_<rows>   units of keys, `rows` queries at a time
//   paged_attention_combine_<head_dim>                    the units of a column joined, gated
// The units of heads of 32 are those of 64, the upper half zeros; joined they are 32 again.
// include/paged_decode.cuh has the algorithm; intervals of keys: paged_attention_interval.cu.

#include "paged_decode.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_64_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 64, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_64_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 64, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_64_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 64, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_128_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 128, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_128_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 128, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_128_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 128, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_256_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 256, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_256_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 256, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_bf16_256_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kBf16, 256, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_64_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 64, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_64_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 64, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_64_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 64, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_128_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 128, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_128_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 128, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_128_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 128, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_256_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 256, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_256_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 256, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_fp8_256_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kFp8, 256, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_64_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 64, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_64_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 64, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_64_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 64, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_128_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 128, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_128_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 128, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_128_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 128, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_256_8(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 256, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_256_16(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 256, 2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
paged_attention_decode_int8_256_32(const PagedDecodeParams p) {
  paged_attention_decode<KvFormat::kInt8, 256, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_combine_32(const PagedCombineParams p) { paged_attention_combine<64, 32>(p); }

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_combine_64(const PagedCombineParams p) { paged_attention_combine<64>(p); }

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_combine_128(const PagedCombineParams p) { paged_attention_combine<128>(p); }

extern "C" __global__ void __launch_bounds__(kCombineThreads)
paged_attention_combine_256(const PagedCombineParams p) { paged_attention_combine<256>(p); }
