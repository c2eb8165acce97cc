// The work of sm90_forward.cu: shapes, launch parameters, and which keys a tile needs. Macros: see there.
#pragma once
#include "scheduler.cuh"
#include "tma.cuh"

namespace attn {

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

struct Params {
  TensorMap q, k, v, o;  // coordinates (column, token, head, batch); boxes 64 x (BLOCK_M, BLOCK_N, BLOCK_N, 64)
  unsigned short* out;   // [tokens, heads, head_dim_v], written directly where a packed sequence ends inside a tile
  float* lse;            // [batch, heads, rows] or [heads, tokens]
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* tile_offsets;  // packed: see sm90_forward_prepare.cu
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
  int tile_rows;  // queries a tile: BLOCK_M; split: BLOCK_M / group
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
    const int place = warp_search(p.tile_offsets, p.batch + 1, index / p.heads);
    const int first = p.tile_offsets[place];
    const int count = p.tile_offsets[place + 1] - first;
    const int sequence = p.tile_offsets[p.batch + 2 + place];
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
    const int heads = SPLIT ? p.heads / p.group : p.heads;
    if (index >= p.row_tiles * heads * p.batch * (SPLIT ? p.splits : 1)) return tile;
    if (SPLIT) {
      tile.split = index % p.splits;
      index /= p.splits;
    }
    int row_tile;
    dense_tile<CAUSAL && !SPLIT>(index, p.row_tiles, heads, heads * p.batch, p.section_heads, row_tile, tile.head,
                                 tile.batch);
    tile.row = row_tile * (SPLIT ? p.tile_rows : kBlockM);
    tile.rows = p.rows;
    tile.keys = p.keys;
    tile.q_offset = tile.k_offset = 0;
  }
  return tile;
}

}  // namespace attn
