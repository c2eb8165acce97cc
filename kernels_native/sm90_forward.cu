// FlashAttention forward for sm_90a: TMA loads by one producer warp, wgmma by two or three consumer warpgroups.
//
// Persistent thread blocks take query tiles of 64 rows a warpgroup and walk their keys from right to left. The next
// block's scores are issued before this block's P V, so that softmax runs under the tensor cores; P stays in registers.
// Method: FlashAttention-2/3 (arXiv 2307.08691, 2407.08608).
//
// Specialised by macros (sm90_forward.py chooses them):
//   HEAD_DIM, HEAD_DIM_V  multiples of 16; the tensors may be narrower, TMA pads with zeros
//   BLOCK_N               keys a block
//   WARPGROUPS            consumer warpgroups, 64 rows each
//   STAGES, Q_STAGES      buffers of K and of V; of Q (O is staged in the Q buffer it came from)
//   AHEAD                 the next tile's first scores run with this tile's last P V (needs two Q_STAGES)
//   CAUSAL, VARLEN        0 or 1
//   CLUSTER               blocks that work on one key head in step and share its loads: 1 or 2 (2: dense, and not
//   causal
//                         unless the group is even; not in use)
//   DYNAMIC               tiles are handed out in order instead of dealt to and fro
//   SPLIT                 few queries: the query heads of a group are rows of one tile, the keys are shared out among
//                         thread blocks, and sm90_forward_combine.cu merges what they write
//   PINGPONG              warpgroups take turns at the tensor cores
//   DIAGONAL_HALVES       causal, BLOCK_N and the tile 128, keys - rows a multiple of 128: the first warpgroup sees
//   only
//                         the left half of the tile's last key block and computes only that
//   Q_REGISTERS           Q is held in registers instead of being read from shared memory again and again
//   RESCALE_EARLY         O is rescaled before P V is issued instead of after it is done
//   EXP_FIRST             see keep_order
//   QUICK                 see softmax_step
#include "mask.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using namespace attn;

constexpr int kBlockM = 64 * WARPGROUPS;
constexpr int kThreads = 128 * (WARPGROUPS + 1);
constexpr int kPanels = (HEAD_DIM + 63) / 64;  // 64 columns, 128 bytes
constexpr int kPanelsV = (HEAD_DIM_V + 63) / 64;
constexpr u32 kQPanel = kBlockM * 128;
constexpr u32 kKPanel = BLOCK_N * 128;
constexpr u32 kQBytes = (kPanels > kPanelsV ? kPanels : kPanelsV) * kQPanel;
constexpr u32 kQLoad = kPanels * kQPanel;
constexpr u32 kKBytes = kPanels * kKPanel;
constexpr u32 kVBytes = kPanelsV * kKPanel;
constexpr int kProducerRegisters = WARPGROUPS == 3 ? 32 : 24;
constexpr int kConsumerRegisters = WARPGROUPS == 3 ? 160 : 240;

struct Params {
  TensorMap q, k, v, o;  // coordinates (column, token, head, batch); boxes 64 x (BLOCK_M, BLOCK_N, BLOCK_N, 64)
  unsigned short* out;   // [tokens, heads, head_dim_v], written directly where a packed sequence ends inside a tile
  float* lse;            // [batch, heads, rows] or [heads, tokens]
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* tile_offsets;  // packed: row tiles before each sequence, [batch + 2]
  float* partial_out;       // split: [splits, batch, heads, rows, head_dim_v], each split normalised by itself
  float* partial_lse;       // split: [splits, batch, heads, rows]
  int* counter;             // tiles handed out, blocks done: 0, 0 between launches
  int batch;
  int heads;
  int group;  // query heads a key head
  int rows;   // queries a sequence; packed: all tokens
  int keys;
  int row_tiles;
  int section_heads;  // heads whose keys stay in L2 together; packed: keys of one head that do
  int head_dim_v;
  int pair_heads;  // clusters: blocks take two heads of a group instead of two tiles of rows
  int tile_rows;   // queries a tile: BLOCK_M; split: BLOCK_M / group
  int splits;
  int blocks_per_split;  // key blocks
  float scale_log2;      // softmax scale * log2(e)
  float headroom;        // see softmax_step
};

// Shared memory after the tiles
struct Control {
  Tile next;  // from the scheduler to the producer
  Tile tiles[Q_STAGES];
  u64 q_full[Q_STAGES], q_empty[Q_STAGES];
  u64 next_full, next_empty;
  u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// Of the blocks [begin, end), those below first_masked are visible to every row whole, the others in part.
struct KeyBlocks {
  int begin;
  int end;
  int first_masked;
};

__device__ __forceinline__ KeyBlocks key_blocks(const Params& p, const Tile& tile) {
  KeyBlocks blocks;
  int end = tile.keys;
  int whole = tile.keys;
  if (CAUSAL) {
    const int shift = tile.keys - tile.rows;
    end = min(end, min(tile.row + (SPLIT ? p.tile_rows : kBlockM), tile.rows) + shift);
    whole = min(whole, max(tile.row + shift + 1, 0));
  }
  blocks.begin = 0;
  blocks.end = max(end + BLOCK_N - 1, 0) / BLOCK_N;
  if (SPLIT) {
    blocks.begin = tile.split * p.blocks_per_split;
    blocks.end = max(blocks.begin, min(blocks.end, blocks.begin + p.blocks_per_split));
  }
  blocks.first_masked = whole / BLOCK_N;
  return blocks;
}

// The tile of position `index`, or one with row -1. Called by a whole warp.
__device__ __forceinline__ Tile find_tile(const Params& p, int index) {
  Tile tile;
  tile.row = -1;
  if (VARLEN) {
    const int total = p.tile_offsets[p.batch + 1] * p.heads;
    if (index >= total) return tile;
    const int sequence = warp_search(p.tile_offsets, p.batch + 1, index / p.heads);
    const int first = p.tile_offsets[sequence];
    const int count = p.tile_offsets[sequence + 1] - first;
    tile.q_offset = p.cu_seqlens_q[sequence];
    if (sequence == p.batch) {  // tokens beyond the last sequence: no keys
      tile.rows = p.rows - tile.q_offset;
      tile.k_offset = tile.keys = 0;
    } else {
      tile.rows = p.cu_seqlens_q[sequence + 1] - tile.q_offset;
      tile.k_offset = p.cu_seqlens_k[sequence];
      tile.keys = p.cu_seqlens_k[sequence + 1] - tile.k_offset;
    }
    int row_tile;
    const int section = min(p.heads, max(1, p.section_heads / max(tile.keys, 1)) * p.group);
    dense_tile<CAUSAL>(index - first * p.heads, count, p.heads, p.heads, section, row_tile, tile.head, tile.batch);
    tile.row = row_tile * kBlockM;
  } else {
    // In a cluster this is the first block's tile.
    const int per_head = CLUSTER > 1 && p.pair_heads ? CLUSTER : 1;
    const int per_row = CLUSTER / per_head;
    const int heads = (SPLIT ? p.heads / p.group : p.heads) / per_head;
    const int row_tiles = (p.row_tiles + per_row - 1) / per_row;
    if (index >= row_tiles * heads * p.batch * (SPLIT ? p.splits : 1)) return tile;
    if (SPLIT) {
      tile.split = index % p.splits;
      index /= p.splits;
    }
    int row_tile;
    dense_tile<CAUSAL && !SPLIT>(index, row_tiles, heads, heads * p.batch, p.section_heads, row_tile, tile.head,
                                 tile.batch);
    tile.row = row_tile * (SPLIT ? p.tile_rows : kBlockM * per_row);
    tile.head *= per_head;
    tile.rows = p.rows;
    tile.keys = p.keys;
    tile.q_offset = tile.k_offset = 0;
  }
  return tile;
}

// One panel of a block of keys or values. In a cluster each block loads its share of the rows for all.
__device__ __forceinline__ void load_panel(const TensorMap& map, u32 destination, u32 full, int panel, int row,
                                           int head, int batch) {
#if CLUSTER > 1
  constexpr int kShare = BLOCK_N / CLUSTER;
  const int rank = cluster_rank();
  tma_load_4d_multicast(destination + rank * kShare * 128, map, full, (1 << CLUSTER) - 1, panel * 64,
                        row + rank * kShare, head, batch);
#else
  tma_load_4d(destination, map, full, panel * 64, row, head, batch);
#endif
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

// The scheduler warp: finds the next tile while the producer loads this one. In a cluster, the first block's for all.
__device__ __forceinline__ void schedule(const Params& p, Control& control) {
  const bool leader = (threadIdx.x & 31) == 0;
  const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
  int next = worker;
  for (int round = 0;; ++round) {
    const Tile tile = find_tile(p, DYNAMIC ? next : zigzag(round, worker, workers));
    if (leader) {
      if (DYNAMIC && tile.row >= 0) next = workers + atomicAdd(p.counter, 1);
      mbarrier_wait(smem_address(&control.next_empty), round & 1 ^ 1);
#if CLUSTER > 1
      const int4* words = reinterpret_cast<const int4*>(&tile);
      for (int rank = 0; rank < CLUSTER; ++rank) {
        store_cluster(smem_address(&control.next), rank, words[0]);
        store_cluster(smem_address(&control.next) + 16, rank, words[1]);
        mbarrier_arrive_cluster(smem_address(&control.next_full), rank);
      }
#else
      control.next = tile;
      mbarrier_arrive(smem_address(&control.next_full));
#endif
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
#if CLUSTER > 1
    mbarrier_wait_cluster(smem_address(&control.next_full), round & 1);
    Tile tile = control.next;
    mbarrier_arrive_cluster(smem_address(&control.next_empty), 0);
    if (tile.row >= 0) (p.pair_heads ? tile.head : tile.row) += cluster_rank() * (p.pair_heads ? 1 : kBlockM);
#else
    mbarrier_wait(smem_address(&control.next_full), round & 1);
    const Tile tile = control.next;
    mbarrier_arrive(smem_address(&control.next_empty));
#endif
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

// Q of one warpgroup, as the products take it: a descriptor, or this thread's fragments.
struct Queries {
  u64 descriptor;
  u32 fragments[Q_REGISTERS ? HEAD_DIM / 16 : 1][4];

  __device__ __forceinline__ void load(u32 q_tile, int warp, int lane) {
    descriptor = wgmma_k_major(q_tile);
#if Q_REGISTERS
    const int r = warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      const int chunk = 2 * (i % 4) + lane / 16;
      const u32 address = q_tile + i / 4 * kQPanel + r * 128 + ((chunk ^ (r & 7)) << 4);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(fragments[i][0]), "=r"(fragments[i][1]), "=r"(fragments[i][2]), "=r"(fragments[i][3])
                   : "r"(address)
                   : "memory");
    }
#endif
  }
};

// S = Q K^T of one warpgroup, for the first COLUMNS keys of the block
template <int COLUMNS>
__device__ __forceinline__ void issue_scores(float (&s)[COLUMNS / 2], const Queries& q, u64 k) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i) {
    const u32 q_step = (i / 4) * kQPanel + (i % 4) * 32;
    const u32 k_step = (i / 4) * kKPanel + (i % 4) * 32;
#if Q_REGISTERS
    Wgmma<COLUMNS>::template rs<0, 0>(s, q.fragments[i], k + (k_step >> 4), i > 0);
#else
    Wgmma<COLUMNS>::template ss<0>(s, q.descriptor + (q_step >> 4), k + (k_step >> 4), i > 0);
#endif
  }
}

// O += P V, for the keys of k-steps FIRST to LAST
template <int FIRST, int LAST>
__device__ __forceinline__ void issue_output(float (&o)[HEAD_DIM_V / 2], const u32 (&weights)[BLOCK_N / 16][4], u64 v) {
  constexpr int kWhole = HEAD_DIM_V / 64 * 64;
#pragma unroll
  for (int i = FIRST; i < LAST; ++i) {
    Wgmma<kWhole>::rs<0, 1>(o, weights[i], v + (i * 2048 >> 4), 1);
#if HEAD_DIM_V % 64
    Wgmma<HEAD_DIM_V - kWhole>::rs<kWhole / 2, 1>(o, weights[i], v + ((kWhole / 64 * kKPanel + i * 2048) >> 4), 1);
#endif
  }
}

__device__ __forceinline__ void pack_weights(u32 (&weights)[BLOCK_N / 16][4], const float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[i][j] = pack(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

__device__ __forceinline__ void rescale_output(float (&o)[HEAD_DIM_V / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / 2; ++i) o[i] *= factor[i >> 1 & 1];
}

// Keeps the exponentials before the next wait, under P V: without a use that looks like one the assembler sinks them
// below it. A sum is never negative, so nothing is stored.
__device__ __forceinline__ void keep_order(const RowState& row, u32 address) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(
                   row.sum[0] + row.sum[1] + (row.sum[2] + row.sum[3])),
               "r"(address)
               : "memory");
}

// Rows of V beyond a packed sequence belong to its neighbour: 0 * NaN must not reach the sum.
__device__ __forceinline__ void zero_tail(u32 v_smem, int first, int thread) {
  for (int i = thread; i < (BLOCK_N - first) * 8 * kPanelsV; i += 128) {
    const int panel = i / ((BLOCK_N - first) * 8);
    const int rest = i - panel * (BLOCK_N - first) * 8;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_smem + panel * kKPanel + first * 128 + rest * 16),
                 "r"(0)
                 : "memory");
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
  // Lane r of each warp tells block r of the cluster, which also loads into this block.
  const auto release = [&](u64& empty) {
#if CLUSTER > 1
    if (lane < CLUSTER) mbarrier_arrive_cluster(smem_address(&empty), lane);
#else
    mbarrier_arrive_warp(smem_address(&empty), lane == 0);
#endif
  };
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

    // Epilogue: normalise; stage O where Q was, and store it; or write a split's part as it is.
    float inverse[2];
#if SPLIT
    const long long partials = static_cast<long long>(p.heads) * p.rows;
#else
    const long long lse_row = VARLEN ? static_cast<long long>(tile.head) * p.rows + tile.q_offset
                                     : (static_cast<long long>(tile.batch) * p.heads + tile.head) * p.rows;
#endif
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row.sum[2 * r] + row.sum[2 * r + 1]);
      const bool empty = row.max[r] == -ATTN_INFINITY && sum == 0.f;  // a row of NaN is not empty
      inverse[r] = empty ? 0.f : 1.f / sum;
      // The same rounded base as in the exponents, so that its rounding cancels.
      const float lse = empty ? -ATTN_INFINITY : (__fmul_rn(row.max[r], p.scale_log2) + log2_mufu(sum)) * kLn2;
      const int query = r ? row1 : row0;
#if SPLIT
      if (query >= tile.rows) continue;
      const int head = tile.head * p.group + (in_tile + 8 * r) % p.group;
      const long long place = (static_cast<long long>(tile.split) * p.batch + tile.batch) * partials +
                              static_cast<long long>(head) * p.rows + query;
      if ((lane & 3) == 0) p.partial_lse[place] = lse;
      if (empty) continue;
      float2* out = reinterpret_cast<float2*>(p.partial_out + place * p.head_dim_v);
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 8; ++i)
        if (8 * i < p.head_dim_v)
          out[4 * i + (lane & 3)] = make_float2(o[4 * i + 2 * r] * inverse[r], o[4 * i + 2 * r + 1] * inverse[r]);
#else
      if ((lane & 3) == 0 && query < tile.rows) p.lse[lse_row + query] = lse;
#endif
    }
#if SPLIT
    named_barrier_sync(together, 128);  // every warp is done with Q and the tile
#else
    rescale_output(o, inverse);
    named_barrier_sync(together, 128);  // every warp is done reading Q
    {
      const int r = warp * 16 + (lane & 15);
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 16; ++i) {
        const int chunk = 2 * (i % 4) + lane / 16;
        const u32 address = q_tile + i / 4 * kQPanel + r * 128 + ((chunk ^ (r & 7)) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                     "r"(pack(o[8 * i], o[8 * i + 1])), "r"(pack(o[8 * i + 2], o[8 * i + 3])),
                     "r"(pack(o[8 * i + 4], o[8 * i + 5])), "r"(pack(o[8 * i + 6], o[8 * i + 7]))
                     : "memory");
      }
    }
    fence_async_proxy();
    named_barrier_sync(together, 128);
    const int first_row = tile.row + wg * 64;
    if (!VARLEN || first_row + 64 <= tile.rows) {
      if (thread == 0) {
#pragma unroll
        for (int panel = 0; panel < kPanelsV; ++panel)
          tma_store_4d(p.o, q_tile + panel * kQPanel, panel * 64, tile.q_offset + first_row, tile.head, tile.batch);
        tma_store_commit();
      }
    } else {
      constexpr int kChunks = HEAD_DIM_V / 8;
      for (int i = thread; i < 64 * kChunks; i += 128) {
        const int r = i / kChunks, chunk = i % kChunks;
        if (first_row + r < tile.rows && chunk * 8 < p.head_dim_v) {
          uint4 value;
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                       : "r"(q_tile + chunk / 8 * kQPanel + r * 128 + ((chunk % 8 ^ (r & 7)) << 4)));
          const long long token = static_cast<long long>(tile.q_offset) + first_row + r;
          *reinterpret_cast<uint4*>(p.out + (token * p.heads + tile.head) * p.head_dim_v + chunk * 8) = value;
        }
      }
      named_barrier_sync(together, 128);  // every thread is done reading O
    }
#endif
    stored = thread == 0;
    if (!AHEAD) {
      if (Q_STAGES == 1) release_q(qs);
      if (open(round + 1, step)) first_scores(step, nothing);
    }
  }
  if (thread == 0) tma_store_wait();
}

#if CLUSTER > 1
#define ATTN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define ATTN_CLUSTER
#endif
extern "C" __global__ void ATTN_CLUSTER __launch_bounds__(kThreads, 1) sm90_forward(const __grid_constant__ Params p) {
  extern __shared__ unsigned char dynamic_smem[];
  const u32 start = smem_address(dynamic_smem);
  const u32 q_smem = (start + 1023) & ~1023u;
  const u32 k_smem = q_smem + Q_STAGES * kQBytes;
  const u32 v_smem = k_smem + STAGES * kKBytes;
  Control& control = *reinterpret_cast<Control*>(dynamic_smem + (v_smem + STAGES * kVBytes - start));

  if (threadIdx.x == 0) {
    tma_prefetch(p.q);
    tma_prefetch(p.k);
    tma_prefetch(p.v);
    tma_prefetch(p.o);
    mbarrier_init(smem_address(&control.next_full), 1);
    mbarrier_init(smem_address(&control.next_empty), CLUSTER);
    for (int i = 0; i < Q_STAGES; ++i) {
      mbarrier_init(smem_address(&control.q_full[i]), 1);
      mbarrier_init(smem_address(&control.q_empty[i]), WARPGROUPS);
    }
    constexpr int kReaders = 4 * WARPGROUPS * (CLUSTER > 1 ? CLUSTER : kWarpArrivals);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_address(&control.k_full[i]), 1);
      mbarrier_init(smem_address(&control.v_full[i]), 1);
      mbarrier_init(smem_address(&control.k_empty[i]), kReaders);
      mbarrier_init(smem_address(&control.v_empty[i]), kReaders);
    }
    mbarrier_init_fence();
  }
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif

  // Shuffled, so that the compiler knows it to be alike across the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_shrink<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 1 && (CLUSTER == 1 || cluster_rank() == 0)) schedule(p, control);
    if (threadIdx.x == 0) produce(p, control, q_smem, k_smem, v_smem);
  } else {
    registers_grow<kConsumerRegisters>();
#if DIAGONAL_HALVES
    if (warpgroup == 1) {
      consume<Yes>(p, control, 0, q_smem, k_smem, v_smem);
    } else {
      consume<No>(p, control, 1, q_smem, k_smem, v_smem);
    }
#else
    consume<No>(p, control, warpgroup - 1, q_smem, k_smem, v_smem);
#endif
  }
#if CLUSTER > 1
  cluster_sync();  // nobody leaves while others may still write here
#endif
}
