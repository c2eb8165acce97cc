// Loads, stores and reductions that C++ has no words for.
#pragma once
#include "mbarrier.cuh"

namespace attn {

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}

// Adds four neighbouring floats in global memory, each atomically.
__device__ __forceinline__ void add_global(float* address, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ int load_acquire(const int* address) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_release(int* address, int x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

}  // namespace attn
