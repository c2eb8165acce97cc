// FlashAttention forward with mma.sync (Dao, "FlashAttention-2", 2023): TMA brings tiles, each warp keeps its query
// rows' output in registers. One thread block per query tile and head, two blocks a multiprocessor, so that one block's
// softmax runs under the other's products.
#include "memory.cuh"
#include "mma.cuh"
#include "seqlen.cuh"
#include "swizzle.cuh"
#include "tma.cuh"

using namespace attn;

struct Params {
  TensorMap q, k, v;  // coordinates: column, row, head, batch
  void* out;
  float* lse;
  const int* cu_q;  // null: dense
  const int* cu_k;
  long long out_row, out_head, out_batch;  // elements
  long long lse_head, lse_batch;
  int sequences, q_total, k_total;
  int heads, group;  // query heads; query heads per key head
  int tiles, section;
  int value_dim;
  float scale_log2;
  int unused;
};

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// D: head dim in shared memory (64 or 128; a smaller one is zero-padded by TMA). BM, BN: query and key tile. WARPS own
// BM / WARPS rows each. Q_REGISTERS keeps the queries in registers. LAZY: keep an old row maximum until the new one
// exceeds it by 8 in log2 units (exact after normalisation), which spares nearly every rescaling of the output.
template <int D, int BM, int BN, int WARPS, int BLOCKS, bool CAUSAL, bool Q_REGISTERS, int LAZY>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS) attention_forward(const __grid_constant__ Params p) {
  constexpr int THREADS = 32 * WARPS;
  constexpr int MT = BM / WARPS / 16;  // 16-row tiles of a warp
  constexpr int NT = BN / 8;           // 8-column tiles of the scores
  constexpr int KS = D / 16;           // steps of the inner dimension of Q K^T
  constexpr int DT = D / 8;            // 8-column tiles of the output
  constexpr int PANELS = D / 64;
  constexpr u32 Q_BYTES = BM * D * 2, KV_BYTES = BN * D * 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[9];
  // Read anew where needed: registers are scarcer than shared memory here.
  struct Where {
    int q_start, q_rows, k_start, k_rows, batch, row0, head, kv_head, shift;
  };
  __shared__ volatile Where where;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tile, head;
  if (CAUSAL) {
    sectioned(blockIdx.x, p.tiles, p.heads * (p.cu_q == nullptr ? p.sequences : 1), p.section, tile, head);
  } else {
    head = blockIdx.x / p.tiles;
    tile = blockIdx.x - head * p.tiles;
  }
  Sequence s;
  int within, tiles;
  const Batch batch{p.cu_q, p.cu_k, p.sequences, p.q_total, p.k_total};
  if (p.cu_q == nullptr) {
    // `head` runs over batch and heads here, `tile` over one sequence's tiles.
    s.batch = head / p.heads;
    head -= s.batch * p.heads;
    s.q_start = s.k_start = 0;
    s.q_rows = p.q_total;
    s.k_rows = p.k_total;
    within = tile;
    tiles = p.tiles;
  } else if (!locate<BM, true>(batch, tile, s, within, tiles)) {
    return;
  }
  if (CAUSAL) within = tiles - 1 - within;  // longest first
  const int row0 = within * BM;
  const int shift = s.k_rows - s.q_rows;  // causal: key j is visible to query i iff j <= i + shift

  int blocks = (s.k_rows + BN - 1) / BN;
  if (CAUSAL) blocks = max(0, min(blocks, (min(row0 + BM, s.q_rows) + shift + BN - 1) / BN));
  // Key tiles from here on have a key beyond the end, or one that some row of the tile must not see.
  int unmasked = s.k_rows / BN;
  if (CAUSAL) unmasked = min(unmasked, max(0, row0 + shift + 1) / BN);
  unmasked = min(unmasked, blocks);

  const u32 q_tile = smem_address(shared), k_tiles = q_tile + Q_BYTES, v_tiles = k_tiles + 2 * KV_BYTES;
  const u32 bars = smem_address(barriers);
  const u32 q_full = bars, k_full = bars + 8, v_full = bars + 24, k_empty = bars + 40, v_empty = bars + 56;
  if (threadIdx.x == 0) {
    mbarrier_init(q_full, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(v_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, WARPS * kWarpArrivals);
      mbarrier_init(v_empty + 8 * i, WARPS * kWarpArrivals);
    }
    mbarrier_init_fence();
    where.q_start = s.q_start;
    where.q_rows = s.q_rows;
    where.k_start = s.k_start;
    where.k_rows = s.k_rows;
    where.batch = s.batch;
    where.row0 = row0;
    where.head = head;
    where.kv_head = head / p.group;
    where.shift = shift;
  }
  __syncthreads();

  // The i-th key tile visited is number blocks - 1 - i; it lies in stage i % 2. Only thread 0 loads.
  auto load = [&](const TensorMap& map, u32 tiles_at, u32 full, int i) {
    const u32 at = tiles_at + (i & 1) * KV_BYTES, bar = full + 8 * (i & 1);
    mbarrier_expect(bar, KV_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      tma_load_4d(at + panel * BN * 128, map, bar, panel * 64, where.k_start + (blocks - 1 - i) * BN, where.kv_head,
                  where.batch);
  };
  if (threadIdx.x == 0 && blocks > 0) {
    mbarrier_expect(q_full, Q_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      tma_load_4d(q_tile + panel * BM * 128, p.q, q_full, panel * 64, s.q_start + row0, head, s.batch);
    load(p.k, k_tiles, k_full, 0);
    load(p.v, v_tiles, v_full, 0);
    if (blocks > 1) {
      load(p.k, k_tiles, k_full, 1);
      load(p.v, v_tiles, v_full, 1);
    }
  }

  float o[MT][DT][4];
  // Of each row: the maximum in use, in log2 units, and the sum of this thread's probabilities. The first maximum is
  // finite, since -inf less -inf would be NaN where a row sees no key.
  float base[MT][2], row_sum[MT][2];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    // Rows beyond the sequence start at +inf, so that whatever lies there never asks for a rescaling.
    const int row = row0 + (warp * MT + m) * 16 + lane / 4;
    base[m][0] = row < s.q_rows ? -1e37f : ATTN_INFINITY;
    base[m][1] = row + 8 < s.q_rows ? -1e37f : ATTN_INFINITY;
    row_sum[m][0] = row_sum[m][1] = 0.f;
#pragma unroll
    for (int d = 0; d < DT; ++d) o[m][d][0] = o[m][d][1] = o[m][d][2] = o[m][d][3] = 0.f;
  }
  const u32 q_at = rows_then_columns(q_tile + warp * MT * 16 * 128, lane);
  u32 q_held[Q_REGISTERS ? KS : 1][MT][4];
  if (blocks > 0) {
    mbarrier_wait(q_full, 0);
    if (Q_REGISTERS) {
#pragma unroll
      for (int k = 0; k < KS; ++k)
#pragma unroll
        for (int m = 0; m < MT; ++m)
          ldmatrix(q_held[Q_REGISTERS ? k : 0][m], (q_at ^ ((k % 4) * 32)) + (k / 4) * BM * 128 + m * 2048);
    }
  }

  auto step = [&](int i, auto masked) {
    constexpr bool MASKED = decltype(masked)::value;
    const int stage = i & 1, parity = (i >> 1) & 1;
    const int column0 = (blocks - 1 - i) * BN;
    float c[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;

    mbarrier_wait(k_full + 8 * stage, parity);
    const u32 k_at = columns_then_rows(k_tiles + stage * KV_BYTES, lane);
    {
      u32 a[2][MT][4], b[2][4];
      auto fetch_k = [&](int unit) {
        const int k = unit / (NT / 2), n = unit % (NT / 2);
        ldmatrix(b[unit & 1], (k_at ^ ((k % 4) * 32)) + (k / 4) * BN * 128 + n * 2048);
        if (!Q_REGISTERS && n == 0) {
#pragma unroll
          for (int m = 0; m < MT; ++m) ldmatrix(a[k & 1][m], (q_at ^ ((k % 4) * 32)) + (k / 4) * BM * 128 + m * 2048);
        }
      };
      fetch_k(0);
#pragma unroll
      for (int unit = 0; unit < KS * (NT / 2); ++unit) {
        const int k = unit / (NT / 2), n = unit % (NT / 2);
        if (unit + 1 < KS * (NT / 2)) fetch_k(unit + 1);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const u32(&q)[4] = Q_REGISTERS ? q_held[Q_REGISTERS ? k : 0][m] : a[k & 1][m];
          mma(c[m][2 * n], q, b[unit & 1][0], b[unit & 1][1]);
          mma(c[m][2 * n + 1], q, b[unit & 1][2], b[unit & 1][3]);
        }
      }
    }
    __syncwarp();
    if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(k_empty + 8 * stage);
    // The previous tile's values have been read by every warp long ago, or soon will have been.
    if (threadIdx.x == 0 && i > 0 && i + 1 < blocks) {
      mbarrier_wait(v_empty + 8 * (stage ^ 1), ((i - 1) >> 1) & 1);
      load(p.v, v_tiles, v_full, i + 1);
    }

    if (MASKED) {
      const int k_rows = where.k_rows, first = where.row0 + warp * MT * 16 + lane / 4, shift = where.shift;
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first + m * 16 + half * 8;
          // The first hidden column, counted from this thread's first one.
          const int limit = (CAUSAL ? min(k_rows, row + shift + 1) : k_rows) - column0 - 2 * (lane % 4);
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              if (8 * n + j >= limit) c[m][n][2 * half + j] = -ATTN_INFINITY;
        }
    }

    // Softmax.
    float high[MT][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = fmaxf(c[m][0][2 * half], c[m][0][2 * half + 1]);
        float y = fmaxf(c[m][1][2 * half], c[m][1][2 * half + 1]);
#pragma unroll
        for (int n = 2; n < NT; n += 2) {
          x = fmaxf(x, fmaxf(c[m][n][2 * half], c[m][n][2 * half + 1]));
          y = fmaxf(y, fmaxf(c[m][n + 1][2 * half], c[m][n + 1][2 * half + 1]));
        }
        x = fmaxf(x, y);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        high[m][half] = x * p.scale_log2;
        grown |= high[m][half] - base[m][half] > (LAZY ? 8.f : 0.f);
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float higher = fmaxf(base[m][half], high[m][half]);
          const float factor = exp2_mufu(base[m][half] - higher);
          base[m][half] = higher;
          row_sum[m][half] *= factor;
#pragma unroll
          for (int d = 0; d < DT; ++d) {
            o[m][d][2 * half] *= factor;
            o[m][d][2 * half + 1] *= factor;
          }
        }
    }
    mbarrier_wait(v_full + 8 * stage, parity);
    const u32 v_tile = v_tiles + stage * KV_BYTES;
    if (MASKED && i == 0 && column0 + BN > where.k_rows) {
      // What lies beyond the sequence may be NaN (a neighbour's), and 0 * NaN would reach us.
      zero_rows<BN, PANELS>(v_tile, where.k_rows - column0, threadIdx.x, THREADS);
      __syncthreads();
    }
    // Probabilities of 16 keys, as a left operand.
    auto exponentiate = [&](u32(&prob)[MT][4], int k) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float (&x)[4] = c[m][2 * k + j];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x[e] = exp2_mufu(fmaf(x[e], p.scale_log2, -base[m][e / 2]));
            row_sum[m][e / 2] += x[e];
          }
          prob[m][2 * j] = pack2(x[0], x[1]);
          prob[m][2 * j + 1] = pack2(x[2], x[3]);
        }
    };
    // Values. The exponentials of the next 16 keys run under the products of these.
    {
      const u32 v_at = rows_then_columns(v_tile, lane);
      u32 prob[2][MT][4], b[2][4];
      auto fetch = [&](int unit) {
        const int k = unit / (D / 16), d = unit % (D / 16);
        ldmatrix_transposed(b[unit & 1], (v_at ^ ((d % 4) * 32)) + (d / 4) * BN * 128 + k * 2048);
      };
      constexpr int UNITS = (BN / 16) * (D / 16);
      fetch(0);
      exponentiate(prob[0], 0);
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        const int k = unit / (D / 16), d = unit % (D / 16);
        if (unit + 1 < UNITS) fetch(unit + 1);
        const u32(&f)[4] = b[unit & 1];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          mma(o[m][2 * d], prob[k & 1][m], f[0], f[1]);
          mma(o[m][2 * d + 1], prob[k & 1][m], f[2], f[3]);
        }
        if (d == 0 && k + 1 < BN / 16) exponentiate(prob[(k + 1) & 1], k + 1);
      }
    }
    __syncwarp();
    if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(v_empty + 8 * stage);
    if (threadIdx.x == 0 && i + 2 < blocks) {
      mbarrier_wait(k_empty + 8 * stage, parity);
      load(p.k, k_tiles, k_full, i + 2);
    }
  };

  int i = 0;
#pragma unroll 1
  for (; i < blocks - unmasked; ++i) step(i, Yes{});
#pragma unroll 1
  for (; i < blocks; ++i) step(i, No{});

  // Normalise; stage the rows in the queries' tile (a warp reads and writes only its own rows of it).
  const u32 stage_at = rows_then_columns(q_tile + warp * MT * 16 * 128, lane);
  const int first_row = where.row0, q_rows = where.q_rows, q_start = where.q_start;
  const int head_at = where.head, batch_at = where.batch;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      inverse[half] = sum == 0.f ? 0.f : 1.f / sum;
      const int row = first_row + (warp * MT + m) * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && row < q_rows) {
        float* lse = p.lse + batch_at * p.lse_batch + head_at * p.lse_head + q_start + row;
        *lse = sum == 0.f ? -ATTN_INFINITY : base[m][half] * kLn2 + __logf(sum);
      }
    }
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      stmatrix((stage_at ^ ((d % 4) * 32)) + (d / 4) * BM * 128 + m * 2048,
               pack2(o[m][2 * d][0] * inverse[0], o[m][2 * d][1] * inverse[0]),
               pack2(o[m][2 * d][2] * inverse[1], o[m][2 * d][3] * inverse[1]),
               pack2(o[m][2 * d + 1][0] * inverse[0], o[m][2 * d + 1][1] * inverse[0]),
               pack2(o[m][2 * d + 1][2] * inverse[1], o[m][2 * d + 1][3] * inverse[1]));
    }
  }
  __syncwarp();
  unsigned short* out = static_cast<unsigned short*>(p.out) + batch_at * p.out_batch + head_at * p.out_head;
  constexpr int CHUNKS = D / 8;
#pragma unroll 4
  for (int j = lane; j < MT * 16 * CHUNKS; j += 32) {
    const int r = warp * MT * 16 + j / CHUNKS, chunk = j % CHUNKS;
    const int row = first_row + r;
    if (row < q_rows && chunk * 8 < p.value_dim) {
      *reinterpret_cast<uint4*>(out + (q_start + row) * p.out_row + chunk * 8) =
          load_shared_16(q_tile + (chunk / 8) * BM * 128 + swizzled(r, chunk % 8));
    }
  }
}
