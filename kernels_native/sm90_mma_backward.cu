// FlashAttention backward with mma.sync (Dao, "FlashAttention-2", 2023, algorithm 2): one thread block per key tile
// walks the query tiles. Scores are computed transposed, keys along the rows, so that P and dS in registers are left
// operands of dV = P^T dO and dK = dS^T Q. dQ = dS K is summed in fp32 in global memory. Before: delta. After: dQ
// scaled and rounded.
//
// Reading operands from shared memory is what limits this kernel, so a warp works on 32 rows at a time: two warps share
// 32 keys, each computes the scores of one half of the queries and owns one half of the columns of dK and dV, and they
// exchange P and dS through shared memory.
#include "memory.cuh"
#include "mma.cuh"
#include "named_barrier.cuh"
#include "seqlen.cuh"
#include "swizzle.cuh"
#include "tma.cuh"

using namespace attn;

constexpr int kBlockM = 64;  // query tile of all four kernels

struct Params {
  TensorMap q, k, v, dout;  // coordinates: column, row, head, batch
  void *dk, *dv;
  const float *lse2, *delta;  // [heads, padded rows]
  float* dq_sum;              // [heads, padded rows, D], each tile in the order of the accumulators
  int* turns;                 // [heads, padded rows / kBlockM]; deterministic only
  const int* cu_q;            // null: dense
  const int* cu_k;
  long long dk_row, dk_head, dk_batch, dv_row, dv_head, dv_batch;  // elements
  long long padded;                                                // padded rows
  int sequences, q_total, k_total;
  int kv_heads, group;  // key heads; query heads per key head
  int tiles, section;
  int head_dim, value_dim;
  float scale, scale_log2;
  int unused;
};

struct RowParams {
  const void *out, *dout;  // preprocess
  const float *lse, *dlse;
  float *lse2, *delta, *dq_sum;
  void* dq;  // postprocess
  const int* cu_q;
  const int* cu_k;
  long long out_row, out_head, out_batch, dout_row, dout_head, dout_batch, dq_row, dq_head, dq_batch;
  long long lse_head, lse_batch, padded;
  int sequences, q_total, k_total, tiles;
  int dim;  // of out (preprocess), of q (postprocess)
  float scale;
};

// Each block: one query tile and head. delta = rowsum(dO * O) - dlse; lse in log2 units, +inf where a row sees no key,
// so that its probabilities come out 0 there, as they do in the tile's rows beyond the sequence. Clears the tile's dQ
// sum.
template <int D>
__global__ void __launch_bounds__(256) preprocess(const __grid_constant__ RowParams p) {
  constexpr int LANES = D / 8;  // a row's threads, 16 bytes each
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (!locate<kBlockM, true>(batch, tile, s, within, tiles)) return;
  const long long first = head * p.padded + padded_row<kBlockM>(batch, s, within);
  float4* sum = reinterpret_cast<float4*>(p.dq_sum + first * D);
  for (int i = threadIdx.x; i < kBlockM * D / 4; i += 256) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);

  const unsigned short* out = static_cast<const unsigned short*>(p.out) + s.batch * p.out_batch + head * p.out_head;
  const unsigned short* dout = static_cast<const unsigned short*>(p.dout) + s.batch * p.dout_batch + head * p.dout_head;
  const int chunk = threadIdx.x % LANES;
  for (int r = threadIdx.x / LANES; r < kBlockM; r += 256 / LANES) {
    const int row = within * kBlockM + r;
    const bool inside = row < s.q_rows;
    float total = 0.f;
    if (inside && chunk * 8 < p.dim) {
      const uint4 a = *reinterpret_cast<const uint4*>(out + (s.q_start + row) * p.out_row + chunk * 8);
      const uint4 b = *reinterpret_cast<const uint4*>(dout + (s.q_start + row) * p.dout_row + chunk * 8);
      const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = unpack2(x[i]), g = unpack2(y[i]);
        total = fmaf(f.x, g.x, fmaf(f.y, g.y, total));
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    if (chunk == 0) {
      const long long at = s.batch * p.lse_batch + head * p.lse_head + s.q_start + row;
      const float lse = inside ? p.lse[at] : -ATTN_INFINITY;
      const bool live = lse != -ATTN_INFINITY;
      if (live && p.dlse != nullptr) total -= p.dlse[at];
      p.lse2[first + r] = live ? lse * kLog2e : ATTN_INFINITY;
      p.delta[first + r] = live ? total : 0.f;
    }
  }
}

// D: head dim in shared memory (64 or 128). BN: key tile; two warps for each 32 keys of it.
template <int D, int BN, bool CAUSAL, bool DETERMINISTIC>
__global__ void __launch_bounds__(2 * BN, 1) attention_backward(const __grid_constant__ Params p) {
  constexpr int BM = kBlockM, WARPS = BN / 16, THREADS = 32 * WARPS;
  constexpr int PANELS = D / 64;
  constexpr u32 K_BYTES = BN * D * 2, Q_BYTES = BM * D * 2, DS_BYTES = BN * BM * 2, ROW_BYTES = BM * 4;
  constexpr int HALF = D / 2;  // columns of dK and dV that a warp owns
  constexpr u32 STAGE_BYTES = 2 * Q_BYTES;
  constexpr int WARPS_D = WARPS / 2;   // dQ: two warps along the queries (32 each), the others along D
  constexpr int QN = D / WARPS_D / 8;  // 8-column tiles of a warp's dQ
  static_assert(QN % 2 == 0, "a warp's dQ columns come in pairs of tiles");
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(16) float rows[2][2][BM];  // stage; lse2, delta
  __shared__ __align__(8) u64 barriers[7];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tile, kv_head;
  if (CAUSAL) {
    sectioned(blockIdx.x, p.tiles, p.kv_heads * (p.cu_q == nullptr ? p.sequences : 1), p.section, tile, kv_head);
  } else {
    kv_head = blockIdx.x / p.tiles;
    tile = blockIdx.x - kv_head * p.tiles;
  }
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (p.cu_q == nullptr) {
    s.index = s.batch = kv_head / p.kv_heads;
    kv_head -= s.batch * p.kv_heads;
    s.q_start = s.k_start = 0;
    s.q_rows = p.q_total;
    s.k_rows = p.k_total;
    within = tile;
  } else if (!locate<BN, false>(batch, tile, s, within, tiles)) {
    return;
  }
  const int key0 = within * BN;
  const int shift = s.k_rows - s.q_rows;  // causal: key j is visible to query i iff j <= i + shift
  const int first_m = CAUSAL ? max(0, key0 - shift) / BM : 0;
  const int count = max(0, (s.q_rows + BM - 1) / BM - first_m);  // query tiles
  const int total = count * p.group;
  const int padded0 = padded_row<BM>(batch, s, 0);

  const u32 k_tile = smem_address(shared), v_tile = k_tile + K_BYTES, stages = v_tile + K_BYTES;
  const u32 ds_tiles = stages + 2 * STAGE_BYTES, p_tile = ds_tiles + 2 * DS_BYTES;
  const u32 bars = smem_address(barriers);
  const u32 kv_full = bars, full = bars + 8, empty = bars + 24, ds_full = bars + 40;
  if (threadIdx.x == 0) {
    mbarrier_init(kv_full, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, WARPS * kWarpArrivals);
      mbarrier_init(ds_full + 8 * i, WARPS * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  // The heads of the group one after another, of each the query tiles in order. Only thread 0 loads.
  auto load = [&](int i, int head, int row) {
    const int stage = i & 1;
    const u32 bar = full + 8 * stage, at = stages + stage * STAGE_BYTES;
    mbarrier_expect(bar, STAGE_BYTES + 2 * ROW_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      tma_load_4d(at + panel * BM * 128, p.q, bar, panel * 64, s.q_start + row, head, s.batch);
      tma_load_4d(at + Q_BYTES + panel * BM * 128, p.dout, bar, panel * 64, s.q_start + row, head, s.batch);
    }
    const long long padded = head * p.padded + padded0 + row;
    bulk_load(smem_address(rows[stage][0]), p.lse2 + padded, ROW_BYTES, bar);
    bulk_load(smem_address(rows[stage][1]), p.delta + padded, ROW_BYTES, bar);
  };
  const int pair = warp / 2, side = warp % 2;  // keys 32 pair ..; queries 32 side .., columns HALF side ..
  float dk[2][HALF / 8][4], dv[2][HALF / 8][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < HALF / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) dk[m][n][j] = dv[m][n][j] = 0.f;

  if (total > 0) {
    if (threadIdx.x == 0) {
      mbarrier_expect(kv_full, 2 * K_BYTES);
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        tma_load_4d(k_tile + panel * BN * 128, p.k, kv_full, panel * 64, s.k_start + key0, kv_head, s.batch);
        tma_load_4d(v_tile + panel * BN * 128, p.v, kv_full, panel * 64, s.k_start + key0, kv_head, s.batch);
      }
      load(0, kv_head * p.group, first_m * BM);
    }
    mbarrier_wait(kv_full, 0);
    if (key0 + BN > s.k_rows) {
      // What lies beyond the sequence may be NaN (a neighbour's), and 0 * NaN would reach dQ.
      zero_rows<BN, PANELS>(k_tile, s.k_rows - key0, threadIdx.x, THREADS);
      zero_rows<BN, PANELS>(v_tile, s.k_rows - key0, threadIdx.x, THREADS);
      __syncthreads();
    }
  }

  // The pair's 32 keys times this warp's 32 queries: c = (K or V) * (Q or dO)^T.
  auto product = [&](float (&c)[2][4][4], u32 keys, u32 queries) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
    const u32 a_at = rows_then_columns(keys + pair * 4096, lane), b_at = columns_then_rows(queries + side * 4096, lane);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ldmatrix(a[m], (a_at ^ ((k % 4) * 32)) + (k / 4) * BN * 128 + m * 2048);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        u32 b[4];
        ldmatrix(b, (b_at ^ ((k % 4) * 32)) + (k / 4) * BM * 128 + n * 2048);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma(c[m][2 * n], a[m], b[0], b[1]);
          mma(c[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  };
  // c += a * (dO or Q), over 16 queries from `query` on.
  auto accumulate = [&](float (&c)[2][HALF / 8][4], const u32(&a)[2][4], u32 queries, int query) {
    const int column = side * HALF;
    const u32 b_at = rows_then_columns(queries + (column / 64) * BM * 128 + query * 128, lane) ^ ((column % 64) * 2);
#pragma unroll
    for (int d = 0; d < HALF / 16; ++d) {
      u32 b[4];
      ldmatrix_transposed(b, b_at ^ (d * 32));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma(c[m][2 * d], a[m], b[0], b[1]);
        mma(c[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  };

  int head = kv_head * p.group, row0 = first_m * BM;
  const int end_row = row0 + count * BM;
#pragma unroll 1
  for (int i = 0; i < total; ++i) {
    const int stage = i & 1, parity = (i >> 1) & 1;
    const u32 q_tile = stages + stage * STAGE_BYTES, do_tile = q_tile + Q_BYTES, ds_tile = ds_tiles + stage * DS_BYTES;
    mbarrier_wait(full + 8 * stage, parity);
    if (row0 + BM > s.q_rows) {
      zero_rows<BM, 2 * PANELS>(q_tile, s.q_rows - row0, threadIdx.x, THREADS);
      __syncthreads();
    }

    float c[2][4][4];
    u32 ds[2][2][4];  // 16 queries; 16 keys
    product(c, k_tile, q_tile);
    if (threadIdx.x == 0 && i + 1 < total) {
      if (i > 0) mbarrier_wait(empty + 8 * (stage ^ 1), ((i - 1) >> 1) & 1);
      if (row0 + BM < end_row) {
        load(i + 1, head, row0 + BM);
      } else {
        load(i + 1, head + 1, first_m * BM);
      }
    }
    if (key0 + BN > s.k_rows || (CAUSAL && row0 + shift < key0 + BN - 1)) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = key0 + pair * 32 + m * 16 + half * 8 + lane / 4;
          // The first query that sees the key, counted from this thread's first one.
          const int limit = key >= s.k_rows ? BM : (CAUSAL ? key - shift - row0 - side * 32 - 2 * (lane % 4) : -BM);
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              if (8 * n + j < limit) c[m][n][2 * half + j] = -ATTN_INFINITY;
        }
    }
    // Addresses of the pair's 32 keys in the tiles of P and dS, keys along the rows, at this warp's queries. The last
    // readers of P were this warp and its partner, before the second of their barriers; those of this dS tile, two
    // iterations ago, arrived at `ds_full` since.
    const u32 p_at = rows_then_columns(p_tile + pair * 4096, lane) ^ (side * 64);
    const u32 ds_at = rows_then_columns(ds_tile + pair * 4096, lane) ^ (side * 64);
// P; the exponentials of the second 16 queries run under the products of dV with the first.
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      u32 prob[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int n = 2 * k + j;
        const float2 lse2 = *reinterpret_cast<const float2*>(&rows[stage][0][side * 32 + 8 * n + 2 * (lane % 4)]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float (&x)[4] = c[m][n];
          x[0] = exp2_mufu(fmaf(x[0], p.scale_log2, -lse2.x));
          x[1] = exp2_mufu(fmaf(x[1], p.scale_log2, -lse2.y));
          x[2] = exp2_mufu(fmaf(x[2], p.scale_log2, -lse2.x));
          x[3] = exp2_mufu(fmaf(x[3], p.scale_log2, -lse2.y));
          prob[m][2 * j] = pack2(x[0], x[1]);
          prob[m][2 * j + 1] = pack2(x[2], x[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
        stmatrix((p_at ^ (k * 32)) + m * 2048, prob[m][0], prob[m][1], prob[m][2], prob[m][3]);
      accumulate(dv, prob, do_tile, side * 32 + k * 16);
    }
    float dp[2][4][4];
    product(dp, v_tile, do_tile);
    named_barrier_sync(1 + pair, 64);
    // dS, under the products of dV with the other warp's queries.
    const int other = side ^ 1;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ldmatrix(a[m], (p_at ^ 64 ^ (k * 32)) + m * 2048);
      accumulate(dv, a, do_tile, other * 32 + k * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int n = 2 * k + j;
        const float2 delta = *reinterpret_cast<const float2*>(&rows[stage][1][side * 32 + 8 * n + 2 * (lane % 4)]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float (&x)[4] = c[m][n], (&y)[4] = dp[m][n];
          ds[k][m][2 * j] = pack2(x[0] * (y[0] - delta.x), x[1] * (y[1] - delta.y));
          ds[k][m][2 * j + 1] = pack2(x[2] * (y[2] - delta.x), x[3] * (y[3] - delta.y));
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
        stmatrix((ds_at ^ (k * 32)) + m * 2048, ds[k][m][0], ds[k][m][1], ds[k][m][2], ds[k][m][3]);
    }
    named_barrier_sync(1 + pair, 64);
    if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(ds_full + 8 * stage);

#pragma unroll
    for (int k = 0; k < 2; ++k) accumulate(dk, ds[k], q_tile, side * 32 + k * 16);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ldmatrix(a[m], (ds_at ^ 64 ^ (k * 32)) + m * 2048);
      accumulate(dk, a, q_tile, other * 32 + k * 16);
    }
    __syncwarp();
    if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(empty + 8 * stage);

    // dQ of this tile: 32 queries x D / WARPS_D columns a warp, over all keys of the block.
    mbarrier_wait(ds_full + 8 * stage, parity);
    float dq[2][QN][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < QN; ++n) dq[m][n][0] = dq[m][n][1] = dq[m][n][2] = dq[m][n][3] = 0.f;
    {
      const int column = (warp % WARPS_D) * QN * 8;  // a multiple of 16
      const u32 a_at = columns_then_rows(ds_tile, lane) ^ ((warp / WARPS_D) * 64);
      const u32 b_at = rows_then_columns(k_tile + (column / 64) * BN * 128, lane) ^ ((column % 64) * 2);
#pragma unroll
      for (int k = 0; k < BN / 16; ++k) {
        u32 a[2][4];
        ldmatrix_transposed(a[0], a_at + k * 2048);
        ldmatrix_transposed(a[1], (a_at ^ 32) + k * 2048);
#pragma unroll
        for (int n = 0; n < QN / 2; ++n) {
          u32 b[4];
          ldmatrix_transposed(b, (b_at ^ (n * 32)) + k * 2048);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma(dq[m][2 * n], a[m], b[0], b[1]);
            mma(dq[m][2 * n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
    const long long padded = head * p.padded + padded0 + row0;
    int* turn = DETERMINISTIC ? p.turns + padded / BM : nullptr;
    if (DETERMINISTIC) {
      // Key tiles add in ascending order. A block's predecessors have lower block numbers, so they are running or done.
      if (threadIdx.x == 0) {
        while (load_acquire(turn) != within) {
        }
      }
      __syncthreads();
    }
    float* sum = p.dq_sum + padded * D + (warp * 2 * QN * 32 + lane) * 4;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < QN; ++n) add_global(sum + (m * QN + n) * 128, dq[m][n]);
    if (DETERMINISTIC) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) store_release(turn, within + 1);
    }
    row0 += BM;
    if (row0 == end_row) {
      row0 = first_m * BM;
      ++head;
    }
  }

  // Every warp has read K for its last dQ; then each stages its own 32 rows and HALF columns.
  __syncthreads();
  {
    const int column = side * HALF;
    const u32 offset = (column / 64) * BN * 128 + pair * 4096, flip = (column % 64) * 2;
    const u32 dk_at = rows_then_columns(k_tile + offset, lane) ^ flip,
              dv_at = rows_then_columns(v_tile + offset, lane) ^ flip;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < HALF / 16; ++d) {
        const float (&a)[4] = dk[m][2 * d], (&b)[4] = dk[m][2 * d + 1], (&x)[4] = dv[m][2 * d],
                    (&y)[4] = dv[m][2 * d + 1];
        stmatrix((dk_at ^ (d * 32)) + m * 2048, pack2(a[0] * p.scale, a[1] * p.scale),
                 pack2(a[2] * p.scale, a[3] * p.scale), pack2(b[0] * p.scale, b[1] * p.scale),
                 pack2(b[2] * p.scale, b[3] * p.scale));
        stmatrix((dv_at ^ (d * 32)) + m * 2048, pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(y[0], y[1]),
                 pack2(y[2], y[3]));
      }
  }
  __syncthreads();
  unsigned short* dk_out = static_cast<unsigned short*>(p.dk) + s.batch * p.dk_batch + kv_head * p.dk_head;
  unsigned short* dv_out = static_cast<unsigned short*>(p.dv) + s.batch * p.dv_batch + kv_head * p.dv_head;
  constexpr int CHUNKS = D / 8;
  for (int j = threadIdx.x; j < BN * CHUNKS; j += THREADS) {
    const int r = j / CHUNKS, chunk = j % CHUNKS, key = key0 + r;
    if (key >= s.k_rows) continue;
    const u32 offset = (chunk / 8) * BN * 128 + swizzled(r, chunk % 8);
    if (chunk * 8 < p.head_dim)
      *reinterpret_cast<uint4*>(dk_out + (s.k_start + key) * p.dk_row + chunk * 8) = load_shared_16(k_tile + offset);
    if (chunk * 8 < p.value_dim)
      *reinterpret_cast<uint4*>(dv_out + (s.k_start + key) * p.dv_row + chunk * 8) = load_shared_16(v_tile + offset);
  }
}

// Each block: one query tile and head. Undoes the order in which attention_backward<D, BN> summed, scales and rounds.
template <int D, int BN>
__global__ void __launch_bounds__(2 * BN) postprocess(const __grid_constant__ RowParams p) {
  constexpr int WARPS = BN / 16, WARPS_D = WARPS / 2, QN = D / WARPS_D / 8;
  __shared__ __align__(1024) unsigned char shared[kBlockM * D * 2];
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (!locate<kBlockM, true>(batch, tile, s, within, tiles)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long first = head * p.padded + padded_row<kBlockM>(batch, s, within);
  const float4* sum = reinterpret_cast<const float4*>(p.dq_sum + first * D) + warp * 2 * QN * 32 + lane;
  const int column = (warp % WARPS_D) * QN * 8;
  const u32 at =
      rows_then_columns(smem_address(shared) + (column / 64) * kBlockM * 128 + (warp / WARPS_D) * 32 * 128, lane) ^
      ((column % 64) * 2);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < QN; n += 2) {
      const float4 a = sum[(m * QN + n) * 32], b = sum[(m * QN + n + 1) * 32];
      stmatrix((at ^ (n * 16)) + m * 2048, pack2(a.x * p.scale, a.y * p.scale), pack2(a.z * p.scale, a.w * p.scale),
               pack2(b.x * p.scale, b.y * p.scale), pack2(b.z * p.scale, b.w * p.scale));
    }
  __syncthreads();
  unsigned short* dq = static_cast<unsigned short*>(p.dq) + s.batch * p.dq_batch + head * p.dq_head;
  constexpr int CHUNKS = D / 8;
  for (int j = threadIdx.x; j < kBlockM * CHUNKS; j += 2 * BN) {
    const int r = j / CHUNKS, chunk = j % CHUNKS, row = within * kBlockM + r;
    if (row < s.q_rows && chunk * 8 < p.dim)
      *reinterpret_cast<uint4*>(dq + (s.q_start + row) * p.dq_row + chunk * 8) =
          load_shared_16(smem_address(shared) + (chunk / 8) * kBlockM * 128 + swizzled(r, chunk % 8));
  }
}
