// Arithmetic of single instructions that C++ has no words for, and the 16-bit type (bf16, or fp16 with ATTN_FP16).
#pragma once
#include "mbarrier.cuh"

namespace attn {

#define ATTN_INFINITY __int_as_float(0x7f800000)
constexpr float kLn2 = 0.693147180559945f;
constexpr float kLog2e = 1.44269504088896341f;

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

// Two floats rounded to the 16-bit type, the first in the low half; and back.
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 packed;
#ifdef ATTN_FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

__device__ __forceinline__ float2 unpack2(u32 packed) {
  float2 value;
#ifdef ATTN_FP16
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(packed));
#else
  value.x = __uint_as_float(packed << 16);
  value.y = __uint_as_float(packed & 0xffff0000u);
#endif
  return value;
}

}  // namespace attn
