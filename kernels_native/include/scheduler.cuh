// Which query tile a persistent thread block works on next.
#pragma once
#include "mbarrier.cuh"

namespace attn {

// One query tile. Rows and keys are counted from the sequence's first; `batch` is the tensor-map coordinate.
struct alignas(16) Tile {
  int row;  // first query row, -1: no more tiles
  int head;
  int batch;
  int rows;      // query length of the sequence
  int keys;      // key length of the sequence
  int q_offset;  // packed tokens before the sequence
  int k_offset;
  int split;  // which share of the keys
};

// The round-robin position of a block in round `round`. Rounds run to and fro, so that with longest tiles first no
// block always gets the longer tile of a round.
__device__ __forceinline__ int zigzag(int round, int block, int blocks) {
  return round * blocks + (round & 1 ? blocks - 1 - block : block);
}

// Dense batches. Heads are walked in sections whose keys and values fit the L2 cache; under causal a section goes from
// its last row of tiles (most keys) to its first.
template <bool LONGEST_FIRST>
__device__ __forceinline__ void dense_tile(int index, int row_tiles, int heads, int total_heads, int section_heads,
                                           int& row_tile, int& head, int& batch) {
  int flat;
  if (LONGEST_FIRST) {
    const int section = index / (section_heads * row_tiles);
    const int first = section * section_heads;
    const int here = min(section_heads, total_heads - first);
    const int rest = index - first * row_tiles;
    row_tile = row_tiles - 1 - rest / here;
    flat = first + rest % here;
  } else {
    flat = index / row_tiles;
    row_tile = index - flat * row_tiles;
  }
  batch = flat / heads;
  head = flat - batch * heads;
}

// The largest i with offsets[i] <= value, by a whole warp: 32 probes a step, so that 80,000 sequences take four.
// offsets is not decreasing, offsets[0] <= value < offsets[count].
__device__ __forceinline__ int warp_search(const int* offsets, int count, int value) {
  const int lane = threadIdx.x & 31;
  int low = 0, high = count;  // offsets[low] <= value < offsets[high]
  while (high - low > 1) {
    const int step = (high - low + 31) >> 5;
    const int probe = min(low + (lane + 1) * step, high);
    const unsigned above = __ballot_sync(0xffffffffu, probe == high || offsets[probe] > value);
    const int first = __ffs(above) - 1;
    high = min(low + (first + 1) * step, high);
    low = low + first * step;
  }
  return low;
}

}  // namespace attn
