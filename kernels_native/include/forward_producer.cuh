// The producer warpgroup of sm90_forward.cu: one warp hands out tiles, one thread loads them.
#pragma once
#include "forward_tile.cuh"

namespace attn {

// One panel of a block of keys or values.
__device__ __forceinline__ void load_panel(const TensorMap& map, u32 destination, u32 full, int panel, int row,
                                           int head, int batch) {
  tma_load_4d(destination, map, full, panel * 64, row, head, batch);
}

// Loads the tile's keys and values from right to left, K one block ahead of V, as the consumers use them. `step` counts
// the blocks of all tiles so far.
__device__ __forceinline__ void load_keys(const Params& p, Control& control, const Tile& tile, u32 k_smem, u32 v_smem,
                                          int step) {
  const int kv_head = SPLIT ? tile.head : tile.head / p.group;
  const KeyBlocks range = key_blocks(p, tile);
  const int blocks = range.end - range.begin;
  for (int i = 0; i <= blocks && blocks > 0; ++i) {
    if (i < blocks) {
      const int stage = (step + i) % STAGES;
      const u32 full = smem_address(&control.k_full[stage]);
      mbarrier_wait(smem_address(&control.k_empty[stage]), ((step + i) / STAGES & 1) ^ 1);
      mbarrier_expect(full, kKBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        load_panel(p.k, k_smem + stage * kKBytes + panel * kKPanel, full, panel,
                   tile.k_offset + (range.end - 1 - i) * BLOCK_N, kv_head, tile.batch);
    }
    if (i > 0) {
      const int stage = (step + i - 1) % STAGES;
      const u32 full = smem_address(&control.v_full[stage]);
      mbarrier_wait(smem_address(&control.v_empty[stage]), ((step + i - 1) / STAGES & 1) ^ 1);
      mbarrier_expect(full, kVBytes);
#pragma unroll
      for (int panel = 0; panel < kPanelsV; ++panel)
        load_panel(p.v, v_smem + stage * kVBytes + panel * kKPanel, full, panel,
                   tile.k_offset + (range.end - i) * BLOCK_N, kv_head, tile.batch);
    }
  }
}

// The scheduler warp: finds the next tile while the producer loads this one.
__device__ __forceinline__ void schedule(const Params& p, Control& control) {
  const bool leader = (threadIdx.x & 31) == 0;
  const int worker = blockIdx.x, workers = gridDim.x;
  int next = worker;
  for (int round = 0;; ++round) {
    const Tile tile = find_tile(p, DYNAMIC ? next : zigzag(round, worker, workers));
    if (leader) {
      if (DYNAMIC && tile.row >= 0) next = workers + atomicAdd(p.counter, 1);
      mbarrier_wait(smem_address(&control.next_empty), round & 1 ^ 1);
      control.next = tile;
      mbarrier_arrive(smem_address(&control.next_full));
    }
    if (tile.row < 0) break;
    if (DYNAMIC) next = __shfl_sync(0xffffffffu, next, 0);
    __syncwarp();
  }
  // The last block to have asked in vain clears the counters for the next launch.
  if (DYNAMIC && leader && atomicAdd(p.counter + 1, 1) == workers - 1) {
    p.counter[0] = 0;
    p.counter[1] = 0;
  }
}

// The producer, one thread.
__device__ __forceinline__ void produce(const Params& p, Control& control, u32 q_smem, u32 k_smem, u32 v_smem) {
  int step = 0;
  for (int round = 0;; ++round) {
    mbarrier_wait(smem_address(&control.next_full), round & 1);
    const Tile tile = control.next;
    mbarrier_arrive(smem_address(&control.next_empty));
    const int qs = round % Q_STAGES;
    const u32 q_full = smem_address(&control.q_full[qs]);
    mbarrier_wait(smem_address(&control.q_empty[qs]), (round / Q_STAGES & 1) ^ 1);
    control.tiles[qs] = tile;
    if (tile.row < 0) {
      mbarrier_arrive(q_full);
      break;
    }
    mbarrier_expect(q_full, SPLIT ? kPanels * 128 * p.tile_rows * p.group : kQLoad);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const u32 destination = q_smem + qs * kQBytes + panel * kQPanel;
      if (SPLIT) {
        tma_load_5d(destination, p.q, q_full, panel * 64, 0, tile.row, tile.head, tile.batch);
      } else {
        tma_load_4d(destination, p.q, q_full, panel * 64, tile.q_offset + tile.row, tile.head, tile.batch);
      }
    }
    load_keys(p, control, tile, k_smem, v_smem, step);
    const KeyBlocks blocks = key_blocks(p, tile);
    step += blocks.end - blocks.begin;
  }
}

}  // namespace attn
