// Loads, stores and reductions that C++ has no words for.
#pragma once
#include "mbarrier.cuh"

namespace attn {

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}

__device__ __forceinline__ void store_shared_16(u32 address, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 address, const u32 (&x)[4]) {
  store_shared_16(address, x[0], x[1], x[2], x[3]);
}

// A use that the assembler cannot see through, for values that are never negative: nothing is stored then.
__device__ __forceinline__ void store_shared_if_negative(u32 address, float x) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(x), "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_if_negative(u32 address, int x) {
  asm volatile("{.reg .pred p; setp.lt.s32 p, %0, 0; @p st.shared.b32 [%1], %0;}" ::"r"(x), "r"(address) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later accesses by TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders this thread's accesses to global memory, ordinary ones against those of bulk copies.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

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
