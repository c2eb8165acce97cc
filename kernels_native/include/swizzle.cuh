// The 128-byte swizzle that TMA writes: a tile is a row of panels, each 64 16-bit elements (128 bytes) wide and ROWS
// rows high; within a panel the 16-byte chunk of a row is permuted by the row's lowest three bits, so that one chunk of
// eight neighbouring rows fills all banks. Tiles start at multiples of 1,024 bytes.
#pragma once
#include "mbarrier.cuh"

namespace attn {

// Byte offset of the 16-byte chunk `chunk` (0..7) of `row` in a panel.
__device__ __forceinline__ constexpr u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Zeroes rows [first, ROWS) of a tile of `PANELS` panels, by `threads` threads. The copies that overwrite the tile
// later come through the async proxy, hence the fence; a barrier must follow.
template <int ROWS, int PANELS>
__device__ __forceinline__ void zero_rows(u32 tile, int first, int thread, int threads) {
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {
    for (int i = first * 8 + thread; i < ROWS * 8; i += threads) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + panel * ROWS * 128 + i * 16), "r"(0)
                   : "memory");
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace attn
