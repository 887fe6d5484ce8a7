// Block-wide copies from global into shared memory that a barrier in shared memory reports.
//
// From 9.0 on one thread hands a whole range to the copy engine (cp.async.bulk, 16-byte aligned
// addresses and sizes). Before that a warp copies it in 16-byte pieces (cp.async). Either way the
// ring's user sees the same three things: arm and fill a stage, wait for it, give it back.
// Waiting is bounded: a wait that outlasts any sane kernel traps, so that a fault is an error
// and never a hang.
#pragma once

#include "vec.cuh"

constexpr u32 kMaxPolls = 1u << 26;

// Threads of the filling warp that take part in a fill: 1 with the copy engine, else all 32.
__device__ __forceinline__ constexpr int fill_threads() {
#if __CUDA_ARCH__ >= 900
  return 1;
#else
  return 32;
#endif
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a block barrier does the rest.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

// Gives a stage back that this thread has read, so that it is filled anew. Loads that were issued
// may still wait for their turn, behind those of another kernel's blocks on the multiprocessor, and
// an arrival does not wait for them where the copy engine is concerned: it writes through another
// proxy than loads read through. So the arrival's address is made of what was loaded: `read` holds a
// word of every load, `zero` is a zero that the compiler does not know. (A fence of the block does the
// same; in linear_small_t it costs 1 to 2 % of a step.)
__device__ __forceinline__ void give_stage_back(u32 barrier, u32 read, u32 zero) {
  barrier_arrive(barrier + (read & zero));
}

__device__ __forceinline__ bool barrier_poll(u32 barrier, u32 parity) {
  u32 done;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; "
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

// Returns once the barrier's phase with this parity has completed.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  for (u32 polls = 0; !barrier_poll(barrier, parity); ++polls) {
    if (polls == kMaxPolls) __trap();
  }
}

// Weights are read once a step: mark their lines as the first to leave the L2.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Called by fill_threads() threads of one warp, `lane` counting from 0. `barrier` was initialised
// with fill_threads() arrivals and completes when all bytes are there.
__device__ __forceinline__ void fill_shared(u32 destination, const u8* source, u32 bytes, u32 barrier,
                                            u64 policy, int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#else
  for (u32 offset = lane * 16; offset < bytes; offset += 32 * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination + offset),
                 "l"(source + offset)
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Calls a range (16-byte aligned address and size) into the L2; nobody waits for it. A hint: before
// 9.0 it does nothing.
__device__ __forceinline__ void prefetch_global(const u8* source, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}
