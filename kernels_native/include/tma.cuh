// Bulk tensor copies between global and shared memory (PTX ISA, "cp.async.bulk.tensor").
#pragma once
#include "mbarrier.cuh"

namespace attn {

// The driver's CUtensorMap, opaque here; NVRTC has no cuda.h.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads one box of a 4-d tensor (coordinates innermost first); elements outside the tensor arrive as zeros.
__device__ __forceinline__ void tma_load_4d(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2,
                                            int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the same place, telling each its own
// barrier.
__device__ __forceinline__ void tma_load_4d_multicast(u32 destination, const TensorMap& map, u32 barrier,
                                                      unsigned short blocks, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
      "l"(&map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2,
                                            int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Stores one box; elements outside the tensor are dropped.
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, u32 source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the source buffers of this thread's stores may be reused.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Copies contiguous bytes (a multiple of 16, both ends 16-byte aligned) into shared memory.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies shared memory to the same place in block `rank` of the cluster and completes `bytes` of that block's barrier.
__device__ __forceinline__ void bulk_copy_cluster(u32 address, u32 source, u32 rank, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 there, done;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 done, %4, %2;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %3, [done];\n"
      "}\n" ::"r"(address),
      "r"(source), "r"(rank), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds contiguous floats of shared memory to global memory.
__device__ __forceinline__ void bulk_add(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

}  // namespace attn
