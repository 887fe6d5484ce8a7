// Groups of copy_shared_16 copies: a thread closes a group and later waits for all but the newest.
#pragma once

#include "vec.cuh"

// Most groups that copy_group_wait can leave pending.
constexpr int kMaxPendingGroups = 6;

__device__ __forceinline__ void copy_group_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_group_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until at most `pending` of this thread's groups are under way.
__device__ __forceinline__ void copy_group_wait(int pending) {
  switch (pending) {
    case 0: return copy_group_wait<0>();
    case 1: return copy_group_wait<1>();
    case 2: return copy_group_wait<2>();
    case 3: return copy_group_wait<3>();
    case 4: return copy_group_wait<4>();
    case 5: return copy_group_wait<5>();
    default: return copy_group_wait<kMaxPendingGroups>();
  }
}
