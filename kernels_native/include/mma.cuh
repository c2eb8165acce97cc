// Warp-level matrix multiply-accumulate with 16-bit operands (PTX ISA, "mma.m16n8k16" and "ldmatrix").
//
// With g = lane / 4 and t = lane % 4, a thread holds of the accumulator rows g (c[0], c[1]) and g + 8 (c[2], c[3]) at
// columns 2t and 2t + 1; of A (16 x 16) the same rows and columns in a[0], a[1], and columns 8 + 2t, 9 + 2t in a[2],
// a[3]; of B (16 x 8) rows 2t, 2t + 1 (b[0]) and 8 + 2t, 9 + 2t (b[1]) of column g. So two neighbouring accumulators,
// rounded to 16 bits, are an A operand.
#pragma once
#include "arithmetic.cuh"

namespace attn {

// Four 8 x 8 matrices; lanes 8i..8i+7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void stmatrix(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// Four 8 x 8 matrices, each stored transposed.
__device__ __forceinline__ void stmatrix_transposed(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef ATTN_FP16
#define ATTN_MMA_TYPE "f16"
#else
#define ATTN_MMA_TYPE "bf16"
#endif
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ATTN_MMA_TYPE "." ATTN_MMA_TYPE
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace attn
