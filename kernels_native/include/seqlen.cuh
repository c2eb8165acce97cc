// From a flat tile index to a sequence and a tile in it, for dense and packed batches alike.
#pragma once
#include "mbarrier.cuh"

namespace attn {

// A sequence of a batch; `start` counts packed rows before it (0 where dense), `batch` is the tensor-map coordinate.
struct Sequence {
  int index;
  int batch;
  int q_start, q_rows;
  int k_start, k_rows;
};

// What both passes need to know of the batch.
struct Batch {
  const int* cu_q;  // null: dense
  const int* cu_k;
  int sequences;
  int q_total, k_total;  // packed rows; dense: rows per sequence
};

// Packed tiles: sequence i owns the tiles from cu[i] / TILE + i on, which always leaves it enough (no prefix sums of
// tile counts are needed); the rows beyond cu[sequences] make one more sequence, without keys or queries of the other
// side.
template <int TILE>
__device__ __forceinline__ int first_tile(const int* cu, int i) {
  return cu[i] / TILE + i;
}

// The last i with first_tile(i) <= tile, i in [0, sequences], by a whole warp: 32 probes a step.
template <int TILE>
__device__ __forceinline__ int find_sequence(const int* cu, int sequences, int tile) {
  const int lane = threadIdx.x & 31;
  int low = 0, high = sequences + 1;  // first_tile(low) <= tile, and (as if) first_tile(high) > tile
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int probe = low + (lane + 1) * step;
    const unsigned above = __ballot_sync(0xffffffffu, probe >= high || first_tile<TILE>(cu, probe) > tile);
    const int first = __ffs(above) - 1;
    high = min(low + (first + 1) * step, high);
    low = low + first * step;
  }
  return low;
}

// Sequence of flat tile `tile` of TILE rows of the queries (or of the keys), and the tile's number within it. Returns
// false where there is no such tile. Every warp of the block must call it.
template <int TILE, bool QUERIES>
__device__ __forceinline__ bool locate(const Batch& batch, int tile, Sequence& s, int& within, int& tiles) {
  if (batch.cu_q == nullptr) {
    const int rows = QUERIES ? batch.q_total : batch.k_total;
    tiles = (rows + TILE - 1) / TILE;
    s.index = s.batch = tile / tiles;
    within = tile - s.index * tiles;
    s.q_start = s.k_start = 0;
    s.q_rows = batch.q_total;
    s.k_rows = batch.k_total;
    return true;
  }
  const int* cu = QUERIES ? batch.cu_q : batch.cu_k;
  s.batch = 0;
  s.index = find_sequence<TILE>(cu, batch.sequences, tile);
  within = tile - first_tile<TILE>(cu, s.index);
  s.q_start = batch.cu_q[s.index];
  s.k_start = batch.cu_k[s.index];
  const bool beyond = s.index == batch.sequences;
  s.q_rows = beyond ? (QUERIES ? batch.q_total - s.q_start : 0) : batch.cu_q[s.index + 1] - s.q_start;
  s.k_rows = beyond ? (QUERIES ? 0 : batch.k_total - s.k_start) : batch.cu_k[s.index + 1] - s.k_start;
  tiles = ((QUERIES ? s.q_rows : s.k_rows) + TILE - 1) / TILE;
  return within < tiles;
}

// First row of a query tile in the padded per-row buffers (lse, delta, dQ accumulator), whose sequences start at
// multiples of TILE rows.
template <int TILE>
__device__ __forceinline__ int padded_row(const Batch& batch, const Sequence& s, int within) {
  const int first =
      batch.cu_q == nullptr ? s.index * ((batch.q_total + TILE - 1) / TILE) : first_tile<TILE>(batch.cu_q, s.index);
  return (first + within) * TILE;
}

// Position of a block: heads in sections whose keys and values fit the L2 cache; within a section `outer` runs slowly
// and the section's heads fast.
__device__ __forceinline__ void sectioned(int block, int tiles, int heads, int section, int& tile, int& head) {
  const int number = block / (section * tiles);
  const int first = number * section;
  const int here = min(section, heads - first);
  const int rest = block - first * tiles;
  tile = rest / here;
  head = first + rest - tile * here;
}

}  // namespace attn
