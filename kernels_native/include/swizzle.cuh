// The 128-byte swizzle that TMA writes: a tile is a row of panels, each 64 16-bit elements (128 bytes) wide and ROWS
// rows high; within a panel the 16-byte chunk of a row is permuted by the row's lowest three bits, so that one chunk of
// eight neighbouring rows fills all banks. Tiles start at multiples of 1,024 bytes.
#pragma once
#include "memory.cuh"

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
      store_shared_16(tile + panel * ROWS * 128 + i * 16, 0, 0, 0, 0);
    }
  }
  fence_async_proxy();
}

// Addresses of a lane's ldmatrix row for operands in a swizzled tile. Each is for row 0, column 0 of the operand; the
// operand at column 16 j of the same panel is at `address ^ (32 * j)`, since the column only enters through the bits
// that the swizzle permutes, and rows and panels (multiples of 8 rows) are added.
//
// rows_then_columns: matrices in the order (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
__device__ __forceinline__ u32 rows_then_columns(u32 tile, int lane) { return tile + swizzled(lane & 15, lane >> 4); }

// columns_then_rows: (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
__device__ __forceinline__ u32 columns_then_rows(u32 tile, int lane) {
  return tile + swizzled((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

}  // namespace attn
