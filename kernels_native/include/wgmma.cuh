// Warpgroup matrix multiply-accumulate (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate").
//
// A warpgroup computes D[64, N] += A[64, 16] * B[16, N] with fp32 accumulators. Thread t holds in d[i] the element
//   row 16*(t/32) + (t%32)/4 + 8*((i/2)%2), column 8*(i/4) + 2*(t%4) + i%2,
// and the register form of A packs two neighbouring columns a register: rows r, r+8 at columns c, then at c+8. So the
// accumulators 8k..8k+7 of one product, rounded to 16 bits, are the A operand of k-step k of the next.
#pragma once
#include "wgmma_descriptor.cuh"

namespace attn {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` committed groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait or an issue; no instruction.
template <int N>
__device__ __forceinline__ void registers_fence(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int REGISTERS>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#ifdef ATTN_FP16
#define ATTN_WGMMA_TYPE "f16"
#else
#define ATTN_WGMMA_TYPE "bf16"
#endif

// clang-format off
#define ATTN_REGS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ATTN_REGS_16 ATTN_REGS_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define ATTN_REGS_24 ATTN_REGS_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define ATTN_REGS_32 ATTN_REGS_24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_REGS_40 ATTN_REGS_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define ATTN_REGS_48 ATTN_REGS_40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define ATTN_REGS_56 ATTN_REGS_48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define ATTN_REGS_64 ATTN_REGS_56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define ATTN_REGS_72 ATTN_REGS_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define ATTN_REGS_80 ATTN_REGS_72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define ATTN_REGS_88 ATTN_REGS_80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define ATTN_REGS_96 ATTN_REGS_88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define ATTN_REGS_104 ATTN_REGS_96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define ATTN_REGS_112 ATTN_REGS_104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define ATTN_REGS_120 ATTN_REGS_112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define ATTN_REGS_128 ATTN_REGS_120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define ATTN_ACC_8 "+f"(d[O + 0]), "+f"(d[O + 1]), "+f"(d[O + 2]), "+f"(d[O + 3]), "+f"(d[O + 4]), "+f"(d[O + 5]), "+f"(d[O + 6]), "+f"(d[O + 7])
#define ATTN_ACC_16 ATTN_ACC_8, "+f"(d[O + 8]), "+f"(d[O + 9]), "+f"(d[O + 10]), "+f"(d[O + 11]), "+f"(d[O + 12]), "+f"(d[O + 13]), "+f"(d[O + 14]), "+f"(d[O + 15])
#define ATTN_ACC_24 ATTN_ACC_16, "+f"(d[O + 16]), "+f"(d[O + 17]), "+f"(d[O + 18]), "+f"(d[O + 19]), "+f"(d[O + 20]), "+f"(d[O + 21]), "+f"(d[O + 22]), "+f"(d[O + 23])
#define ATTN_ACC_32 ATTN_ACC_24, "+f"(d[O + 24]), "+f"(d[O + 25]), "+f"(d[O + 26]), "+f"(d[O + 27]), "+f"(d[O + 28]), "+f"(d[O + 29]), "+f"(d[O + 30]), "+f"(d[O + 31])
#define ATTN_ACC_40 ATTN_ACC_32, "+f"(d[O + 32]), "+f"(d[O + 33]), "+f"(d[O + 34]), "+f"(d[O + 35]), "+f"(d[O + 36]), "+f"(d[O + 37]), "+f"(d[O + 38]), "+f"(d[O + 39])
#define ATTN_ACC_48 ATTN_ACC_40, "+f"(d[O + 40]), "+f"(d[O + 41]), "+f"(d[O + 42]), "+f"(d[O + 43]), "+f"(d[O + 44]), "+f"(d[O + 45]), "+f"(d[O + 46]), "+f"(d[O + 47])
#define ATTN_ACC_56 ATTN_ACC_48, "+f"(d[O + 48]), "+f"(d[O + 49]), "+f"(d[O + 50]), "+f"(d[O + 51]), "+f"(d[O + 52]), "+f"(d[O + 53]), "+f"(d[O + 54]), "+f"(d[O + 55])
#define ATTN_ACC_64 ATTN_ACC_56, "+f"(d[O + 56]), "+f"(d[O + 57]), "+f"(d[O + 58]), "+f"(d[O + 59]), "+f"(d[O + 60]), "+f"(d[O + 61]), "+f"(d[O + 62]), "+f"(d[O + 63])
#define ATTN_ACC_72 ATTN_ACC_64, "+f"(d[O + 64]), "+f"(d[O + 65]), "+f"(d[O + 66]), "+f"(d[O + 67]), "+f"(d[O + 68]), "+f"(d[O + 69]), "+f"(d[O + 70]), "+f"(d[O + 71])
#define ATTN_ACC_80 ATTN_ACC_72, "+f"(d[O + 72]), "+f"(d[O + 73]), "+f"(d[O + 74]), "+f"(d[O + 75]), "+f"(d[O + 76]), "+f"(d[O + 77]), "+f"(d[O + 78]), "+f"(d[O + 79])
#define ATTN_ACC_88 ATTN_ACC_80, "+f"(d[O + 80]), "+f"(d[O + 81]), "+f"(d[O + 82]), "+f"(d[O + 83]), "+f"(d[O + 84]), "+f"(d[O + 85]), "+f"(d[O + 86]), "+f"(d[O + 87])
#define ATTN_ACC_96 ATTN_ACC_88, "+f"(d[O + 88]), "+f"(d[O + 89]), "+f"(d[O + 90]), "+f"(d[O + 91]), "+f"(d[O + 92]), "+f"(d[O + 93]), "+f"(d[O + 94]), "+f"(d[O + 95])
#define ATTN_ACC_104 ATTN_ACC_96, "+f"(d[O + 96]), "+f"(d[O + 97]), "+f"(d[O + 98]), "+f"(d[O + 99]), "+f"(d[O + 100]), "+f"(d[O + 101]), "+f"(d[O + 102]), "+f"(d[O + 103])
#define ATTN_ACC_112 ATTN_ACC_104, "+f"(d[O + 104]), "+f"(d[O + 105]), "+f"(d[O + 106]), "+f"(d[O + 107]), "+f"(d[O + 108]), "+f"(d[O + 109]), "+f"(d[O + 110]), "+f"(d[O + 111])
#define ATTN_ACC_120 ATTN_ACC_112, "+f"(d[O + 112]), "+f"(d[O + 113]), "+f"(d[O + 114]), "+f"(d[O + 115]), "+f"(d[O + 116]), "+f"(d[O + 117]), "+f"(d[O + 118]), "+f"(d[O + 119])
#define ATTN_ACC_128 ATTN_ACC_120, "+f"(d[O + 120]), "+f"(d[O + 121]), "+f"(d[O + 122]), "+f"(d[O + 123]), "+f"(d[O + 124]), "+f"(d[O + 125]), "+f"(d[O + 126]), "+f"(d[O + 127])
// clang-format on

// The operands after the R accumulators are numbered I0 (= R) onwards.
template <int N>
struct Wgmma;

#define ATTN_WGMMA(N, R, I0, I1, I2, I3, I4, I5, I6)                                                         \
  template <>                                                                                                \
  struct Wgmma<N> {                                                                                          \
    /* d[O..O+N/2) (+)= A B, both in shared memory, K-major. */                                              \
    template <int O, int TOTAL>                                                                              \
    static __device__ __forceinline__ void ss(float (&d)[TOTAL], u64 a, u64 b, int accumulate) {             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                   "k16.f32." ATTN_WGMMA_TYPE "." ATTN_WGMMA_TYPE " {" ATTN_REGS_##R "}, %" #I0 ", %" #I1    \
                                                                                     ", p, 1, 1, 0, 0;}"     \
                   : ATTN_ACC_##R                                                                            \
                   : "l"(a), "l"(b), "r"(accumulate));                                                       \
    }                                                                                                        \
    /* d[O..O+N/2) (+)= A B, A in registers, B in shared memory, MN-major (TRANSPOSED 1) or K-major (0). */  \
    template <int O, int TRANSPOSED, int TOTAL>                                                              \
    static __device__ __forceinline__ void rs(float (&d)[TOTAL], const u32 (&a)[4], u64 b, int accumulate) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                   "k16.f32." ATTN_WGMMA_TYPE "." ATTN_WGMMA_TYPE " {" ATTN_REGS_##R                         \
                   "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";}"              \
                   : ATTN_ACC_##R                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSED));  \
    }                                                                                                        \
  };
ATTN_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
ATTN_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
ATTN_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
ATTN_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
ATTN_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
ATTN_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
ATTN_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
ATTN_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
ATTN_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
ATTN_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
ATTN_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
ATTN_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
ATTN_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
ATTN_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
ATTN_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
ATTN_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef ATTN_WGMMA

}  // namespace attn
