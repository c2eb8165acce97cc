// Thread blocks of a cluster reach into one another's shared memory.
#pragma once
#include "mbarrier.cuh"

namespace attn {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster that have not exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;\n" ::
          : "memory");
}

// Arrives at the barrier of the same place in block `rank`, for reads that are over. A release at cluster scope would
// also wait until this thread's sums have reached global memory.
__device__ __forceinline__ void mbarrier_arrive_read(u32 barrier, u32 rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

}  // namespace attn
