// Online softmax over accumulator fragments: each thread owns two rows (see wgmma.cuh), a quad of threads shares them.
#pragma once
#include "arithmetic.cuh"

namespace attn {

// max and sum of a quad's two rows
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Running state of two rows. `sum` is of this thread's columns only, in two chains a row; the quad adds up at the end.
struct RowState {
  float max[2];    // what the exponents are relative to: the largest score up to THRESHOLD / scale_log2
  float limit[2];  // scores up to here need no new maximum
  float sum[4];

  // Rows that are not ours to judge (beyond the sequence) start at +inf and never ask for a rescale.
  __device__ __forceinline__ void reset(bool valid0, bool valid1) {
    max[0] = limit[0] = valid0 ? -ATTN_INFINITY : ATTN_INFINITY;
    max[1] = limit[1] = valid1 ? -ATTN_INFINITY : ATTN_INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
  }
};

// Whether a score of this thread may be above its row's limit: three-way integer maxima over the bits, half the
// instructions of a float maximum. Right where limits are not negative (bits of floats from +0 up are in order, all
// others are below); else, and for NaN, the answer is "may be".
template <int N>
__device__ __forceinline__ bool may_exceed(const float (&s)[N], const RowState& row) {
  const int limit0 = __float_as_int(row.limit[0]), limit1 = __float_as_int(row.limit[1]);
  int high[4] = {limit0, limit1, limit0, limit1};
#pragma unroll
  for (int i = 0; i < N; i += 2)
    high[i / 2 % 4] = __vimax3_s32(high[i / 2 % 4], __float_as_int(s[i]), __float_as_int(s[i + 1]));
  return max(high[0], high[2]) != limit0 || max(high[1], high[3]) != limit1 || (limit0 | limit1) < 0;
}

// Turns scores into exp2(score * scale_log2 - max * scale_log2), updates maximum and sum, and gives the factors by
// which earlier sums (done here) and outputs (the caller's) shrink; returns whether any differs from 1, alike across a
// warp.
//
// An old maximum is kept until the new one exceeds it by `headroom` (8 in log2 units, over scale_log2): the result is
// the same after normalisation, and nearly every step skips the rescale. Quick: look for that case first, for scores
// that are not masked.
template <bool Quick, int N>
__device__ __forceinline__ bool softmax_step(float (&s)[N], RowState& row, float (&factor)[2], float scale_log2,
                                             float headroom) {
  factor[0] = factor[1] = 1.f;
  bool rescale = false;
  if (!Quick || __any_sync(0xffffffffu, may_exceed(s, row))) {
    float high[4] = {row.max[0], s[1], row.max[1], s[3]};
#pragma unroll
    for (int i = 0; i < N; ++i) high[i & 3] = fmaxf(high[i & 3], s[i]);
    const float max0 = quad_max(fmaxf(high[0], high[1]));
    const float max1 = quad_max(fmaxf(high[2], high[3]));
    rescale = __any_sync(0xffffffffu, max0 > row.limit[0] || max1 > row.limit[1]);
    if (rescale) {
      const float old0 = row.max[0], old1 = row.max[1];
      row.max[0] = max0;
      row.max[1] = max1;
      row.limit[0] = max0 + headroom;
      row.limit[1] = max1 + headroom;
      factor[0] = old0 == max0 ? 1.f : exp2_mufu((old0 - max0) * scale_log2);
      factor[1] = old1 == max1 ? 1.f : exp2_mufu((old1 - max1) * scale_log2);
      row.sum[0] *= factor[0];
      row.sum[1] *= factor[0];
      row.sum[2] *= factor[1];
      row.sum[3] *= factor[1];
    }
  }
  // A row without a visible key so far has maximum -inf; any finite base gives exp2(-inf) = 0 there.
  const float base0 = row.max[0] == -ATTN_INFINITY ? 0.f : row.max[0] * scale_log2;
  const float base1 = row.max[1] == -ATTN_INFINITY ? 0.f : row.max[1] * scale_log2;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s[i] = exp2_mufu(fmaf(s[i], scale_log2, (i & 2) ? -base1 : -base0));
    row.sum[i & 3] += s[i];
  }
  return rescale;
}

}  // namespace attn
