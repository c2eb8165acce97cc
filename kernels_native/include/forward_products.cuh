// The two products of sm90_forward.cu, S = Q K^T and O += P V, as one warpgroup issues them.
#pragma once
#include "forward_tile.cuh"
#include "mma.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"
#include "wgmma.cuh"

namespace attn {

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
      ldmatrix(fragments[i], q_tile + i / 4 * kQPanel + swizzled(r, chunk));
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
    for (int j = 0; j < 4; ++j) weights[i][j] = pack2(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

__device__ __forceinline__ void rescale_output(float (&o)[HEAD_DIM_V / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / 2; ++i) o[i] *= factor[i >> 1 & 1];
}

}  // namespace attn
