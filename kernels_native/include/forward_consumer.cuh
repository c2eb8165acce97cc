// The consumer warpgroups of sm90_forward.cu: scores, softmax, output, tile after tile.
#pragma once
#include "forward_epilogue.cuh"
#include "mask.cuh"

namespace attn {

// Keeps the exponentials before the next wait, under P V: without a use that looks like one the assembler sinks them
// below it. A sum is never negative, so nothing is stored.
__device__ __forceinline__ void keep_order(const RowState& row, u32 address) {
  store_shared_if_negative(address, row.sum[0] + row.sum[1] + (row.sum[2] + row.sum[3]));
}

// Rows of V beyond a packed sequence belong to its neighbour: 0 * NaN must not reach the sum.
__device__ __forceinline__ void zero_tail(u32 v_smem, int first, int thread) {
  for (int i = thread; i < (BLOCK_N - first) * 8 * kPanelsV; i += 128) {
    const int panel = i / ((BLOCK_N - first) * 8);
    const int rest = i - panel * (BLOCK_N - first) * 8;
    store_shared_16(v_smem + panel * kKPanel + first * 128 + rest * 16, 0, 0, 0, 0);
  }
  fence_async_proxy();
}

// Everything one consumer warpgroup does. LeftHalf: of the last key block that its tile needs, this warpgroup sees the
// left half only, and computes only that. (Known when built: the assembler serialises products of two widths in the
// branches of one loop.)
template <class LeftHalf>
__device__ __forceinline__ void consume(const Params& p, Control& control, int wg, u32 q_smem, u32 k_smem, u32 v_smem) {
  const int thread = threadIdx.x & 127;
  const int warp = thread / 32;
  const int lane = thread & 31;
  const int turn = 1 + wg, next_turn = 1 + (wg + 1) % WARPGROUPS, together = 1 + WARPGROUPS + wg;
  if (PINGPONG && wg == WARPGROUPS - 1) named_barrier_arrive(1, 256);

  float o[HEAD_DIM_V / 2];
  float s[BLOCK_N / 2];
  u32 weights[BLOCK_N / 16][4];
  float factor[2];
  Queries q;
  RowState row;
  int step = 0;         // key blocks of all tiles so far
  bool stored = false;  // this thread's last store may still read its Q buffer

  const auto release_q = [&](int stage) {
    if (stored) {
      tma_store_wait_read();
      mbarrier_arrive(smem_address(&control.q_empty[stage]));
      stored = false;
    }
  };
  const auto wait_k = [&](int i) { mbarrier_wait(smem_address(&control.k_full[i % STAGES]), i / STAGES & 1); };
  const auto wait_v = [&](int i) { mbarrier_wait(smem_address(&control.v_full[i % STAGES]), i / STAGES & 1); };
  const auto release = [&](u64& empty) { mbarrier_arrive_warp(smem_address(&empty), lane == 0); };
  const auto release_k = [&](int i) { release(control.k_empty[i % STAGES]); };
  const auto release_v = [&](int i) { release(control.v_empty[i % STAGES]); };
  const auto k_tile = [&](int i) { return wgmma_k_major(k_smem + i % STAGES * kKBytes); };
  const auto v_tile = [&](int i) { return wgmma_mn_major(v_smem + i % STAGES * kVBytes, kKPanel); };

  // Waits for the tile of a round and for its first K block, takes its Q; false where it has no keys or is none.
  const auto open = [&](int round, int first_step) {
    const int qs = round % Q_STAGES;
    mbarrier_wait(smem_address(&control.q_full[qs]), round / Q_STAGES & 1);
    const Tile& tile = control.tiles[qs];
    if (tile.row < 0) return false;
    const KeyBlocks blocks = key_blocks(p, tile);
    if (blocks.end == blocks.begin) return false;
    q.load(q_smem + qs * kQBytes + wg * 64 * 128, warp, lane);
    wait_k(first_step);
    return true;
  };
  // P V of a block, or of its left half.
  const auto issue_block = [&](int i, auto left_half) {
    wgmma_fence();
    issue_output<0, decltype(left_half)::value ? BLOCK_N / 32 : BLOCK_N / 16>(o, weights, v_tile(i));
    wgmma_commit();
  };
  // The tile's first scores, from fence to wait.
  const auto first_scores = [&](int i, auto before_wait) {
    wgmma_fence();
    if constexpr (LeftHalf::value) {
      float left[BLOCK_N / 4];
      issue_scores<BLOCK_N / 2>(left, q, k_tile(i));
      wgmma_commit();
      before_wait();
      wgmma_wait<0>();
      registers_fence(left);
#pragma unroll
      for (int j = 0; j < BLOCK_N / 2; ++j) s[j] = j < BLOCK_N / 4 ? left[j % (BLOCK_N / 4)] : -ATTN_INFINITY;
    } else {
      issue_scores<BLOCK_N>(s, q, k_tile(i));
      wgmma_commit();
      before_wait();
      wgmma_wait<0>();
      registers_fence(s);
    }
    release_k(i);
  };
  const auto nothing = [] {};
  const auto pass_turn = [&] {
    if (PINGPONG) named_barrier_arrive(next_turn, 256);
  };

  if (open(0, 0)) first_scores(0, nothing);
  for (int round = 0;; ++round) {
    const int qs = round % Q_STAGES;
    const Tile& tile = control.tiles[qs];  // read again where needed: registers are scarce
    if (tile.row < 0) break;
    const KeyBlocks blocks = key_blocks(p, tile);
    // This thread's two rows: queries of the sequence, and beyond `rows` where they are none.
    const int in_tile = wg * 64 + warp * 16 + lane / 4;
    int row0 = tile.row + in_tile, row1 = row0 + 8;
    if (SPLIT) {
      const int used = p.tile_rows * p.group;
      row0 = in_tile < used ? tile.row + in_tile / p.group : tile.rows;
      row1 = in_tile + 8 < used ? tile.row + (in_tile + 8) / p.group : tile.rows;
    }
    const u32 q_tile = q_smem + qs * kQBytes + wg * 64 * 128;
    row.reset(row0 < tile.rows, row1 < tile.rows);
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; ++i) o[i] = 0.f;

    const auto mask = [&](int block) {
      const int first = block * BLOCK_N + 2 * (lane & 3);
      int limit0 = tile.keys, limit1 = tile.keys;
      if (CAUSAL) {
        const int shift = tile.keys - tile.rows + 1;
        limit0 = min(limit0, row0 + shift);
        limit1 = min(limit1, row1 + shift);
      }
      mask_columns(s, limit0 - first, limit1 - first);
    };

    if (blocks.end > blocks.begin) {
      // The first block's scores are there: open() of this round.
      if (blocks.end > blocks.first_masked) mask(blocks.end - 1);
      softmax_step<false>(s, row, factor, p.scale_log2, p.headroom);
      factor[0] = factor[1] = 1.f;  // O is still 0
      bool rescale = false;
      pack_weights(weights, s);
      release_q((round + Q_STAGES - 1) % Q_STAGES);
      if (VARLEN) {
        const int tail = tile.keys - (blocks.end - 1) * BLOCK_N;
        if (tail < BLOCK_N) {
          wait_v(step);
          zero_tail(v_smem + step % STAGES * kVBytes, tail, thread);
          named_barrier_sync(together, 128);
        }
      }

      const auto advance = [&](int block, auto masked, auto left_half) {
        wait_k(step + 1);
        if (PINGPONG) named_barrier_sync(turn, 256);
        wgmma_fence();
        issue_scores<BLOCK_N>(s, q, k_tile(step + 1));
        wgmma_commit();
        if (RESCALE_EARLY && rescale) rescale_output(o, factor);
        wait_v(step);
        issue_block(step, left_half);
        pass_turn();
        wgmma_wait<1>();
        registers_fence(s);
        release_k(step + 1);
        if constexpr (decltype(masked)::value) mask(block);
        rescale = softmax_step < QUICK && !decltype(masked)::value > (s, row, factor, p.scale_log2, p.headroom);
        if (EXP_FIRST) keep_order(row, q_tile);
        wgmma_wait<0>();
        registers_fence(o);
        release_v(step);
        if (!RESCALE_EARLY && rescale) rescale_output(o, factor);
        pack_weights(weights, s);
        ++step;
      };
      int block = blocks.end - 2;
      if constexpr (LeftHalf::value) {
        if (block >= blocks.begin) advance(block--, Yes{}, Yes{});
      }
      for (; block >= max(blocks.first_masked, blocks.begin); --block) advance(block, Yes{}, No{});
      for (; block >= blocks.begin; --block) advance(block, No{}, No{});

      // The last P V, and with it the next tile's first scores.
      if (RESCALE_EARLY && rescale) rescale_output(o, factor);
      const bool ahead = AHEAD && open(round + 1, step + 1);
      wait_v(step);
      if (PINGPONG && AHEAD) named_barrier_sync(turn, 256);
      // Conditional products stand whole in each branch: the assembler serialises what it must patch up.
      if (ahead) {
        issue_block(step, No{});
        first_scores(step + 1, pass_turn);
      } else {
        issue_block(step, No{});
        if (AHEAD) pass_turn();
        wgmma_wait<0>();
      }
      registers_fence(o);
      release_v(step);
      ++step;
    } else if (AHEAD && open(round + 1, step)) {
      first_scores(step, nothing);
    }
    release_q((round + Q_STAGES - 1) % Q_STAGES);

    store_tile(p, tile, o, row, wg, in_tile, row0, row1, q_tile, together);
    stored = thread == 0;
    if (!AHEAD) {
      if (Q_STAGES == 1) release_q(qs);
      if (open(round + 1, step)) first_scores(step, nothing);
    }
  }
  if (thread == 0) tma_store_wait();
}

}  // namespace attn
