// Plain integer names and 16-byte accesses to shared and global memory.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The same value, of which the compiler knows nothing: what is computed from it stays where it is
// used and takes no registers in the loops before.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A pointer into shared memory as the 32-bit address that PTX wants.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ float load_shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared_16(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Asynchronous copy of 16 bytes into shared memory; zeros if not `is_real` (`from` stays valid).
__device__ __forceinline__ void copy_shared_16(u32 address, const void* from, bool is_real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(is_real ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_shared_4(u32 address, const void* from, bool is_real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
               "r"(is_real ? 4 : 0)
               : "memory");
}

// Asynchronous copy of 8 bytes into shared memory.
__device__ __forceinline__ void copy_shared_8(u32 address, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
}

// Waits for this thread's copies into shared memory.
__device__ __forceinline__ void copy_shared_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Calls the 128 bytes round an address into the L2; nobody waits for it.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Words that other blocks of the grid write or read meanwhile; each word arrives whole.
__device__ __forceinline__ uint4 load_relaxed_16(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed_16(uint4* to, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
