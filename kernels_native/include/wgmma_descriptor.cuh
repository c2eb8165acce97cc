// How wgmma is told where an operand lies in shared memory: in panels 128 bytes wide, swizzled in 1,024-byte groups of
// eight rows as TMA writes them (tiles start at multiples of 1,024 bytes).
#pragma once
#include "mbarrier.cuh"

namespace attn {

// Descriptor fields: start address, leading and stride byte offsets (each over 16), layout 1 = 128-byte swizzle.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | 1ull << 62;
}

// K runs along the 128-byte rows; the leading offset is unused. The next 16 values of K are 32 bytes on.
__device__ __forceinline__ u64 wgmma_k_major(u32 address) { return wgmma_descriptor(address, 16, 1024); }

// N (or M) runs along the rows, `panel_bytes` from one 64-wide panel to the next. The next 16 values of K are 2,048
// bytes on.
__device__ __forceinline__ u64 wgmma_mn_major(u32 address, u32 panel_bytes) {
  return wgmma_descriptor(address, panel_bytes, 1024);
}

}  // namespace attn
