// wgmma with both operands in shared memory and either of them transposed, beside wgmma.cuh's forms.
#pragma once
#include "wgmma.cuh"

namespace attn {

// The operands after the R accumulators are numbered I0 (= R) onwards.
template <int N>
struct WgmmaTransposed;

#define ATTN_WGMMA(N, R, I0, I1, I2, I3, I4)                                                                           \
  template <>                                                                                                          \
  struct WgmmaTransposed<N> {                                                                                          \
    /* d[O..O+N/2) (+)= A B; A is M-major where A_TRANSPOSED is 1, B is N-major where B_TRANSPOSED is 1. */            \
    template <int O, int A_TRANSPOSED, int B_TRANSPOSED, int TOTAL>                                                    \
    static __device__ __forceinline__ void ss(float (&d)[TOTAL], u64 a, u64 b, int accumulate) {                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                   \
                   "k16.f32." ATTN_WGMMA_TYPE "." ATTN_WGMMA_TYPE " {" ATTN_REGS_##R "}, %" #I0 ", %" #I1              \
                                                                                     ", p, 1, 1, %" #I3 ", %" #I4 ";}" \
                   : ATTN_ACC_##R                                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));                           \
    }                                                                                                                  \
  };
ATTN_WGMMA(64, 32, 32, 33, 34, 35, 36)
ATTN_WGMMA(80, 40, 40, 41, 42, 43, 44)
#undef ATTN_WGMMA

}  // namespace attn
