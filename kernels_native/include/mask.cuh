// Masks over accumulator fragments.
#pragma once

namespace attn {

// Tags for what is known when the code is built.
struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// Hides the columns from `limit0` (row r) and `limit1` (row r + 8) on. Limits are relative to this thread's first
// column, so that each comparison is against a constant. A select, not an add: a hidden NaN must go too.
template <int N>
__device__ __forceinline__ void mask_columns(float (&s)[N], int limit0, int limit1) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = 8 * (i / 4) + i % 2;
    if (column >= ((i & 2) ? limit1 : limit0)) s[i] = __int_as_float(0xff800000);
  }
}

}  // namespace attn
