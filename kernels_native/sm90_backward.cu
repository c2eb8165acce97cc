// FlashAttention backward for sm_90a: TMA loads by one producer warp, wgmma by two consumer warpgroups, dQ added to
// global memory by two writer warps.
//
// A thread block owns 128 keys of one key head, 64 a warpgroup, and walks the query tiles of the head's group. Scores
// are computed transposed, keys along the rows, so that P^T and dS^T are at once, in registers, the left operands of
// dV += P^T dO and dK += dS^T Q; dS alone goes through shared memory, for dQ = dS K, whose fp32 tile a bulk reduction
// adds to a sum in global memory. Before: delta. After: dQ scaled and rounded.
// Method: FlashAttention-2/3 (arXiv 2307.08691, 2407.08608).
//
// Specialised by macros (sm90_backward.py chooses them):
//   HEAD_DIM, BLOCK_M   64 and 128, or 128 and 64 or 80; narrower tensors are padded with zeros by TMA
//   DQ_SWAP             dQ is computed transposed, K^T dS^T, 64 columns a warpgroup; HEAD_DIM 128 only
//   CAUSAL              0 or 1; not defined for the kernels before and after
//   DETERMINISTIC       key tiles add to dQ in ascending order
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

constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = 128;
constexpr int kThreads = 384;
constexpr int kStages = 2;
constexpr int kPanels = HEAD_DIM / 64;  // 64 columns, 128 bytes
constexpr u32 kKPanel = kBlockN * 128;
constexpr u32 kKBytes = kPanels * kKPanel;
constexpr u32 kQPanel = kBlockM * 128;
constexpr u32 kQBytes = kPanels * kQPanel;
constexpr u32 kDsPanel = kBlockM * 128;  // the 64 keys of one warpgroup
constexpr u32 kDsBytes = 2 * kDsPanel;
constexpr int kDqColumns = DQ_SWAP ? kBlockM : 64;  // of a warpgroup's half of the dQ tile, in accumulators of 64 rows
constexpr u32 kDqBytes = 64 * kDqColumns * 4;
constexpr u32 kRowBytes = kBlockM * 4;
static_assert(HEAD_DIM == 128 ? DQ_SWAP || kBlockM == 64 : HEAD_DIM == 64 && kBlockM == 128 && !DQ_SWAP,
              "two accumulators of 64 rows must make up dQ");

struct Params {
  TensorMap q, k, v, dout;  // coordinates (column, row, head, batch); boxes 64 x (BLOCK_M, 128, 128, BLOCK_M)
  unsigned short *dk, *dv;
  const float *lse2, *delta;  // [heads, padded rows]
  float* dq_sum;              // [heads, padded rows, HEAD_DIM], each tile in the order of the accumulators
  int* turns;                 // [heads, padded rows / BLOCK_M, 2]; deterministic only
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
  const unsigned short *out, *dout;  // preprocess
  const float *lse, *dlse;
  float *lse2, *delta, *dq_sum;
  int* turns;
  unsigned short* dq;  // postprocess
  const int* cu_q;
  const int* cu_k;
  long long out_row, out_head, out_batch, dout_row, dout_head, dout_batch, dq_row, dq_head, dq_batch;
  long long lse_head, lse_batch, padded;
  int sequences, q_total, k_total, tiles;
  int dim;  // of out (preprocess), of q (postprocess)
  float scale;
};

static_assert(sizeof(Params) == 704 && sizeof(RowParams) == 208, "as sm90_backward.py packs them");

// Shared memory after the tiles
struct Control {
  float lse2[kStages][kBlockM];
  float delta[kStages][kBlockM];
  u64 kv_full;
  u64 q_full[kStages], q_empty[kStages], do_full[kStages], do_empty[kStages];
  u64 dq_full[2], dq_empty[2];  // a warpgroup's staged dQ
};

// What a thread block works on: its keys, and the query tiles that see them.
struct Work {
  Sequence s;
  int kv_head;
  int within;  // key tile of the sequence
  int key0;
  int shift;      // causal: key j is visible to query i iff j <= i + shift
  int first_row;  // of the first query tile
  int end_row;    // after the last, a multiple of BLOCK_M from the first
  int total;      // query tiles, over the heads of the group
};

#ifdef CAUSAL  // the main kernel; without the macro, the two around it
// False where the block has no key tile. Called by every warp.
__device__ __forceinline__ bool find_work(const Params& p, Work& w) {
  int tile;
  if (CAUSAL) {
    sectioned(blockIdx.x, p.tiles, p.kv_heads * (p.cu_q == nullptr ? p.sequences : 1), p.section, tile, w.kv_head);
  } else {
    w.kv_head = blockIdx.x / p.tiles;
    tile = blockIdx.x - w.kv_head * p.tiles;
  }
  if (p.cu_q == nullptr) {
    w.s.index = w.s.batch = w.kv_head / p.kv_heads;
    w.kv_head -= w.s.batch * p.kv_heads;
    w.s.q_start = w.s.k_start = 0;
    w.s.q_rows = p.q_total;
    w.s.k_rows = p.k_total;
    w.within = tile;
  } else {
    int tiles;
    const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
    if (!locate<kBlockN, false>(batch, tile, w.s, w.within, tiles)) return false;
  }
  w.key0 = w.within * kBlockN;
  w.shift = w.s.k_rows - w.s.q_rows;
  const int first = CAUSAL ? max(0, w.key0 - w.shift) / kBlockM : 0;
  const int count = max(0, (w.s.q_rows + kBlockM - 1) / kBlockM - first);
  w.first_row = first * kBlockM;
  w.end_row = w.first_row + count * kBlockM;
  w.total = count * p.group;
  return true;
}

// First row of the sequence in the padded buffers.
__device__ __forceinline__ int padded_start(const Params& p, const Sequence& s) {
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  return padded_row<kBlockM>(batch, s, 0);
}

// The producer, one thread.
__device__ __forceinline__ void produce(const Params& p, Control& control, const Work& w, u32 k_smem, u32 v_smem,
                                        u32 q_smem, u32 do_smem) {
  const u32 kv_full = smem_address(&control.kv_full);
  mbarrier_expect(kv_full, 2 * kKBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load_4d(k_smem + panel * kKPanel, p.k, kv_full, panel * 64, w.s.k_start + w.key0, w.kv_head, w.s.batch);
    tma_load_4d(v_smem + panel * kKPanel, p.v, kv_full, panel * 64, w.s.k_start + w.key0, w.kv_head, w.s.batch);
  }
  int row = w.first_row, head = w.kv_head * p.group;
  const int padded0 = padded_start(p, w.s);
#pragma unroll 1
  for (int i = 0; i < w.total; ++i) {
    const int stage = i % kStages;
    const u32 parity = (i / kStages & 1) ^ 1;
    const u32 q_full = smem_address(&control.q_full[stage]), do_full = smem_address(&control.do_full[stage]);
    const long long padded = head * p.padded + padded0 + row;
    mbarrier_wait(smem_address(&control.q_empty[stage]), parity);
    mbarrier_expect(q_full, kQBytes + kRowBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      tma_load_4d(q_smem + stage * kQBytes + panel * kQPanel, p.q, q_full, panel * 64, w.s.q_start + row, head,
                  w.s.batch);
    bulk_load(smem_address(control.lse2[stage]), p.lse2 + padded, kRowBytes, q_full);
    mbarrier_wait(smem_address(&control.do_empty[stage]), parity);
    mbarrier_expect(do_full, kQBytes + kRowBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      tma_load_4d(do_smem + stage * kQBytes + panel * kQPanel, p.dout, do_full, panel * 64, w.s.q_start + row, head,
                  w.s.batch);
    bulk_load(smem_address(control.delta[stage]), p.delta + padded, kRowBytes, do_full);
    row += kBlockM;
    if (row == w.end_row) {
      row = w.first_row;
      ++head;
    }
  }
}

// The writer of one warpgroup's dQ, one thread.
__device__ __forceinline__ void write_dq(const Params& p, Control& control, const Work& w, int wg, u32 dq_smem) {
  const u32 full = smem_address(&control.dq_full[wg]), empty = smem_address(&control.dq_empty[wg]);
  int row = w.first_row, head = w.kv_head * p.group;
  const int padded0 = padded_start(p, w.s);
#pragma unroll 1
  for (int i = 0; i < w.total; ++i) {
    const long long tile = (head * p.padded + padded0 + row) / kBlockM;
    mbarrier_wait(full, i & 1);
#if DETERMINISTIC
    // A block's predecessors have lower block numbers, so they are running or done.
    int* turn = p.turns + 2 * tile + wg;
    int now;
    do {
      now = load_acquire(turn);
    } while (now != w.within);
    fence_async_proxy_global();
#endif
    bulk_add(p.dq_sum + (2 * tile + wg) * (kDqBytes / 4), dq_smem, kDqBytes);
    tma_store_commit();
#if DETERMINISTIC
    tma_store_wait();
    fence_async_proxy_global();
    store_release(turn, w.within + 1);
#else
    tma_store_wait_read();
#endif
    mbarrier_arrive(empty);
    row += kBlockM;
    if (row == w.end_row) {
      row = w.first_row;
      ++head;
    }
  }
  tma_store_wait();
}

// c = (K or V) (Q or dO)^T: 64 keys of one warpgroup, BLOCK_M queries.
__device__ __forceinline__ void issue_scores(float (&c)[kBlockM / 2], u64 keys, u64 queries) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i)
    Wgmma<kBlockM>::ss<0>(c, keys + (((i / 4) * kKPanel + (i % 4) * 32) >> 4),
                          queries + (((i / 4) * kQPanel + (i % 4) * 32) >> 4), i > 0);
}

// c += P^T dO or dS^T Q
__device__ __forceinline__ void issue_keys(float (&c)[HEAD_DIM / 2], const u32 (&a)[kBlockM / 16][4], u64 queries) {
#pragma unroll
  for (int i = 0; i < kBlockM / 16; ++i) Wgmma<HEAD_DIM>::rs<0, 1>(c, a[i], queries + (i * 2048 >> 4), 1);
}

// dQ = dS K, or dQ^T = K^T dS^T
__device__ __forceinline__ void issue_queries(float (&c)[kDqColumns / 2], u64 ds, u64 keys) {
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i) {
    const u64 ds_step = ds + (((i / 4) * kDsPanel + (i % 4) * 32) >> 4), key_step = keys + (i * 2048 >> 4);
#if DQ_SWAP
    WgmmaTransposed<kDqColumns>::ss<0, 1, 0>(c, key_step, ds_step, i > 0);
#else
    WgmmaTransposed<kDqColumns>::ss<0, 0, 1>(c, ds_step, key_step, i > 0);
#endif
  }
}

// Keeps the exponentials before the next wait, under the product that it waits for: without a use that looks like one
// the assembler sinks them below it. Probabilities have no sign, so nothing is stored.
__device__ __forceinline__ void keep_order(const float (&s)[kBlockM / 2], u32 address) {
  int any = 0;
#pragma unroll
  for (int i = 0; i < kBlockM / 2; ++i) any |= __float_as_int(s[i]);
  store_shared_if_negative(address, any);
}

// Everything one consumer warpgroup does.
__device__ __forceinline__ void consume(const Params& p, Control& control, const Work& w, int wg, u32 k_smem,
                                        u32 v_smem, u32 q_smem, u32 do_smem, u32 ds_smem, u32 dq_smem) {
  constexpr int kTogether = 1, kZeroed = 2;  // named barriers
  const int thread = threadIdx.x & 127;
  const int warp = thread / 32;
  const int lane = thread & 31;
  const bool leader = lane == 0;
  const bool varlen = p.cu_q != nullptr;

  float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0.f;

  if (w.total > 0) {
    mbarrier_wait(smem_address(&control.kv_full), 0);
    if (varlen && w.key0 + kBlockN > w.s.k_rows) {
      // What lies beyond the sequence may be NaN (a neighbour's), and 0 * NaN would reach dQ.
      zero_rows<kBlockN, kPanels>(k_smem, w.s.k_rows - w.key0, wg * 128 + thread, 256);
      zero_rows<kBlockN, kPanels>(v_smem, w.s.k_rows - w.key0, wg * 128 + thread, 256);
      named_barrier_sync(kZeroed, 256);
    }
  }
  const u64 k_rows = wgmma_k_major(k_smem + wg * 64 * 128), v_rows = wgmma_k_major(v_smem + wg * 64 * 128);
  const u64 k_columns = wgmma_mn_major(k_smem + (HEAD_DIM == 128 ? wg * kKPanel : 0), kKPanel);
  const int key = w.key0 + wg * 64 + warp * 16 + lane / 4;
  const u32 ds_at = ds_smem + wg * kDsPanel + swizzled((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
  const u32 dq_at = dq_smem + wg * kDqBytes + thread * 16;
  const u32 dq_full = smem_address(&control.dq_full[wg]), dq_empty = smem_address(&control.dq_empty[wg]);

  // Waits for tile i of Q (or dO). Rows beyond a packed sequence belong to its neighbour: they are cleared.
  const auto wait_tile = [&](u64* full, u32 smem, int i, int row) {
    mbarrier_wait(smem_address(full + i % kStages), i / kStages & 1);
    if (varlen && row + kBlockM > w.s.q_rows) {
      zero_rows<kBlockM, kPanels>(smem + i % kStages * kQBytes, w.s.q_rows - row, wg * 128 + thread, 256);
      named_barrier_sync(kZeroed, 256);
    }
  };

  int row = w.first_row;
#pragma unroll 1
  for (int i = 0; i < w.total; ++i) {
    const int stage = i % kStages;
    const u32 q_tile = q_smem + stage * kQBytes, do_tile = do_smem + stage * kQBytes;
    float s[kBlockM / 2], dp[kBlockM / 2];
    wait_tile(control.q_full, q_smem, i, row);
    wgmma_fence();
    issue_scores(s, k_rows, wgmma_k_major(q_tile));
    wgmma_commit();
    wait_tile(control.do_full, do_smem, i, row);
    wgmma_fence();
    issue_scores(dp, v_rows, wgmma_k_major(do_tile));
    wgmma_commit();

    wgmma_wait<1>();
    registers_fence(s);
    if (w.key0 + wg * 64 + 64 > w.s.k_rows || (CAUSAL && row + w.shift < w.key0 + wg * 64 + 63)) {
      // The first query that sees the key, counted from this thread's first one.
      const int offset = w.shift + row + 2 * (lane & 3);
      const int limit0 = key >= w.s.k_rows ? kBlockM : (CAUSAL ? key - offset : -1);
      const int limit1 = key + 8 >= w.s.k_rows ? kBlockM : (CAUSAL ? key + 8 - offset : -1);
#pragma unroll
      for (int j = 0; j < kBlockM / 2; ++j) {
        const int column = 8 * (j / 4) + j % 2;
        if (column < ((j & 2) ? limit1 : limit0)) s[j] = -ATTN_INFINITY;
      }
    }
    u32 prob[kBlockM / 16][4], ds[kBlockM / 16][4];
    const float* lse2 = control.lse2[stage] + 2 * (lane & 3);
    const float* delta = control.delta[stage] + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * n);
      s[4 * n] = exp2_mufu(fmaf(s[4 * n], p.scale_log2, -l.x));
      s[4 * n + 1] = exp2_mufu(fmaf(s[4 * n + 1], p.scale_log2, -l.y));
      s[4 * n + 2] = exp2_mufu(fmaf(s[4 * n + 2], p.scale_log2, -l.x));
      s[4 * n + 3] = exp2_mufu(fmaf(s[4 * n + 3], p.scale_log2, -l.y));
      prob[n / 2][2 * (n & 1)] = pack2(s[4 * n], s[4 * n + 1]);
      prob[n / 2][2 * (n & 1) + 1] = pack2(s[4 * n + 2], s[4 * n + 3]);
    }
    keep_order(s, ds_at + stage * kDsBytes);
    wgmma_wait<0>();
    registers_fence(dp);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n);
      ds[n / 2][2 * (n & 1)] = pack2(s[4 * n] * (dp[4 * n] - d.x), s[4 * n + 1] * (dp[4 * n + 1] - d.y));
      ds[n / 2][2 * (n & 1) + 1] = pack2(s[4 * n + 2] * (dp[4 * n + 2] - d.x), s[4 * n + 3] * (dp[4 * n + 3] - d.y));
    }
    // This buffer's last readers, two tiles ago, had finished before they came to the previous tile's barrier.
#pragma unroll
    for (int n = 0; n < kBlockM / 16; ++n) stmatrix_transposed(ds_at + stage * kDsBytes + n * 2048, ds[n]);
    fence_async_proxy();
    wgmma_fence();
    issue_keys(dv, prob, wgmma_mn_major(do_tile, kQPanel));
    wgmma_commit();
    named_barrier_sync(kTogether, 256);

    float dq[kDqColumns / 2];
    wgmma_fence();
    issue_queries(dq, wgmma_k_major(ds_smem + stage * kDsBytes + (HEAD_DIM == 64 ? wg * 64 * 128 : 0)), k_columns);
    wgmma_commit();
    wgmma_wait<1>();
    registers_fence(dv);
    mbarrier_arrive_warp(smem_address(&control.do_empty[stage]), leader);
    wgmma_fence();
    issue_keys(dk, ds, wgmma_mn_major(q_tile, kQPanel));
    wgmma_commit();
    wgmma_wait<1>();
    registers_fence(dq);
    mbarrier_wait(dq_empty, (i & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < kDqColumns / 8; ++j)
      store_shared_16(dq_at + j * 2048, __float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                      __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3]));
    fence_async_proxy();
    __syncwarp();
    mbarrier_arrive_warp(dq_full, leader);
    wgmma_wait<0>();
    registers_fence(dk);
    mbarrier_arrive_warp(smem_address(&control.q_empty[stage]), leader);
    row += kBlockM;
    if (row == w.end_row) row = w.first_row;
  }

  // Both warpgroups have read K for their last dQ; then each warp stages its own 16 rows.
  named_barrier_sync(kTogether, 256);
  const u32 dk_at = rows_then_columns(k_smem + (wg * 4 + warp) * 2048, lane);
  const u32 dv_at = rows_then_columns(v_smem + (wg * 4 + warp) * 2048, lane);
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; ++d) {
    const u32 offset = (d / 4) * kKPanel, flip = (d % 4) * 32;
    const float* x = dk + 8 * d;
    const float* y = dv + 8 * d;
    stmatrix((dk_at ^ flip) + offset, pack2(x[0] * p.scale, x[1] * p.scale), pack2(x[2] * p.scale, x[3] * p.scale),
             pack2(x[4] * p.scale, x[5] * p.scale), pack2(x[6] * p.scale, x[7] * p.scale));
    stmatrix((dv_at ^ flip) + offset, pack2(y[0], y[1]), pack2(y[2], y[3]), pack2(y[4], y[5]), pack2(y[6], y[7]));
  }
  __syncwarp();
  unsigned short* dk_out = p.dk + w.s.batch * p.dk_batch + w.kv_head * p.dk_head;
  unsigned short* dv_out = p.dv + w.s.batch * p.dv_batch + w.kv_head * p.dv_head;
  constexpr int kChunks = HEAD_DIM / 8;
  for (int j = lane; j < 16 * kChunks; j += 32) {
    const int r = (wg * 4 + warp) * 16 + j / kChunks, chunk = j % kChunks;
    if (w.key0 + r >= w.s.k_rows) continue;
    const u32 offset = (chunk / 8) * kKPanel + swizzled(r, chunk % 8);
    const long long token = static_cast<long long>(w.s.k_start) + w.key0 + r;
    if (chunk * 8 < p.head_dim)
      *reinterpret_cast<uint4*>(dk_out + token * p.dk_row + chunk * 8) = load_shared_16(k_smem + offset);
    if (chunk * 8 < p.value_dim)
      *reinterpret_cast<uint4*>(dv_out + token * p.dv_row + chunk * 8) = load_shared_16(v_smem + offset);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_backward(const __grid_constant__ Params p) {
  extern __shared__ unsigned char dynamic_smem[];
  const u32 start = smem_address(dynamic_smem);
  const u32 k_smem = (start + 1023) & ~1023u;
  const u32 v_smem = k_smem + kKBytes;
  const u32 q_smem = v_smem + kKBytes;
  const u32 do_smem = q_smem + kStages * kQBytes;
  const u32 ds_smem = do_smem + kStages * kQBytes;
  const u32 dq_smem = ds_smem + 2 * kDsBytes;
  Control& control = *reinterpret_cast<Control*>(dynamic_smem + (dq_smem + 2 * kDqBytes - start));

  Work w;
  if (!find_work(p, w)) return;
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
      mbarrier_init(smem_address(&control.q_empty[i]), 8 * kWarpArrivals);
      mbarrier_init(smem_address(&control.do_empty[i]), 8 * kWarpArrivals);
      mbarrier_init(smem_address(&control.dq_full[i]), 4 * kWarpArrivals);
      mbarrier_init(smem_address(&control.dq_empty[i]), 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  // Shuffled, so that the compiler knows it to be alike across the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_shrink<24>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if ((threadIdx.x & 31) == 0 && w.total > 0) {
      if (warp == 0) {
        produce(p, control, w, k_smem, v_smem, q_smem, do_smem);
      } else if (warp <= 2) {
        write_dq(p, control, w, warp - 1, dq_smem + (warp - 1) * kDqBytes);
      }
    }
  } else {
    registers_grow<240>();
    consume(p, control, w, warpgroup - 1, k_smem, v_smem, q_smem, do_smem, ds_smem, dq_smem);
  }
}

#else
// Each block: one query tile and head. delta = rowsum(dO * O) - dlse; lse in log2 units, +inf where a row sees no key,
// so that its probabilities come out 0 there, as they do in the tile's rows beyond the sequence. Clears the tile's dQ
// sum.
extern "C" __global__ void __launch_bounds__(256) sm90_backward_prepare(const __grid_constant__ RowParams p) {
  constexpr int kLanes = HEAD_DIM / 8;  // a row's threads, 16 bytes each
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (!locate<kBlockM, true>(batch, tile, s, within, tiles)) return;
  const long long first = head * p.padded + padded_row<kBlockM>(batch, s, within);
  if (p.turns != nullptr && threadIdx.x < 2) p.turns[2 * (first / kBlockM) + threadIdx.x] = 0;
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + first * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < kBlockM * HEAD_DIM / 4 / 256; ++i) sum[i * 256 + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);

  const unsigned short* out = p.out + s.batch * p.out_batch + head * p.out_head;
  const unsigned short* dout = p.dout + s.batch * p.dout_batch + head * p.dout_head;
  const int chunk = threadIdx.x % kLanes;
#pragma unroll
  for (int r = threadIdx.x / kLanes; r < kBlockM; r += 256 / kLanes) {
    const int row = within * kBlockM + r;
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

// Each block: one query tile and head. Undoes the order in which sm90_backward summed, scales and rounds.
extern "C" __global__ void __launch_bounds__(256) sm90_backward_finish(const __grid_constant__ RowParams p) {
  __shared__ __align__(1024) unsigned char shared[kBlockM * HEAD_DIM * 2];
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (!locate<kBlockM, true>(batch, tile, s, within, tiles)) return;
  const int wg = threadIdx.x / 128, thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  const long long first = head * p.padded + padded_row<kBlockM>(batch, s, within);
  const float4* sum = reinterpret_cast<const float4*>(p.dq_sum + first * HEAD_DIM) + wg * (kDqBytes / 16) + thread;
#if DQ_SWAP
  const u32 at =
      smem_address(shared) + wg * kQPanel + swizzled((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
#else
  const u32 half = HEAD_DIM == 128 ? wg * kQPanel : wg * 64 * 128;
  const u32 at = rows_then_columns(smem_address(shared) + half + warp * 2048, lane);
#endif
#pragma unroll
  for (int j = 0; j < kDqColumns / 16; ++j) {
    const float4 a = sum[2 * j * 128], b = sum[(2 * j + 1) * 128];
    const u32 packed[4] = {pack2(a.x * p.scale, a.y * p.scale), pack2(a.z * p.scale, a.w * p.scale),
                           pack2(b.x * p.scale, b.y * p.scale), pack2(b.z * p.scale, b.w * p.scale)};
#if DQ_SWAP
    stmatrix_transposed(at + j * 2048, packed);
#else
    stmatrix(at ^ (j * 32), packed[0], packed[1], packed[2], packed[3]);
#endif
  }
  __syncthreads();
  unsigned short* dq = p.dq + s.batch * p.dq_batch + head * p.dq_head;
  constexpr int kChunks = HEAD_DIM / 8;
#pragma unroll
  for (int i = 0; i < kBlockM * kChunks / 256; ++i) {
    const int j = i * 256 + threadIdx.x;
    const int r = j / kChunks, chunk = j % kChunks, row = within * kBlockM + r;
    if (row < s.q_rows && chunk * 8 < p.dim)
      *reinterpret_cast<uint4*>(dq + (static_cast<long long>(s.q_start) + row) * p.dq_row + chunk * 8) =
          load_shared_16(smem_address(shared) + (chunk / 8) * kQPanel + swizzled(r, chunk % 8));
  }
}
#endif
