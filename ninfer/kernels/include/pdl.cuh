// Programmatic dependent launch: a kernel may start while the one before it still runs.
//
// Until wait_for_previous_kernel() a kernel may read only what no kernel of its chain writes (weights,
// scales; states and keys of earlier units: a unit begins with a kernel that is not chained) and
// write no global memory. Every block of every kernel of such a chain waits, otherwise the order would not
// carry over to the kernel after the next. Architectures before 9.0 order kernels by the stream.
#pragma once

// Let the next kernel of the stream start as soon as every block has said so.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the kernel before has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
