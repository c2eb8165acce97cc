// Online softmax over accumulator fragments: each thread owns two rows (see wgmma.cuh), a quad of threads shares them.
#pragma once
#include "mbarrier.cuh"

namespace attn {

#define ATTN_INFINITY __int_as_float(0x7f800000)
constexpr float kLn2 = 0.693147180559945f;

__device__ __forceinline__ float exp2_mufu(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_mufu(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x on the FMA pipe for x <= 64: the integer part goes into the exponent bits, a cubic covers [-1/2, 1/2].
// Relative error 7.5e-5, a twenty-fifth of bf16's rounding; below 2^-126 it gives about 2^-126 instead of 0.
__device__ __forceinline__ float exp2_fma(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  x = fmaxf(x, -126.f);
  const float shifted = x + kRound;
  const float fraction = x - (shifted - kRound);
  float y = fmaf(fraction, 0.05517167f, 0.24261113f);
  y = fmaf(y, fraction, 0.69326099f);
  y = fmaf(y, fraction, 0.99992807f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// Two floats rounded to the 16-bit type, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
#ifdef ATTN_FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

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
  float max[2];
  float sum[4];

  // Rows that are not ours to judge (beyond the sequence) start at +inf and never ask for a rescale.
  __device__ __forceinline__ void reset(bool valid0, bool valid1) {
    max[0] = valid0 ? -ATTN_INFINITY : ATTN_INFINITY;
    max[1] = valid1 ? -ATTN_INFINITY : ATTN_INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
  }
};

// Turns scores into exp2(score * scale_log2 - max * scale_log2), updates maximum and sum, and gives the factors by which
// earlier sums (done here) and outputs (the caller's) shrink; returns whether any differs from 1, alike across a warp.
//
// Threshold > 0 keeps an old maximum until the new one exceeds it by that much in log2 units: the result is the same
// after normalisation, and nearly every step skips the rescale. Of every `Every` column pairs `Poly` go to exp2_fma.
template <int Threshold, int Poly, int Every, int N>
__device__ __forceinline__ bool softmax_step(float (&s)[N], RowState& row, float (&factor)[2], float scale_log2) {
  float high[4] = {row.max[0], s[1], row.max[1], s[3]};
#pragma unroll
  for (int i = 0; i < N; ++i) high[i & 3] = fmaxf(high[i & 3], s[i]);
  const float max0 = quad_max(fmaxf(high[0], high[1]));
  const float max1 = quad_max(fmaxf(high[2], high[3]));
  bool rescale = true;
  factor[0] = factor[1] = 1.f;
  if (Threshold > 0) {
    const bool grown = (max0 - row.max[0]) * scale_log2 > Threshold || (max1 - row.max[1]) * scale_log2 > Threshold;
    rescale = __any_sync(0xffffffffu, grown);
  }
  if (rescale) {
    const float old0 = row.max[0], old1 = row.max[1];
    row.max[0] = max0;
    row.max[1] = max1;
    factor[0] = old0 == max0 ? 1.f : exp2_mufu((old0 - max0) * scale_log2);
    factor[1] = old1 == max1 ? 1.f : exp2_mufu((old1 - max1) * scale_log2);
    row.sum[0] *= factor[0];
    row.sum[1] *= factor[0];
    row.sum[2] *= factor[1];
    row.sum[3] *= factor[1];
  }
  // A row without a visible key so far has maximum -inf; any finite base gives exp2(-inf) = 0 there.
  const float base0 = row.max[0] == -ATTN_INFINITY ? 0.f : row.max[0] * scale_log2;
  const float base1 = row.max[1] == -ATTN_INFINITY ? 0.f : row.max[1] * scale_log2;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = fmaf(s[i], scale_log2, (i & 2) ? -base1 : -base0);
    s[i] = (i >> 2) % Every < Poly ? exp2_fma(x) : exp2_mufu(x);
    row.sum[i & 3] += s[i];
  }
  return rescale;
}

}  // namespace attn
