// Shared-memory transaction barriers (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
#pragma once

namespace attn {

using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ u32 smem_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Barriers are named by their shared-memory address; one takes 8 bytes.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy; a __syncthreads must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival a warp, by its leader, after the warp's work has been ordered by __syncwarp or by a warp-wide
// instruction. racecheck of compute-sanitizer does not follow an arrival that one lane makes for its warp, so under the
// sanitizer's build every lane arrives. Barriers take kWarpArrivals arrivals a warp.
#ifdef EVERY_LANE_ARRIVES
constexpr u32 kWarpArrivals = 32;
__device__ __forceinline__ void mbarrier_arrive_warp(u32 barrier, bool) { mbarrier_arrive(barrier); }
#else
constexpr u32 kWarpArrivals = 1;
__device__ __forceinline__ void mbarrier_arrive_warp(u32 barrier, bool leader) {
  if (leader) mbarrier_arrive(barrier);
}
#endif

// Waits until the phase of the given parity has completed. A fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace attn
