// What sm90_forward.cu does with a finished tile.
#pragma once
#include "forward_products.cuh"
#include "named_barrier.cuh"

namespace attn {

// Ends a tile of one warpgroup: normalises, stages O where Q was, and stores it; or writes a split's part as it is. The
// warpgroup has its own barrier `together`; `in_tile` is this thread's first row in the tile, `row0` and `row1` are its
// queries.
__device__ __forceinline__ void store_tile(const Params& p, const Tile& tile, float (&o)[HEAD_DIM_V / 2],
                                           const RowState& row, int wg, int in_tile, int row0, int row1, u32 q_tile,
                                           int together) {
  const int thread = threadIdx.x & 127;
  const int warp = thread / 32;
  const int lane = thread & 31;
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
      const u32 address = q_tile + i / 4 * kQPanel + swizzled(r, chunk);
      stmatrix(address, pack2(o[8 * i], o[8 * i + 1]), pack2(o[8 * i + 2], o[8 * i + 3]),
               pack2(o[8 * i + 4], o[8 * i + 5]), pack2(o[8 * i + 6], o[8 * i + 7]));
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
        const uint4 value = load_shared_16(q_tile + chunk / 8 * kQPanel + r * 128 + ((chunk % 8 ^ (r & 7)) << 4));
        const long long token = static_cast<long long>(tile.q_offset) + first_row + r;
        *reinterpret_cast<uint4*>(p.out + (token * p.heads + tile.head) * p.head_dim_v + chunk * 8) = value;
      }
    }
    named_barrier_sync(together, 128);  // every thread is done reading O
  }
#endif
}

}  // namespace attn
