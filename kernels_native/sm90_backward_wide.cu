// FlashAttention backward for sm_90a and head dims beyond 128: two thread blocks of a cluster share their queries.
//
// Each block owns 64 keys of one key head, the cluster 128, and both walk the same query tiles of 64, of which each
// block loads half for both (multicast). One producer warp; two consumer warpgroups with different work:
//   values: S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dO; P^T goes to the other warpgroup through shared memory
//   keys: dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q; dS goes to both blocks (distributed shared memory)
// so that each holds one of the two large accumulators, and P^T and dS^T are operands from registers. With the dS of
// all 128 keys a block computes its half of dQ's columns, a panel of 64 a warpgroup, one tile late, so that nobody
// waits for the exchange; the sum goes to global memory by vector reductions from registers.
//
// Arithmetic at 256 columns, a tile of 64 queries by 64 keys (10.5 MFLOP, 2,560 clocks of the tensor cores):
//   registers      values 128 dV + 32 S + 32 dQ + 16 P, keys 128 dK + 32 dP + 32 dQ + 16 P or dS: 208 of 240
//   shared memory  K, V 64 KB, the other block's K of these columns 16, Q twice 64, dO 32, dS of two tiles 32, P of two
//                  tiles 16: 224 of 227 KB
//   its bandwidth  S, dP 64 KB each, dV, dK 32 each, dQ 64, Q and dO in 64, dS and P 40: 360 KB, 2,880 clocks
//   L2             32 KB of Q and dO, 32 KB of dQ: 25 bytes a clock, as at head dim 128 (alone a block would need 50)
// Method: FlashAttention-2/3 (arXiv 2307.08691, 2407.08608).
//
// Specialised by macros (sm90_backward_wide.py chooses them):
//   HEAD_DIM, HEAD_DIM_V  192 and 128 or 192, or 256 and 256; narrower tensors are padded with zeros by TMA
//   CAUSAL                0 or 1; not defined for the kernels before and after
//   DETERMINISTIC         key tiles add to dQ in ascending order
#include "cluster.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
#include "seqlen.cuh"
#include "swizzle.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma_transposed.cuh"

using namespace attn;

constexpr int kTile = 64;  // queries of a tile; keys of a block
constexpr int kKeys = 2 * kTile;
constexpr int kThreads = 384;
constexpr int kPanels = HEAD_DIM / 64;  // 64 columns, 128 bytes
constexpr int kValuePanels = HEAD_DIM_V / 64;
constexpr int kPeerPanels = 2;  // of the other block's keys
constexpr u32 kPanel = kTile * 128;
constexpr u32 kQBytes = kPanels * kPanel;
constexpr u32 kDoBytes = kValuePanels * kPanel;
constexpr u32 kRowBytes = kTile * 4;
constexpr int kQStages = 2;
constexpr int kDoStages = HEAD_DIM_V == 256 ? 1 : 2;
static_assert((kPanels == 3 || kPanels == 4) && kValuePanels <= kPanels, "head dims");

struct Params {
  TensorMap q, k, v, dout;  // coordinates (column, row, head, batch); boxes of 64 x 64
  unsigned short *dk, *dv;
  const float *lse2, *delta;  // [heads, padded rows]
  float* dq_sum;              // [heads, padded rows / 64, panels, 8, 128, 4]: each panel as its accumulators lie
  int* turns;                 // [heads, padded rows / 64, panels]; deterministic only
  const int* cu_q;            // null: dense
  const int* cu_k;
  long long dk_row, dk_head, dk_batch, dv_row, dv_head, dv_batch;  // elements
  long long padded;                                                // padded rows
  int sequences, q_total, k_total;
  int kv_heads, group;  // key heads; query heads a key head
  int tiles, section;
  int head_dim, value_dim;
  float scale, scale_log2;
  int unused;
};

struct RowParams {
  const unsigned short *out, *dout;  // prepare
  const float *lse, *dlse;
  float *lse2, *delta, *dq_sum;
  int* turns;
  unsigned short* dq;  // finish
  const int* cu_q;
  const int* cu_k;
  long long out_row, out_head, out_batch, dout_row, dout_head, dout_batch, dq_row, dq_head, dq_batch;
  long long lse_head, lse_batch, padded;
  int sequences, q_total, k_total, tiles;
  int dim;  // of out (prepare), of q (finish)
  float scale;
};

static_assert(sizeof(Params) == 704 && sizeof(RowParams) == 208, "as sm90_backward_wide.py packs them");

#ifdef CAUSAL  // the main kernel; without the macro, the two around it
// Shared memory after the tiles
struct Control {
  float lse2[kQStages][kTile];
  float delta[2][kTile];
  u64 kv_full;
  u64 q_full[2], q_empty[2], do_full[2], do_empty[2];
  u64 p_full[2], p_empty[2];
  u64 ds_full[2], ds_empty[2];
};

// Where the tiles lie
struct Tiles {
  u32 k, peer_k, v, q, dout, ds, p;
};

// What a cluster works on: its keys, and the query tiles that see them.
struct Work {
  Sequence s;
  int kv_head;
  int within;     // tile of kKeys keys in the sequence
  u32 rank;       // of this block
  int key0;       // of this block
  int shift;      // causal: key j is visible to query i iff j <= i + shift
  int padded0;    // first row of the sequence in the padded buffers
  int first_row;  // of the first query tile
  int end_row;    // after the last, a multiple of 64 from the first
  int total;      // query tiles, over the heads of the group
};

// One arrival a warp, here and in the cluster's other block.
__device__ __forceinline__ void release(u64* barrier, u32 rank, bool leader) {
  mbarrier_arrive_warp(smem_address(barrier), leader);
  if (kWarpArrivals > 1 || leader) mbarrier_arrive_read(smem_address(barrier), rank ^ 1);
}

// False where the cluster has no keys. Called by every warp.
__device__ __forceinline__ bool find_work(const Params& p, Work& w) {
  const int cluster = blockIdx.x / 2;
  w.rank = cluster_rank();
  int tile;
  if (CAUSAL) {
    sectioned(cluster, p.tiles, p.kv_heads * (p.cu_q == nullptr ? p.sequences : 1), p.section, tile, w.kv_head);
  } else {
    w.kv_head = cluster / p.tiles;
    tile = cluster - w.kv_head * p.tiles;
  }
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (p.cu_q == nullptr) {
    w.s.index = w.s.batch = w.kv_head / p.kv_heads;
    w.kv_head -= w.s.batch * p.kv_heads;
    w.s.q_start = w.s.k_start = 0;
    w.s.q_rows = p.q_total;
    w.s.k_rows = p.k_total;
    w.within = tile;
  } else {
    int tiles;
    if (!locate<kKeys, false>(batch, tile, w.s, w.within, tiles)) return false;
  }
  w.key0 = w.within * kKeys + w.rank * kTile;
  w.shift = w.s.k_rows - w.s.q_rows;
  const int first = CAUSAL ? max(0, w.within * kKeys - w.shift) / kTile : 0;
  const int count = max(0, (w.s.q_rows + kTile - 1) / kTile - first);
  w.first_row = first * kTile;
  w.end_row = w.first_row + count * kTile;
  w.total = count * p.group;
  w.padded0 = padded_row<kTile>(batch, w.s, 0);
  return true;
}

// The panel of dQ that a warpgroup computes for tile i, or -1. Three panels do not divide by the cluster's four
// warpgroups: the middle one alternates.
__device__ __forceinline__ int dq_panel(u32 rank, int wg, int i) {
  if (kPanels == 4) return 2 * rank + wg;
  return wg == 0 ? 2 * rank : (i & 1) == static_cast<int>(rank) ? 1 : -1;
}

// The first panel of peer_k
__device__ __forceinline__ int peer_first(u32 rank) { return rank * (kPanels - 2); }

// A tile of Q or dO. Each block loads every other panel, for both.
template <int PANELS>
__device__ __forceinline__ void load_tile(u32 destination, const TensorMap& map, u32 barrier, u32 parity, const Work& w,
                                          int row, int head) {
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {
    if ((panel & 1) == parity)
      tma_load_4d_multicast(destination + panel * kPanel, map, barrier, 3, panel * 64, w.s.q_start + row, head,
                            w.s.batch);
  }
}

// The producer, one thread.
__device__ __forceinline__ void produce(const Params& p, Control& control, const Work& w, const Tiles& t) {
  const u32 kv_full = smem_address(&control.kv_full);
  const int key = w.s.k_start + w.key0;
  mbarrier_expect(kv_full, (kPanels + kValuePanels + kPeerPanels) * kPanel);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    tma_load_4d(t.k + panel * kPanel, p.k, kv_full, panel * 64, key, w.kv_head, w.s.batch);
#pragma unroll
  for (int panel = 0; panel < kValuePanels; ++panel)
    tma_load_4d(t.v + panel * kPanel, p.v, kv_full, panel * 64, key, w.kv_head, w.s.batch);
  const int peer_key = key + (w.rank == 0 ? kTile : -kTile);
#pragma unroll
  for (int panel = 0; panel < kPeerPanels; ++panel)
    tma_load_4d(t.peer_k + panel * kPanel, p.k, kv_full, (peer_first(w.rank) + panel) * 64, peer_key, w.kv_head,
                w.s.batch);
  int row = w.first_row, head = w.kv_head * p.group;
#pragma unroll 1
  for (int i = 0; i < w.total; ++i) {
    const int q_stage = i % kQStages, do_stage = i % kDoStages;
    const u32 q_full = smem_address(&control.q_full[q_stage]), do_full = smem_address(&control.do_full[do_stage]);
    const long long padded = head * p.padded + w.padded0 + row;
    mbarrier_wait(smem_address(&control.q_empty[q_stage]), (i / kQStages & 1) ^ 1);
    mbarrier_expect(q_full, kQBytes + kRowBytes);
    load_tile<kPanels>(t.q + q_stage * kQBytes, p.q, q_full, w.rank, w, row, head);
    bulk_load(smem_address(control.lse2[q_stage]), p.lse2 + padded, kRowBytes, q_full);
    mbarrier_wait(smem_address(&control.do_empty[do_stage]), (i / kDoStages & 1) ^ 1);
    mbarrier_expect(do_full, kDoBytes + kRowBytes);
    load_tile<kValuePanels>(t.dout + do_stage * kDoBytes, p.dout, do_full, w.rank ^ 1, w, row, head);
    bulk_load(smem_address(control.delta[do_stage]), p.delta + padded, kRowBytes, do_full);
    row += kTile;
    if (row == w.end_row) {
      row = w.first_row;
      ++head;
    }
  }
}

// c = K Q^T or V dO^T: this block's keys by the tile's queries
template <int PANELS>
__device__ __forceinline__ void issue_scores(float (&c)[kTile / 2], u64 keys, u64 queries) {
#pragma unroll
  for (int i = 0; i < 4 * PANELS; ++i) {
    const u64 step = ((i / 4) * kPanel + (i % 4) * 32) >> 4;
    Wgmma<kTile>::ss<0>(c, keys + step, queries + step, i > 0);
  }
}

// c += P^T dO or dS^T Q
template <int COLUMNS>
__device__ __forceinline__ void issue_keys(float (&c)[COLUMNS / 2], const u32 (&a)[kTile / 16][4], u64 queries) {
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i) Wgmma<COLUMNS>::template rs<0, 1>(c, a[i], queries + (i * 2048 >> 4), 1);
}

// c = dS K, one panel, over the cluster's keys
__device__ __forceinline__ void issue_queries(float (&c)[kTile / 2], u32 ds, u32 keys, u32 peer_keys) {
  const u64 a = wgmma_k_major(ds), b = wgmma_mn_major(keys, kPanel), c_peer = wgmma_mn_major(peer_keys, kPanel);
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    const u64 key_step = (i < 4 ? b : c_peer) + ((i % 4) * 2048 >> 4);
    WgmmaTransposed<kTile>::ss<0, 0, 1>(c, a + (((i / 4) * kPanel + (i % 4) * 32) >> 4), key_step, i > 0);
  }
}

// What both consumer warpgroups do: dQ, and their ends.
struct Consumer {
  const Params& p;
  Control& control;
  const Work& w;
  const Tiles& t;
  int wg, thread;
  bool leader;

  // Named barriers
  static constexpr int kTogether = 1, kZeroed = 2, kOne = 3;  // and kOne + 1: a warpgroup's own

  __device__ __forceinline__ void sync() const { named_barrier_sync(kOne + wg, 128); }

  // Waits for the keys. What lies beyond the sequence may be NaN (a neighbour's), and 0 * NaN would reach dQ.
  __device__ __forceinline__ void wait_keys() const {
    mbarrier_wait(smem_address(&control.kv_full), 0);
    if (p.cu_q == nullptr) return;
    const int live = w.s.k_rows - w.key0, here = wg * 128 + thread;
    const int peer_live = live + (w.rank == 0 ? -kTile : kTile);
    if (min(live, peer_live) >= kTile) return;
    zero_rows<kTile, kPanels>(t.k, min(max(live, 0), kTile), here, 256);
    zero_rows<kTile, kValuePanels>(t.v, min(max(live, 0), kTile), here, 256);
    zero_rows<kTile, kPeerPanels>(t.peer_k, min(max(peer_live, 0), kTile), here, 256);
    named_barrier_sync(kTogether, 256);
  }

  // Issues dQ of tile i, one panel. Tile -1 passes its wait and computes what nobody reads.
  __device__ __forceinline__ void issue_dq(float (&dq)[kTile / 2], int i, int panel) const {
    mbarrier_wait(smem_address(&control.ds_full[i & 1]), i >> 1 & 1);
    wgmma_fence();
    issue_queries(dq, t.ds + (i & 1) * 2 * kPanel, t.k + panel * kPanel,
                  t.peer_k + (panel - peer_first(w.rank)) * kPanel);
    wgmma_commit();
  }

  // Adds a panel of dQ of query tile `tile` (over all heads) to the sum in global memory.
  __device__ __forceinline__ void add_dq(const float (&dq)[kTile / 2], long long tile, int panel) const {
    const long long at = tile * kPanels + panel;
#if DETERMINISTIC
    // A block's predecessors have lower block numbers, so they are running or done.
    if (thread == 0)
      while (load_acquire(p.turns + at) != w.within);
    sync();
#endif
    float* sum = p.dq_sum + at * (kTile * 64) + thread * 4;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const float x[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
      add_global(sum + j * 512, x);
    }
#if DETERMINISTIC
    __threadfence();
    sync();
    if (thread == 0) store_release(p.turns + at, w.within + 1);
#endif
  }

  // Rounds 64 x COLUMNS accumulators through `staged`, a warp its own 16 keys, and stores what exists.
  template <int COLUMNS>
  __device__ __forceinline__ void store(const float (&x)[COLUMNS / 2], float scale, u32 staged, unsigned short* out,
                                        long long stride, int columns) const {
    const int warp = thread / 32, lane = thread & 31;
    const u32 at = rows_then_columns(staged + warp * 2048, lane);
#pragma unroll
    for (int d = 0; d < COLUMNS / 16; ++d) {
      const float* y = x + 8 * d;
      stmatrix((at ^ ((d % 4) * 32)) + (d / 4) * kPanel, pack2(y[0] * scale, y[1] * scale),
               pack2(y[2] * scale, y[3] * scale), pack2(y[4] * scale, y[5] * scale), pack2(y[6] * scale, y[7] * scale));
    }
    __syncwarp();
    constexpr int kChunks = COLUMNS / 8;
    for (int j = lane; j < 16 * kChunks; j += 32) {
      const int r = warp * 16 + j / kChunks, chunk = j % kChunks;
      if (w.key0 + r >= w.s.k_rows || chunk * 8 >= columns) continue;
      const long long token = static_cast<long long>(w.s.k_start) + w.key0 + r;
      *reinterpret_cast<uint4*>(out + token * stride + chunk * 8) =
          load_shared_16(staged + (chunk / 8) * kPanel + swizzled(r, chunk % 8));
    }
  }
};

// The tile of the sums in global memory that tile i of a block adds to.
struct Position {
  int row, head;
  __device__ __forceinline__ long long tile(const Params& p, const Work& w) const {
    return (head * p.padded + w.padded0 + row) / kTile;
  }
  __device__ __forceinline__ void step(const Work& w) {
    row += kTile;
    if (row == w.end_row) {
      row = w.first_row;
      ++head;
    }
  }
};

// Warpgroup 0: S, P, dV
__device__ __forceinline__ void consume_values(const Consumer& c) {
  const Params& p = c.p;
  Control& control = c.control;
  const Work& w = c.w;
  const Tiles& t = c.t;
  const int lane = c.thread & 31;
  const bool varlen = p.cu_q != nullptr;
  float dv[HEAD_DIM_V / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / 2; ++i) dv[i] = 0.f;
  if (w.total > 0) c.wait_keys();
  const u64 keys = wgmma_k_major(t.k);
  const int key = w.key0 + c.thread / 32 * 16 + lane / 4;
  Position now{w.first_row, w.kv_head * p.group};
  long long previous = 0;
#pragma unroll 1
  for (int i = 0; i < w.total; ++i) {
    const int q_stage = i % kQStages, do_stage = i % kDoStages, slot = i & 1;
    const u32 q_tile = t.q + q_stage * kQBytes;
    const bool ragged = varlen && now.row + kTile > w.s.q_rows;
    float s[kTile / 2], dq[kTile / 2];
    mbarrier_wait(smem_address(&control.q_full[q_stage]), i / kQStages & 1);
    if (ragged) {  // the other rows are a neighbour's; the other warpgroup reads Q after P
      zero_rows<kTile, kPanels>(q_tile, w.s.q_rows - now.row, c.thread, 128);
      c.sync();
    }
    wgmma_fence();
    issue_scores<kPanels>(s, keys, wgmma_k_major(q_tile));
    wgmma_commit();
    const int panel = dq_panel(w.rank, 0, i - 1);
    c.issue_dq(dq, i - 1, panel);

    wgmma_wait<1>();
    registers_fence(s);
    if (w.key0 + kTile > w.s.k_rows || (CAUSAL && now.row + w.shift < w.key0 + kTile - 1)) {
      // The first query that sees the key, counted from this thread's first one.
      const int offset = w.shift + now.row + 2 * (lane & 3);
      const int limit0 = key >= w.s.k_rows ? kTile : (CAUSAL ? key - offset : -1);
      const int limit1 = key + 8 >= w.s.k_rows ? kTile : (CAUSAL ? key + 8 - offset : -1);
#pragma unroll
      for (int j = 0; j < kTile / 2; ++j) {
        const int column = 8 * (j / 4) + j % 2;
        if (column < ((j & 2) ? limit1 : limit0)) s[j] = -ATTN_INFINITY;
      }
    }
    u32 prob[kTile / 16][4];
    const float* lse2 = control.lse2[q_stage] + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * n);
      const float a = exp2_mufu(fmaf(s[4 * n], p.scale_log2, -l.x));
      const float b = exp2_mufu(fmaf(s[4 * n + 1], p.scale_log2, -l.y));
      const float d = exp2_mufu(fmaf(s[4 * n + 2], p.scale_log2, -l.x));
      const float e = exp2_mufu(fmaf(s[4 * n + 3], p.scale_log2, -l.y));
      prob[n / 2][2 * (n & 1)] = pack2(a, b);
      prob[n / 2][2 * (n & 1) + 1] = pack2(d, e);
    }
    if (ragged) named_barrier_sync(Consumer::kZeroed, 256);  // dO's other rows are zero
    mbarrier_wait(smem_address(&control.p_empty[slot]), (i >> 1 & 1) ^ 1);
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) store_shared_16(t.p + slot * kPanel + n * 2048 + c.thread * 16, prob[n]);
    __syncwarp();
    mbarrier_arrive_warp(smem_address(&control.p_full[slot]), c.leader);
    release(&control.q_empty[q_stage], w.rank, c.leader);  // after lse2 too

    mbarrier_wait(smem_address(&control.do_full[do_stage]), i / kDoStages & 1);
    wgmma_fence();
    issue_keys<HEAD_DIM_V>(dv, prob, wgmma_mn_major(t.dout + do_stage * kDoBytes, kPanel));
    wgmma_commit();
    wgmma_wait<1>();
    registers_fence(dq);
    if (i > 0) {
      release(&control.ds_empty[(i - 1) & 1], w.rank, c.leader);
      c.add_dq(dq, previous, panel);
    }
    wgmma_wait<0>();
    registers_fence(dv);
    release(&control.do_empty[do_stage], w.rank, c.leader);
    previous = now.tile(p, w);
    now.step(w);
  }
  if (w.total > 0) {
    const int panel = dq_panel(w.rank, 0, w.total - 1);
    if (panel >= 0) {
      float dq[kTile / 2];
      c.issue_dq(dq, w.total - 1, panel);
      wgmma_wait<0>();
      registers_fence(dq);
      c.add_dq(dq, previous, panel);
    }
  }
  named_barrier_sync(Consumer::kTogether, 256);  // nobody reads K and V any more
  c.store<HEAD_DIM_V>(dv, 1.f, t.v, p.dv + w.s.batch * p.dv_batch + w.kv_head * p.dv_head, p.dv_row, p.value_dim);
}

// Warpgroup 1: dP, dS, dK
__device__ __forceinline__ void consume_keys(const Consumer& c) {
  const Params& p = c.p;
  Control& control = c.control;
  const Work& w = c.w;
  const Tiles& t = c.t;
  const int lane = c.thread & 31, warp = c.thread / 32;
  const bool varlen = p.cu_q != nullptr;
  float dk[HEAD_DIM / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.f;
  if (w.total > 0) c.wait_keys();
  const u64 values = wgmma_k_major(t.v);
  const u32 ds_at = t.ds + swizzled((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
  Position now{w.first_row, w.kv_head * p.group};
  long long previous = 0;
#pragma unroll 1
  for (int i = 0; i < w.total; ++i) {
    const int q_stage = i % kQStages, do_stage = i % kDoStages, slot = i & 1;
    const u32 do_tile = t.dout + do_stage * kDoBytes, ds_slot = slot * 2 * kPanel;
    float dp[kTile / 2], dq[kTile / 2];
    mbarrier_wait(smem_address(&control.do_full[do_stage]), i / kDoStages & 1);
    if (varlen && now.row + kTile > w.s.q_rows) {
      zero_rows<kTile, kValuePanels>(do_tile, w.s.q_rows - now.row, c.thread, 128);
      named_barrier_arrive(Consumer::kZeroed, 256);
      c.sync();
    }
    wgmma_fence();
    issue_scores<kValuePanels>(dp, values, wgmma_k_major(do_tile));
    wgmma_commit();
    // Where three panels leave this warpgroup without one, it computes one more that nobody reads.
    const int panel = dq_panel(w.rank, 1, i - 1);
    c.issue_dq(dq, i - 1, max(panel, 1));

    u32 ds[kTile / 16][4];
    mbarrier_wait(smem_address(&control.p_full[slot]), i >> 1 & 1);
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
      const uint4 x = load_shared_16(t.p + slot * kPanel + n * 2048 + c.thread * 16);
      ds[n][0] = x.x;
      ds[n][1] = x.y;
      ds[n][2] = x.z;
      ds[n][3] = x.w;
    }
    wgmma_wait<1>();
    registers_fence(dp);
    mbarrier_arrive_warp(smem_address(&control.p_empty[slot]), c.leader);
    const float* delta = control.delta[do_stage] + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n);
      u32& first = ds[n / 2][2 * (n & 1)];
      u32& second = ds[n / 2][2 * (n & 1) + 1];
      const float2 a = unpack2(first), b = unpack2(second);
      first = pack2(a.x * (dp[4 * n] - d.x), a.y * (dp[4 * n + 1] - d.y));
      second = pack2(b.x * (dp[4 * n + 2] - d.x), b.y * (dp[4 * n + 3] - d.y));
    }
    mbarrier_wait(smem_address(&control.ds_empty[slot]), (i >> 1 & 1) ^ 1);
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) stmatrix_transposed(ds_at + ds_slot + n * 2048, ds[n]);
    release(&control.do_empty[do_stage], w.rank, c.leader);  // after delta too
    fence_async_proxy();
    c.sync();
    if (c.thread == 0) {
      const u32 full = smem_address(&control.ds_full[slot]);
      mbarrier_expect(full, kPanel);
      bulk_copy_cluster(t.ds + ds_slot + kPanel, t.ds + ds_slot, w.rank ^ 1, kPanel, full);
    }
    mbarrier_wait(smem_address(&control.q_full[q_stage]), i / kQStages & 1);
    wgmma_fence();
    issue_keys<HEAD_DIM>(dk, ds, wgmma_mn_major(t.q + q_stage * kQBytes, kPanel));
    wgmma_commit();
    wgmma_wait<1>();
    registers_fence(dq);
    if (i > 0) {
      release(&control.ds_empty[slot ^ 1], w.rank, c.leader);
      if (panel >= 0) c.add_dq(dq, previous, panel);
    }
    wgmma_wait<0>();
    registers_fence(dk);
    release(&control.q_empty[q_stage], w.rank, c.leader);
    previous = now.tile(p, w);
    now.step(w);
  }
  if (w.total > 0) {
    const int panel = dq_panel(w.rank, 1, w.total - 1);
    if (panel >= 0) {
      float dq[kTile / 2];
      c.issue_dq(dq, w.total - 1, panel);
      wgmma_wait<0>();
      registers_fence(dq);
      c.add_dq(dq, previous, panel);
    }
  }
  named_barrier_sync(Consumer::kTogether, 256);
  c.store<HEAD_DIM>(dk, p.scale, t.k, p.dk + w.s.batch * p.dk_batch + w.kv_head * p.dk_head, p.dk_row, p.head_dim);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_backward_wide(const __grid_constant__ Params p) {
  extern __shared__ unsigned char dynamic_smem[];
  const u32 start = smem_address(dynamic_smem);
  Tiles t;
  t.k = (start + 1023) & ~1023u;
  t.peer_k = t.k + kQBytes;
  t.v = t.peer_k + kPeerPanels * kPanel;
  t.q = t.v + kDoBytes;
  t.dout = t.q + kQStages * kQBytes;
  t.ds = t.dout + kDoStages * kDoBytes;
  t.p = t.ds + 4 * kPanel;
  Control& control = *reinterpret_cast<Control*>(dynamic_smem + (t.p + 2 * kPanel - start));

  Work w;
  if (!find_work(p, w)) return;  // alike in both blocks
  if (threadIdx.x == 0) {
    if (w.total > 0) {  // else a tensor may be empty, and then has no map
      tma_prefetch(p.q);
      tma_prefetch(p.k);
      tma_prefetch(p.v);
      tma_prefetch(p.dout);
    }
    mbarrier_init(smem_address(&control.kv_full), 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&control.q_full[i]), 1);
      mbarrier_init(smem_address(&control.do_full[i]), 1);
      mbarrier_init(smem_address(&control.ds_full[i]), 1);
      mbarrier_init(smem_address(&control.q_empty[i]), 2 * 8 * kWarpArrivals);
      mbarrier_init(smem_address(&control.do_empty[i]), 2 * 8 * kWarpArrivals);
      mbarrier_init(smem_address(&control.ds_empty[i]), 2 * 8 * kWarpArrivals);
      mbarrier_init(smem_address(&control.p_full[i]), 4 * kWarpArrivals);
      mbarrier_init(smem_address(&control.p_empty[i]), 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  cluster_sync();

  // Shuffled, so that the compiler knows it to be alike across the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x & 127;
  if (warpgroup == 0) {
    registers_shrink<24>();
    if (threadIdx.x == 0 && w.total > 0) produce(p, control, w, t);
  } else {
    registers_grow<240>();
    const Consumer consumer{p, control, w, t, warpgroup - 1, thread, (thread & 31) == 0};
    if (warpgroup == 1) {
      consume_values(consumer);
    } else {
      consume_keys(consumer);
    }
  }
  // The other block's copies and arrivals reach into this one until it is done.
  __syncwarp();
  cluster_sync();
}

#else
// Each block: one query tile and head. delta = rowsum(dO * O) - dlse; lse in log2 units, +inf where a row sees no key,
// so that its probabilities come out 0 there, as they do in the tile's rows beyond the sequence. Clears the tile's dQ
// sum.
extern "C" __global__ void __launch_bounds__(256) sm90_backward_wide_prepare(const __grid_constant__ RowParams p) {
  constexpr int kLanes = HEAD_DIM_V > 128 ? 32 : 16;  // a row's threads, 16 bytes each
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (!locate<kTile, true>(batch, tile, s, within, tiles)) return;
  const long long first = head * p.padded + padded_row<kTile>(batch, s, within);
  if (p.turns != nullptr && threadIdx.x < kPanels) p.turns[first / kTile * kPanels + threadIdx.x] = 0;
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + first * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < kTile * HEAD_DIM / 4 / 256; ++i) sum[i * 256 + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);

  const unsigned short* out = p.out + s.batch * p.out_batch + head * p.out_head;
  const unsigned short* dout = p.dout + s.batch * p.dout_batch + head * p.dout_head;
  const int chunk = threadIdx.x % kLanes;
#pragma unroll
  for (int r = threadIdx.x / kLanes; r < kTile; r += 256 / kLanes) {
    const int row = within * kTile + r;
    const bool inside = row < s.q_rows;
    const long long token = static_cast<long long>(s.q_start) + row;
    float total = 0.f;
    if (inside && chunk * 8 < p.dim) {
      const uint4 a = *reinterpret_cast<const uint4*>(out + token * p.out_row + chunk * 8);
      const uint4 b = *reinterpret_cast<const uint4*>(dout + token * p.dout_row + chunk * 8);
      const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = unpack2(x[i]), g = unpack2(y[i]);
        total = fmaf(f.x, g.x, fmaf(f.y, g.y, total));
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    if (chunk == 0) {
      const long long at = s.batch * p.lse_batch + head * p.lse_head + token;
      const float lse = inside ? p.lse[at] : -ATTN_INFINITY;
      const bool live = lse != -ATTN_INFINITY;
      if (live && p.dlse != nullptr) total -= p.dlse[at];
      p.lse2[first + r] = live ? lse * kLog2e : ATTN_INFINITY;
      p.delta[first + r] = live ? total : 0.f;
    }
  }
}

// Each block: one query tile and head. Undoes the order in which sm90_backward_wide summed, scales and rounds.
extern "C" __global__ void __launch_bounds__(256) sm90_backward_wide_finish(const __grid_constant__ RowParams p) {
  __shared__ __align__(1024) unsigned char shared[kQBytes];
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (!locate<kTile, true>(batch, tile, s, within, tiles)) return;
  const int thread = threadIdx.x & 127;
  const long long first = head * p.padded + padded_row<kTile>(batch, s, within);
#pragma unroll
  for (int panel = threadIdx.x / 128; panel < kPanels; panel += 2) {
    const float4* sum = reinterpret_cast<const float4*>(p.dq_sum + first * HEAD_DIM + panel * (kTile * 64)) + thread;
    const u32 at = rows_then_columns(smem_address(shared) + panel * kPanel + thread / 32 * 2048, thread & 31);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 a = sum[2 * j * 128], b = sum[(2 * j + 1) * 128];
      stmatrix(at ^ (j * 32), pack2(a.x * p.scale, a.y * p.scale), pack2(a.z * p.scale, a.w * p.scale),
               pack2(b.x * p.scale, b.y * p.scale), pack2(b.z * p.scale, b.w * p.scale));
    }
  }
  __syncthreads();
  unsigned short* dq = p.dq + s.batch * p.dq_batch + head * p.dq_head;
  constexpr int kChunks = HEAD_DIM / 8;
#pragma unroll
  for (int i = 0; i < kTile * kChunks / 256; ++i) {
    const int j = i * 256 + threadIdx.x;
    const int r = j / kChunks, chunk = j % kChunks, row = within * kTile + r;
    if (row < s.q_rows && chunk * 8 < p.dim)
      *reinterpret_cast<uint4*>(dq + (static_cast<long long>(s.q_start) + row) * p.dq_row + chunk * 8) =
          load_shared_16(smem_address(shared) + (chunk / 8) * kPanel + swizzled(r, chunk % 8));
  }
}
#endif
